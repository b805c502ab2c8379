"""Parts of the user's own: ``module:name`` on the command line, an object or a function in a Python module."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_jax.cli._errors import Misuse

PAGE = "docs/extending.md"
_FORM = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)(=(?P<argument>.*))?", re.DOTALL)


class Own(NamedTuple):
    """What ``module:name=argument`` names.

    Attributes:
        value: The object.
        argument: The text behind the sign; ``None`` without one.
        text: As it was typed.
    """

    value: Any
    argument: str | None
    text: str


def own(option: str, source: str | None) -> Own | None:
    """The object that an option names; ``None`` where its value is of another form, or a directory of that name.

    Modules are looked for in the current directory first, then among what is installed.

    Raises:
        Misuse: There is no such module, it cannot be imported, or it has nothing of that name.
    """
    match = _FORM.fullmatch(source or "")
    if match is None or Path(str(source)).exists():
        return None
    module, name = match["module"], match["name"]
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not look there by itself
        sys.path.insert(0, here)
    try:
        found = importlib.import_module(module)
    except Exception as error:  # theirs may fail in any way
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise Misuse(
                f"{option} {source}: there is no module {error.name!r} in the current directory or among the installed "
                f"packages; see {PAGE}"
            ) from None
        raise Misuse(
            f"{option} {source}: {module} cannot be imported ({type(error).__name__}: {error}); "
            f"`python -c 'import {module}'` shows where"
        ) from error
    if not hasattr(found, name):
        raise Misuse(f"{option} {source}: {module} has no {name!r}; see {PAGE}")
    return Own(getattr(found, name), match["argument"], str(source))


def called(option: str, part: Own, wanted: str, **context: Any) -> Any:
    """What the function named gives for its argument.

    Args:
        option: For messages.
        part: Names a function of ``(argument, **context)``.
        wanted: What it should return, for messages.
        context: Further arguments, by name.

    Raises:
        Misuse: It cannot be called so.
    """
    takes = ", ".join(["argument", *context])
    if not callable(part.value) or isinstance(part.value, type):
        raise Misuse(f"{option} {part.text}: expected a function of ({takes}) that returns {wanted}; see {PAGE}")
    return part.value(part.argument, **context)
