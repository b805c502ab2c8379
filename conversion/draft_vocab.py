"""The draft vocabulary on disk: ``d2t``, an offset from draft id to target id, and ``t2d``, a membership mask."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError


def read(tensors: Mapping[str, np.ndarray], *, vocab_size: int, draft_vocab_size: int, where: str) -> np.ndarray:
    """Absolute target ids of the draft vocabulary, ``[W]`` int32.

    Raises:
        CheckpointError: ``d2t`` is missing, malformed, out of range or not one to one, or ``t2d`` contradicts it.
    """
    offset, member = tensors.get("d2t"), tensors.get("t2d")
    if offset is None:
        if draft_vocab_size < vocab_size:
            raise CheckpointError(
                f"{where} has no d2t, but its draft vocabulary of {draft_vocab_size} is smaller than the target's "
                f"{vocab_size}; without the map every draft means another token. Fetch the complete head"
            )
        offset = np.zeros(draft_vocab_size, np.int64)
    if offset.shape != (draft_vocab_size,) or offset.dtype.kind not in "iu":
        raise CheckpointError(
            f"{where}: d2t is {offset.dtype}{list(offset.shape)}; expected whole numbers of shape [{draft_vocab_size}]"
        )
    absolute = offset.astype(np.int64) + np.arange(draft_vocab_size)
    outside = (absolute < 0) | (absolute >= vocab_size)
    if outside.any():
        first = int(outside.argmax())
        raise CheckpointError(
            f"{where}: d2t maps draft id {first} to target id {absolute[first]}, out of range for a vocabulary of "
            f"{vocab_size}; d2t must hold offsets (target id minus draft id), not target ids"
        )
    ids, counts = np.unique(absolute, return_counts=True)
    if ids.size < absolute.size:
        raise CheckpointError(
            f"{where}: d2t has duplicates: target id {ids[counts.argmax()]} has {counts.max()} draft ids; "
            "every draft id must mean another token"
        )
    if draft_vocab_size == vocab_size and offset.any():
        # Official code drops the map when the sizes are equal, vLLM refuses to load it: no reading is the right one.
        raise CheckpointError(
            f"{where}: the draft vocabulary is the target's ({vocab_size}), where d2t must be absent or zero, but it "
            "reorders tokens; reorder the rows of lm_head.weight and remove d2t"
        )
    if member is not None:
        _check_mask(member, absolute, vocab_size, where)
    return absolute.astype(np.int32)


def write(draft_to_target: np.ndarray, vocab_size: int, draft_vocab_size: int) -> dict[str, np.ndarray]:
    """``d2t`` and ``t2d`` of absolute ids; neither when the vocabularies are equal (vLLM refuses them then).

    Raises:
        CheckpointError: The ids are out of range, not one to one, or reorder a full vocabulary.
    """
    absolute = np.asarray(draft_to_target, np.int64)
    if absolute.shape != (draft_vocab_size,):
        raise CheckpointError(f"draft_to_target has shape {absolute.shape}; expected ({draft_vocab_size},)")
    member = np.zeros(vocab_size, np.bool_)
    member[absolute[(absolute >= 0) & (absolute < vocab_size)]] = True
    tensors = {"d2t": absolute - np.arange(draft_vocab_size), "t2d": member}
    read(tensors, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size, where="the head")
    return {} if draft_vocab_size == vocab_size else tensors


def _check_mask(member: np.ndarray, absolute: np.ndarray, vocab_size: int, where: str) -> None:
    if member.shape != (vocab_size,) or member.dtype != np.bool_:
        raise CheckpointError(f"{where}: t2d is {member.dtype}{list(member.shape)}; expected bool[{vocab_size}]")
    if int(member.sum()) != absolute.size:
        raise CheckpointError(
            f"{where}: t2d marks {int(member.sum())} tokens but d2t maps {absolute.size}; they must agree"
        )
    strays = absolute[~member[absolute]]
    if strays.size:
        raise CheckpointError(f"{where}: d2t maps to target id {strays[0]}, which t2d does not mark; they must agree")
