"""What converters raise when they refuse."""

from __future__ import annotations

from typing import Any


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written as asked: what was given, what was expected, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class TargetNeededError(CheckpointError):
    """A head's file leaves open what only its target decides."""


def printable(text: str) -> str:
    """The text with escapes for what a terminal would obey or could not show; names in files are anybody's."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def short(value: Any) -> str:
    """A value of a file as a message shows it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, lists in lists in lists
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
