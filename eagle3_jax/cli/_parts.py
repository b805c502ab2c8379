"""Targets, drafters and acceptance rules by the names that the command line gives them."""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._streaming import hint
from eagle3_jax.files.sources import (
    LOOKUP_FIRST,
    is_named,
    locate,
    similar_drafters,
    without_lookup,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from eagle3_jax import LoadedDrafter, LoadedTarget
    from eagle3_jax.cli._options import ModelOptions
    from eagle3_jax.types import Drafter, Verifier

PAGE = "docs/extending.md"
_FORM = re.compile(
    r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*)(=(?P<argument>.*))?",
    re.DOTALL,
)
# Acceptance rules with a name: public names of the library, built without arguments.
RULES = {"block": "BlockVerification", "typical": "TypicalAcceptance"}
# Drafters that a command may choose for a target, in words.
_CHOICES = {
    "none": (
        "plain decoding; on a CPU verifying drafts costs more than it saves, except with --weights"
        " int8"
    ),
    "ngram": "drafts are n-grams of the text; --drafter names a head",
}


def read_target(
    source: str | None, dtype: str, mesh: Mesh | None = None, *, weights: str = "dense"
) -> LoadedTarget:
    """Loads the target that ``--target`` names."""
    from eagle3_jax import LoadedTarget, load_target

    part = find_own("--target", source)
    if part is None:
        return load_target(source, dtype=dtype, weights=weights, mesh=mesh)
    if weights != "dense":
        raise Misuse(f"--weights {weights}: --target {source} makes its own; leave --weights out")
    loaded = part.call("--target", "an eagle3_jax.LoadedTarget", dtype=dtype)
    if not isinstance(loaded, LoadedTarget):
        raise Misuse(
            f"--target {source} gave {type(loaded).__name__}; expected an eagle3_jax.LoadedTarget,"
            f" see {PAGE}"
        )
    return loaded


def fetch_first(target: str | None, *drafters: str | None) -> None:
    """Finds the models of a command line and downloads them if need be, before anything is loaded.

    A wrong name is refused at once, and no spinner takes the line that a download writes to.
    """
    from eagle3_jax.files.published import PUBLISHED, cached_path, is_published
    from eagle3_jax.theory.known_models import similar_targets

    heads = [
        ("--drafter", drafter)
        for drafter in drafters
        if not is_named(without_lookup(drafter or ""))
    ]
    for option, source in (("--target", target), *heads):
        if source == "":
            raise Misuse(
                f"{option} is empty; name a directory or a hub id, or leave it out for the"
                " bundled one"
            )
        if source is None or find_own(option, source) is not None:
            continue
        if option == "--target" and is_published(source) and not cached_path(source).is_file():
            model = PUBLISHED[source]
            hint(
                f"{source} is {model.contents}, {model.licence}: {model.megabytes} MB are"
                " downloaded once"
            )

        if option == "--target":
            locate(source, "target", suggest=similar_targets)
        else:
            head = source if Path(source).exists() else without_lookup(source)
            locate(head, "eagle3", suggest=similar_drafters)


def chosen_models(
    models: ModelOptions, dtype: str | None, *, shows_drafts: bool = False
) -> tuple[ModelOptions, str]:
    """Returns the models of `generate`, `chat` and `serve` with their drafter, and the precision.

    The models are found or downloaded first. What a command line leaves open is chosen, and a user
    who named a target is told about it.

    Args:
        models: The models of the command line.
        dtype: Its precision.
        shows_drafts: Whether the head of a target drafts where plain decoding may be faster.
    """
    from eagle3_jax.files.published import is_published

    fetch_first(models.target, models.drafter)
    if models.drafter is None:
        drafter = default_drafter(models.target, models.weights)
        if shows_drafts and drafter == "none" and is_published(models.target):
            drafter = models.target
        drafter = announced(drafter, models.target)
        models = dataclasses.replace(models, drafter=drafter)
    return models, dtype or default_dtype(models.target, models.weights)


def default_dtype(target: str | None, weights: str = "dense") -> str:
    """Returns the precision of `generate`, `chat` and `serve` without ``--dtype``.

    Weights in bfloat16 stay so, except on CPUs: most have no products of bfloat16, so that float32
    is faster there.
    """
    import jax

    from eagle3_jax.conversion import prepared

    if find_own("--target", target) is not None:
        return "float32"
    if prepared.read_target(locate(target, "target"), weights).dtype != "bfloat16":
        return "float32"
    if jax.default_backend() != "cpu":
        return "bfloat16"
    if target is not None and weights == "dense":
        hint(
            f"{target} is stored in bfloat16 and computed in float32, which is faster on most CPUs"
            " and takes twice the memory; --dtype bfloat16 keeps it as it is"
        )
    return "float32"


def default_drafter(target: str | None, weights: str) -> str | None:
    """Returns the drafter of `generate`, `chat` and `serve` without ``--drafter``.

    It is the one that is measured by default, except on CPUs: only with int8 weights is verifying
    four tokens about as fast as one, and n-grams then help a head.
    """
    import jax

    drafter = measured_drafter(target)
    if target is None or jax.default_backend() != "cpu":
        return drafter
    if weights != "int8":
        return "none"
    return f"{LOOKUP_FIRST}{drafter}" if drafter == target else drafter


def measured_drafter(target: str | None) -> str | None:
    """Returns the drafter of `bench` and `tune` for a command line without ``--drafter``.

    ``None`` is the bundled head, which fits the bundled target only. A published model has a head,
    and other targets get n-grams of the text.
    """
    from eagle3_jax.files.published import is_published

    return target if target is None or is_published(target) else "ngram"


def announced(drafter: str | None, target: str | None) -> str | None:
    """Returns a drafter that a command chose, after it told a user who named a target."""
    if target is not None:
        hint(f"no --drafter: {_CHOICES.get(drafter or '', f'{drafter} drafts')}")
    return drafter


def read_drafter(
    source: str | None, *, target: LoadedTarget, layer_ids: str | None = None
) -> LoadedDrafter | Drafter[Any] | None:
    """Loads the drafter that ``--drafter`` names; ``None`` for plain decoding.

    Without a name it is the bundled head.
    """
    from eagle3_jax import Fallback, LoadedDrafter, load_drafter
    from eagle3_jax.drafters import NGram

    if source is not None and without_lookup(source) != source and not Path(source).exists():
        head = read_drafter(without_lookup(source), target=target, layer_ids=layer_ids)
        if not isinstance(head, LoadedDrafter):
            raise Misuse(
                f"--drafter {source}: expected {LOOKUP_FIRST} and a head, such as"
                f" {LOOKUP_FIRST}./head"
            )
        return Fallback.of(NGram(min_ngram=2), head)

    part = None if is_named(source) else find_own("--drafter", source)
    if layer_ids is not None and (is_named(source) or part is not None):
        raise Misuse(
            f"--layer-ids is about heads from files, and --drafter {source} has none; leave it out"
        )

    if source is not None and is_named(source):
        from eagle3_jax.load import named_drafter

        return named_drafter(source, target)
    if part is not None:
        value: Any = part.value
        is_drafter = hasattr(value, "propose") and not isinstance(value, type)
        if is_drafter or isinstance(value, LoadedDrafter):
            loaded: Any = value
            return loaded
        return part.call("--drafter", "an eagle3_jax.LoadedDrafter or a drafter", target=target)
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
            f"--verifier {source}: expected {', '.join(map(repr, RULES))}, or one of your own,"
            f" module:name; see {PAGE}"
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
            raise Misuse(
                f"{option} {self.text}: expected a function of ({takes}) that returns {result}; see"
                f" {PAGE}"
            )
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

    # The path of a console script lacks the current directory.
    module = match["module"]
    name = match["name"]
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)

    try:
        imported = importlib.import_module(module)
    # The user's module may fail in any way.
    except Exception as error:
        if (
            isinstance(error, ModuleNotFoundError)
            and error.name
            and f"{module}.".startswith(f"{error.name}.")
        ):
            raise Misuse(
                f"{option} {source}: there is no module {error.name!r} in the current directory or"
                f" among the installed packages; see {PAGE}"
            ) from None
        raise Misuse(
            f"{option} {source}: {module} cannot be imported ({type(error).__name__}: {error});"
            f" `python -c 'import {module}'` shows where"
        ) from error

    if not hasattr(imported, name):
        raise Misuse(f"{option} {source}: {module} has no {name!r}; see {PAGE}")
    return OwnPart(getattr(imported, name), match["argument"], str(source))
