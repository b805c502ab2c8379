"""Drafters without files, by the names of the command line. The module itself needs no JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_jax.loaded import LoadedDrafter, LoadedTarget
    from eagle3_jax.types import Drafter

#: How each is written: its name, or ``name=E`` with a whole number.
NAMED = {"ngram": "ngram", "suffix": "suffix", "layer-skip": "layer-skip=E", "none": "none"}
FORMS = ", ".join(map(repr, NAMED.values()))


#: In front of a head: n-grams of at least two tokens where the text has them, else the head.
LOOKUP_FIRST = "ngram+"


def is_named(source: str | None) -> bool:
    """Whether a source is one of these names, with a number or without."""
    return (source or "").partition("=")[0] in NAMED


def without_lookup(source: str) -> str:
    """The head of ``ngram+HEAD``; any other source is its own."""
    return source.removeprefix(LOOKUP_FIRST)


def named_drafter(source: str, target: LoadedTarget) -> LoadedDrafter | Drafter[Any] | None:
    """The drafter of a name for which :func:`is_named` is true; ``None`` for plain decoding.

    Raises:
        ValueError: A number is missing, malformed, unsuitable for the target, or given where none is taken.
    """
    from eagle3_jax.drafters.draft_model import layer_skip
    from eagle3_jax.drafters.ngram import NGram
    from eagle3_jax.drafters.suffix import Suffix

    name, number = parts_of(source)
    if name == "layer-skip":
        return layer_skip(target, number)
    return {"ngram": NGram, "suffix": Suffix, "none": lambda: None}[name]()


def parts_of(source: str) -> tuple[str, int]:
    """The name and the number of a source, 0 where it takes none."""
    name, sign, number = source.partition("=")
    form = NAMED[name]
    takes = form != name
    if takes != bool(sign) or (takes and not (number.isdecimal() and len(number) < 10)):
        raise ValueError(f"drafter {source!r}: expected {form}{', such as ' + name + '=4' if takes else ''}")
    return name, int(number or 0)
