"""One entry for every layout: what a directory is decides how it is read."""

from __future__ import annotations

from pathlib import Path

from eagle3_jax.conversion import kinds, native, targets
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
from eagle3_jax.conversion.families import Family
from eagle3_jax.conversion.files import checked_directory, read_json
from eagle3_jax.conversion.heads import HEADS, HeadCheckpoint, Stored
from eagle3_jax.conversion.heads.writing import LAYOUTS, write_head
from eagle3_jax.conversion.native import write_native
from eagle3_jax.conversion.targets import TargetCheckpoint, write_target
from eagle3_jax.conversion.tensors import read_tensors
from eagle3_jax.models.config import DecoderConfig

_COUNTED = ("eagle3", "p-eagle")  # heads that name auxiliary layers without saying what they count


def read_target(directory: str | Path, family: Family | None = None) -> TargetCheckpoint:
    """Read a target: a Hugging Face directory or a native one.

    Args:
        directory: Of the checkpoint.
        family: A family of the caller's own, beside those of ``eagle3_jax.conversion.families``.

    Raises:
        CheckpointError: It is neither, or not one that this library computes; the message says why.
    """
    path = checked_directory(directory)
    read = native.read_native_target if native.is_native(path) else targets.read_target
    return read(path, family)


def read_head(
    directory: str | Path, target: DecoderConfig | None = None, *, layer_ids: str | None = None
) -> HeadCheckpoint:
    """Read a draft head in any dialect, or a native one.

    Args:
        directory: The head's directory.
        target: What it drafts for; checked against the head, and needed when the head does not name its auxiliary
            layers (official heads do not).
        layer_ids: What the numbers of its auxiliary layers count, ``entering`` or ``leaving``, where its file leaves
            that open (``eagle3_jax.conversion.heads.layer_ids``).

    Raises:
        CheckpointError: It is no head that is loaded, is incomplete, or does not fit the target; the message says why.
    """
    path = checked_directory(directory)
    if native.is_native(path):
        _refuse_layer_ids(layer_ids, f"{path} is in the native layout, which counts layers entered")
        return native.read_native_head(path, target)
    tensors = read_tensors(path)  # first: what the directory holds says more than that it has no config.json
    stored = Stored(path, read_json(path / "config.json"), tensors, layer_ids)
    kind = kinds.recognise(stored.config, stored.tensors.keys(), where=str(path))
    if kind not in _COUNTED:
        _refuse_layer_ids(layer_ids, f"{path} holds no EAGLE-3 or P-EAGLE head")
    kinds.refuse_all_but_heads(kind, path, "give it as the target")
    read = HEADS[kind].read
    assert read is not None
    try:
        return read(stored, target)
    except TargetNeededError:
        raise
    except CheckpointError as error:
        other = kinds.named_as(stored.tensors.keys())
        if other is None or other == kind:
            raise
        told = f"its tensors are named as those of {HEADS[other].label} heads are"
        raise CheckpointError(f"{error}; {told}, and config.json describes {HEADS[kind].label}") from None


def _refuse_layer_ids(layer_ids: str | None, why: str) -> None:
    if layer_ids is not None:
        raise CheckpointError(f"{why}; leave --layer-ids out")


def convert(
    source: str | Path,
    destination: str | Path,
    to: str,
    target: DecoderConfig | None = None,
    *,
    layer_ids: str | None = None,
) -> None:
    """Convert a target or a head.

    Args:
        source: A checkpoint directory in any layout that is read.
        destination: A directory that does not exist yet.
        to: ``jax`` (native), or a layout that heads of its method have; for a target these are all the one Hugging
            Face layout.
        target: A head's target, see :func:`read_head`.
        layer_ids: The same.

    Raises:
        CheckpointError: The source cannot be read, the destination exists, or the layout cannot express it.
    """
    if to not in ("jax", *LAYOUTS):
        raise CheckpointError(f"--to {to!r} is not known; use one of jax, {', '.join(LAYOUTS)}")
    is_head = kinds.identify(source) in HEADS
    if not is_head:
        _refuse_layer_ids(layer_ids, f"{source} holds no draft head")
    checkpoint = read_head(source, target, layer_ids=layer_ids) if is_head else read_target(source)
    if to == "jax":
        write_native(checkpoint, destination)
    elif isinstance(checkpoint, TargetCheckpoint):
        write_target(checkpoint, destination)
    else:
        write_head(checkpoint, destination, to)
