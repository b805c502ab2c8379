"""The draft vocabulary on disk.

``d2t`` has the offset from each draft id to its target id, and ``t2d`` marks the target's tokens
that can be drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError


def read(tensors: Mapping[str, np.ndarray], config: Any, where: str) -> np.ndarray:
    """Reads the target ids of the draft vocabulary, ``[W]`` int32, from the tensors of a head.

    Args:
        tensors: The tensors of the head by name.
        config: Its description, with the sizes of the target's vocabulary and of the draft
            vocabulary.
        where: The name of the head in messages.

    Raises:
        CheckpointError: The tensors are missing, are not one to one, or contradict each other.
    """
    vocab_size = config.vocab_size
    draft_vocab_size = config.draft_vocab_size
    offset = tensors.get("d2t")
    member = tensors.get("t2d")
    if offset is None:
        if draft_vocab_size < vocab_size:
            raise CheckpointError(
                f"{where} has no d2t, but its draft vocabulary of {draft_vocab_size} is smaller"
                f" than the target's {vocab_size}; without the map every draft means another token."
                " Fetch the complete head"
            )
        offset = np.zeros(draft_vocab_size, np.int64)
    _check_table(offset, draft_vocab_size, f"{where}: d2t")

    absolute = offset.astype(np.int64) + np.arange(draft_vocab_size)
    outside = (absolute < 0) | (absolute >= vocab_size)
    ids, counts = np.unique(absolute, return_counts=True)

    if outside.any():
        first = int(outside.argmax())
        wrong = (
            f"maps draft id {first} to target id {absolute[first]}, out of range for a vocabulary"
            f" of {vocab_size}; d2t must hold offsets (target id minus draft id), not target ids"
        )
    elif ids.size < absolute.size:
        wrong = (
            f"has duplicates: target id {ids[counts.argmax()]} has {counts.max()} draft ids; every"
            " draft id must mean another token"
        )
    elif draft_vocab_size == vocab_size and offset.any():
        # The official code ignores such a map and vLLM refuses to load it, so its meaning is
        # unknown.
        wrong = (
            f"reorders tokens, but the draft vocabulary is the target's ({vocab_size}), where d2t"
            " must be absent or zero; reorder the rows of lm_head.weight and remove d2t"
        )
    else:
        if member is not None:
            _check_mask(member, absolute, vocab_size, where)
        return absolute.astype(np.int32)
    raise CheckpointError(f"{where}: d2t {wrong}")


def write(draft_to_target: np.ndarray, config: Any) -> dict[str, np.ndarray]:
    """Returns the tensors ``d2t`` and ``t2d``; none if the vocabularies are equal."""
    absolute = np.asarray(draft_to_target, np.int64)
    _check_table(absolute, config.draft_vocab_size, "draft_to_target")
    offset = absolute - np.arange(absolute.size)
    tensors = {"d2t": offset, "t2d": np.isin(np.arange(config.vocab_size), absolute)}
    read(tensors, config, "the head")
    # vLLM refuses them if the vocabularies are equal.
    return {} if config.draft_vocab_size == config.vocab_size else tensors


def check_ids(ids: np.ndarray, size: int, vocab_size: int, label: str) -> None:
    """Refuses ids that are not ``size`` different ones of a vocabulary; ``label`` names them."""
    _check_table(ids, size, label)
    if len(np.unique(ids)) != ids.size or ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(
            f"{label} is not a list of different target ids from 0 to {vocab_size - 1}; fetch or"
            " convert it again"
        )


def _check_table(table: np.ndarray, size: int, label: str) -> None:
    if table.shape != (size,) or table.dtype.kind not in "iu":
        raise CheckpointError(
            f"{label} is {table.dtype}{list(table.shape)}; expected whole numbers of shape [{size}]"
        )


def _check_mask(member: np.ndarray, absolute: np.ndarray, vocab_size: int, where: str) -> None:
    if member.shape != (vocab_size,) or member.dtype != np.bool_:
        raise CheckpointError(
            f"{where}: t2d is {member.dtype}{list(member.shape)}; expected bool[{vocab_size}]"
        )

    strays = absolute[~member[absolute]]
    if int(member.sum()) != absolute.size:
        wrong = f"t2d marks {int(member.sum())} tokens but d2t maps {absolute.size}"
    elif strays.size:
        wrong = f"d2t maps to target id {strays[0]}, which t2d does not mark"
    else:
        return
    raise CheckpointError(f"{where}: {wrong}; they must agree")
