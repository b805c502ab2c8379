"""Drafters that have a name and no checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_jax.loaded import LoadedDrafter, LoadedTarget
    from eagle3_jax.types import Drafter


#: The form of each named drafter: its name, or ``name=E`` with a whole number.
NAMED = {"ngram": "ngram", "suffix": "suffix", "layer-skip": "layer-skip=E", "none": "none"}


FORMS = ", ".join(map(repr, NAMED.values()))


#: Prefix of a head: n-grams of at least two tokens draft if the text has a match, else the head.
LOOKUP_FIRST = "ngram+"


def is_named(source: str | None) -> bool:
    """Returns whether a source is a named drafter, with a number or without."""
    return (source or "").partition("=")[0] in NAMED


def without_lookup(source: str) -> str:
    """Returns the head of ``ngram+HEAD``, and any other source unchanged."""
    return source.removeprefix(LOOKUP_FIRST)


def named_drafter(source: str, target: LoadedTarget) -> LoadedDrafter | Drafter[Any] | None:
    """Returns the drafter with a name, for which :func:`is_named` is true; ``None`` for plain decoding.

    Raises:
        ValueError: The number is missing, malformed or unsuitable for the target, or the name takes
            no number.
    """
    from eagle3_jax.drafters.draft_model import layer_skip
    from eagle3_jax.drafters.ngram import NGram
    from eagle3_jax.drafters.suffix import Suffix

    name, number = parts_of(source)
    if name == "layer-skip":
        return layer_skip(target, number)
    return {"ngram": NGram, "suffix": Suffix, "none": lambda: None}[name]()


def parts_of(source: str) -> tuple[str, int]:
    """Returns the name and the number of a source; the number is 0 if the name takes none."""
    name, sign, number = source.partition("=")
    form = NAMED[name]
    takes = form != name
    if takes != bool(sign) or (takes and not (number.isdecimal() and len(number) < 10)):
        raise ValueError(
            f"drafter {source!r}: expected {form}{', such as ' + name + '=4' if takes else ''}"
        )
    return name, int(number or 0)
