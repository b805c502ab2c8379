"""Drafters without weights of their own, by the names that the command line knows them under. Needs no JAX itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from eagle3_jax.loaded import LoadedDrafter, LoadedTarget
    from eagle3_jax.types import Drafter


def _ngram(target: LoadedTarget, number: int) -> Drafter[Any]:
    from eagle3_jax.drafters.ngram import NGram

    return NGram()


def _suffix(target: LoadedTarget, number: int) -> Drafter[Any]:
    from eagle3_jax.drafters.suffix import Suffix

    return Suffix()


def _layer_skip(target: LoadedTarget, number: int) -> LoadedDrafter:
    from eagle3_jax.drafters.draft_model import layer_skip

    return layer_skip(target, number)


class Named(NamedTuple):
    """A drafter that needs no files.

    Attributes:
        form: How it is written, ``name`` or ``name=E``, a whole number.
        make: The drafter for a target and the number, which is 0 where the form has none; ``None`` for plain decoding.
    """

    form: str
    make: Callable[[LoadedTarget, int], LoadedDrafter | Drafter[Any] | None]


NAMED = {
    "ngram": Named("ngram", _ngram),
    "suffix": Named("suffix", _suffix),
    "layer-skip": Named("layer-skip=E", _layer_skip),
    "none": Named("none", lambda target, number: None),
}
FORMS = ", ".join(f"'{named.form}'" for named in NAMED.values())


def is_named(source: str | None) -> bool:
    """Whether a source is one of these names, with a number or without."""
    return (source or "").partition("=")[0] in NAMED


def named_drafter(source: str, target: LoadedTarget) -> LoadedDrafter | Drafter[Any] | None:
    """The drafter of a name; ``None`` for plain decoding.

    Args:
        source: For which :func:`is_named` holds.
        target: What it drafts for.

    Raises:
        ValueError: A number is missing, is none, does not suit the target, or is given where none is taken.
    """
    name, number = parts_of(source)
    return NAMED[name].make(target, number)


def parts_of(source: str) -> tuple[str, int]:
    """The name and the number of a source, 0 where it takes none.

    Raises:
        ValueError: A number is missing, is none, or is given where none is taken.
    """
    name, sign, number = source.partition("=")
    form = NAMED[name].form
    takes = form != name
    if takes != bool(sign) or (takes and not (number.isdecimal() and len(number) < 10)):
        raise ValueError(f"drafter {source!r}: expected {form}{', such as ' + name + '=4' if takes else ''}")
    return name, int(number or 0)
