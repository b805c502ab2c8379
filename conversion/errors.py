"""Errors that converters raise, and how values of files are shown in them."""

from __future__ import annotations

from eagle3_jax.files.jsonl import shown as short


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written: the message says what was given, what was expected and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class TargetNeededError(CheckpointError):
    """The file of a head leaves open what only its target decides."""


def printable(text: str) -> str:
    """Escapes characters that a terminal would obey or could not show; names in files can be anything."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


__all__ = ["CheckpointError", "TargetNeededError", "printable", "short"]
