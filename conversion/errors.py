"""What converters raise when they refuse."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written as asked: what was given, what was expected, what to do."""


class TargetNeededError(CheckpointError):
    """A head's file leaves open what only its target decides."""
