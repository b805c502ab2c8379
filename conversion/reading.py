"""One entry for every layout: what a directory is decides how it is read."""

from __future__ import annotations

from pathlib import Path

from conversion import eagle3, native, targets
from conversion.eagle3 import HeadCheckpoint
from conversion.errors import CheckpointError
from conversion.export import DIALECTS, write_head
from conversion.families import Family
from conversion.files import checked_directory
from conversion.kinds import DIFFERENCES, EAGLE3, identify
from conversion.native import write_native
from conversion.targets import TargetCheckpoint, write_target
from eagle3_jax.models.config import DecoderConfig


def read_target(directory: str | Path, family: Family | None = None) -> TargetCheckpoint:
    """Read a target: a Hugging Face directory or a native one.

    Args:
        directory: Of the checkpoint.
        family: A family of the caller's own, beside those of ``conversion.families``.

    Raises:
        CheckpointError: It is neither, or not one that this library computes; the message says why.
    """
    path = checked_directory(directory)
    read = native.read_native_target if native.is_native(path) else targets.read_target
    return read(path, family)


def read_head(directory: str | Path, target: DecoderConfig | None = None) -> HeadCheckpoint:
    """Read an EAGLE-3 head in any dialect, or a native one.

    Args:
        directory: The head's directory.
        target: What it drafts for; checked against the head, and needed when the head does not name its auxiliary
            layers (official heads do not).

    Raises:
        CheckpointError: It is no EAGLE-3 head, is incomplete, or does not fit the target; the message says why.
    """
    path = checked_directory(directory)
    return native.read_native_head(path, target) if native.is_native(path) else eagle3.read_head(path, target)


def convert(source: str | Path, destination: str | Path, to: str, target: DecoderConfig | None = None) -> None:
    """Convert a target or a head.

    Args:
        source: A checkpoint directory in any layout that is read.
        destination: A directory that does not exist yet.
        to: ``jax`` (native), or ``eagle``, ``sglang`` or ``vllm``; for a target these three are the one Hugging Face
            layout.
        target: A head's target, see :func:`read_head`.

    Raises:
        CheckpointError: The source cannot be read, the destination exists, or the layout cannot express it.
    """
    if to not in ("jax", *DIALECTS):
        raise CheckpointError(f"--to {to!r} is not known; use one of jax, {', '.join(DIALECTS)}")
    kind = identify(source)
    if kind in DIFFERENCES:
        raise CheckpointError(f"{source} is {DIFFERENCES[kind]}; only EAGLE-3 heads and targets are converted")
    checkpoint = read_head(source, target) if kind == EAGLE3 else read_target(source)
    if to == "jax":
        write_native(checkpoint, destination)
    elif isinstance(checkpoint, TargetCheckpoint):
        write_target(checkpoint, destination)
    else:
        write_head(checkpoint, destination, to)  # type: ignore[arg-type]
