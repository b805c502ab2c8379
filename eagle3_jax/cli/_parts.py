"""Targets, drafters and acceptance rules by the names that the command line gives them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._streaming import hint
from eagle3_jax.files.sources import LOOKUP_FIRST, is_named, named_drafter, without_lookup

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from eagle3_jax import LoadedDrafter, LoadedTarget
    from eagle3_jax.types import Drafter, Verifier

PAGE = "docs/extending.md"
_FORM = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)(=(?P<argument>.*))?", re.DOTALL)
# Acceptance rules with a name: public names of the library, built without arguments.
RULES = {"block": "BlockVerification", "typical": "TypicalAcceptance"}


def read_target(source: str | None, dtype: str, mesh: Mesh | None = None, *, weights: str = "dense") -> LoadedTarget:
    """Loads the target that ``--target`` names."""
    from eagle3_jax import LoadedTarget, load_target

    if source == "":
        raise Misuse("--target is empty; name a directory or a hub id, or leave it out for the bundled target")
    part = find_own("--target", source)
    if part is None:
        return load_target(source, dtype=dtype, weights=weights, mesh=mesh)
    if weights != "dense":
        raise Misuse(f"--weights {weights}: --target {source} makes its own; leave --weights out")
    loaded = part.call("--target", "an eagle3_jax.LoadedTarget", dtype=dtype)
    if not isinstance(loaded, LoadedTarget):
        raise Misuse(f"--target {source} gave {type(loaded).__name__}; expected an eagle3_jax.LoadedTarget, see {PAGE}")
    return loaded


def fetch_first(*sources: str | None) -> None:
    """Downloads published models, before a spinner takes the line that the download writes to."""
    from eagle3_jax.files.published import PUBLISHED, cached_path, is_published
    from eagle3_jax.files.sources import locate

    for source in sources:
        if source is None or not is_published(source):
            continue
        model = PUBLISHED[source]
        if not cached_path(source).is_file():
            hint(f"{source} is {model.contents}, {model.licence}: {model.megabytes} MB are downloaded once")
        locate(source, "target")


def default_drafter(target: str | None, weights: str) -> str | None:
    """Returns the drafter of `generate` and `chat` for a command line without ``--drafter``.

    ``None`` is the bundled head, which fits the bundled target only. A published model has a head, and other targets
    get n-grams of the text, except on CPUs: only with int8 weights is verifying four tokens about as fast as one.
    """
    import jax

    from eagle3_jax.files.published import is_published

    if target is None:
        return None
    on_cpu = jax.default_backend() == "cpu"
    if on_cpu and weights != "int8":
        return "none"
    if is_published(target):
        return f"{LOOKUP_FIRST}{target}" if on_cpu else target  # on a GPU the two together are not measured
    return "ngram"


def read_drafter(
    source: str | None, *, target: LoadedTarget, target_source: str | None, layer_ids: str | None = None
) -> LoadedDrafter | Drafter[Any] | None:
    """Loads the drafter that ``--drafter`` names; ``None`` for plain decoding."""
    from eagle3_jax import Fallback, LoadedDrafter, load_drafter
    from eagle3_jax.drafters import NGram
    from eagle3_jax.files.published import is_published

    if source == "":
        raise Misuse("--drafter is empty; name a directory or a hub id, or leave it out for the bundled head")
    if source is not None and without_lookup(source) != source and not Path(source).exists():
        head = read_drafter(without_lookup(source), target=target, target_source=target_source, layer_ids=layer_ids)
        if not isinstance(head, LoadedDrafter):
            raise Misuse(f"--drafter {source}: expected {LOOKUP_FIRST} and a head, such as {LOOKUP_FIRST}./head")
        return Fallback.of(NGram(min_ngram=2), head)
    has_name = source is not None and is_named(source)
    part = None if has_name else find_own("--drafter", source)
    if layer_ids is not None and (has_name or part is not None):
        raise Misuse(f"--layer-ids is about heads from files, and --drafter {source} has none; leave it out")
    if source is not None and has_name:
        return named_drafter(source, target)
    if part is not None:
        value: Any = part.value
        if isinstance(value, LoadedDrafter) or (hasattr(value, "propose") and not isinstance(value, type)):
            return value
        return part.call("--drafter", "an eagle3_jax.LoadedDrafter or a drafter", target=target)
    if source is None and is_published(target_source):
        source = target_source
    if source is None and target_source is not None:
        raise Misuse(
            "--target was given without --drafter, and the bundled head fits the bundled target only; "
            "add --drafter DIRECTORY, --drafter ngram or --drafter none"
        )
    return load_drafter(source, target=target, layer_ids=layer_ids)


def read_verifier(source: str | None) -> Verifier | None:
    """Returns the acceptance rule that ``--verifier`` names; ``None`` for the exact one."""
    import eagle3_jax

    if source is None:
        return None
    if source in RULES:
        return getattr(eagle3_jax, RULES[source])()
    part = find_own("--verifier", source)
    if part is None:
        raise Misuse(
            f"--verifier {source}: expected {', '.join(map(repr, RULES))}, or one of your own, module:name; see {PAGE}"
        )
    return part.value


class OwnPart(NamedTuple):
    """An object or a function in the user's own module."""

    value: Any  #: The object.
    argument: str | None  #: The text after ``=``; ``None`` without one.
    text: str  #: The option's value as it was typed.

    def call(self, option: str, result: str, **context: Any) -> Any:
        """Calls the function with its argument and further ones by name."""
        if not callable(self.value) or isinstance(self.value, type):
            takes = ", ".join(["argument", *context])
            raise Misuse(f"{option} {self.text}: expected a function of ({takes}) that returns {result}; see {PAGE}")
        return self.value(self.argument, **context)


def find_own(option: str, source: str | None) -> OwnPart | None:
    """Imports the object that ``module:name`` or ``module:name=argument`` names.

    Modules are searched in the current directory first, then among the installed packages.

    Args:
        option: The option, for messages.
        source: The value of the option.

    Returns:
        The object; ``None`` for a value of another form and for the name of an existing directory.
    """
    match = _FORM.fullmatch(source or "")
    if match is None or Path(str(source)).exists():
        return None
    module = match["module"]
    name = match["name"]
    here = str(Path.cwd())
    if here not in sys.path:  # the path of a console script lacks it
        sys.path.insert(0, here)
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # the user's module may fail in any way
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise Misuse(
                f"{option} {source}: there is no module {error.name!r} in the current directory or among the installed "
                f"packages; see {PAGE}"
            ) from None
        raise Misuse(
            f"{option} {source}: {module} cannot be imported ({type(error).__name__}: {error}); "
            f"`python -c 'import {module}'` shows where"
        ) from error
    if not hasattr(imported, name):
        raise Misuse(f"{option} {source}: {module} has no {name!r}; see {PAGE}")
    return OwnPart(getattr(imported, name), match["argument"], str(source))
