"""Errors of reading and writing checkpoints, and the display of values in their messages."""

from __future__ import annotations

from eagle3_jax.files.jsonl import shown as short


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written.

    The message says what was given, what was expected and what to do.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class TargetNeededError(CheckpointError):
    """A head cannot be read without its target, because its file leaves a setting to the target."""


def printable(text: str) -> str:
    """Escapes characters that a terminal would obey or could not show; files may hold any names."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


__all__ = ["CheckpointError", "TargetNeededError", "printable", "short"]
