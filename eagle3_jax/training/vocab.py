"""Which tokens a draft head may propose: the most frequent ones of its training text.

A smaller output projection makes drafting cheaper; what it leaves out is drafted wrongly and costs acceptance, never
correctness (FR-Spec, Zhao et al., 2025; EAGLE-3, Li et al., 2025).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, Int


def token_counts(
    rows: Iterable[Int[np.ndarray, " _T"]], masks: Iterable[Bool[np.ndarray, " _T"]] | None, vocab_size: int
) -> Int[np.ndarray, " V"]:
    """How often each token occurs where its mask is True; everywhere without masks.

    Args:
        rows: Token ids, one sequence each; lengths may differ.
        masks: For every row, the tokens that count (those that the target writes).
        vocab_size: ``V``.

    Raises:
        ValueError: A token outside the vocabulary, or masks that do not fit their rows.
    """
    counts = np.zeros(vocab_size, np.int64)
    pairs = ((row, None) for row in rows) if masks is None else zip(rows, masks, strict=True)
    for index, (row, mask) in enumerate(pairs):
        row = np.asarray(row)
        if mask is not None and np.shape(mask) != row.shape:
            raise ValueError(f"row {index} has shape {row.shape} and its mask {np.shape(mask)}; they must agree")
        if row.size and not 0 <= row.min() <= row.max() < vocab_size:
            raise ValueError(
                f"row {index} holds tokens {row.min()} to {row.max()}; expected 0 to {vocab_size - 1}: "
                "the text was encoded with another tokenizer"
            )
        counted = row if mask is None else row[np.asarray(mask, bool)]
        counts += np.bincount(counted, minlength=vocab_size)
    return counts


def select_draft_vocabulary(counts: Int[np.ndarray, " V"], size: int) -> Int[np.ndarray, " W"]:
    """The ``size`` most frequent tokens, as ascending target ids: ``draft_to_target``.

    Ties go to the lower id; with fewer distinct tokens than ``size`` the lowest unused ids fill up.

    Args:
        counts: Occurrences of every target token.
        size: ``W``.

    Raises:
        ValueError: ``size`` is not between 1 and ``V``.
    """
    counts = np.asarray(counts)
    if counts.ndim != 1:
        raise ValueError(f"counts have shape {counts.shape}; expected one number per target token")
    if not 1 <= size <= len(counts):
        raise ValueError(f"a draft vocabulary of {size} was asked for; expected 1 to the target's {len(counts)}")
    # A stable sort keeps equal counts in the order of their ids; unused tokens are those with the lowest count.
    ranked = np.argsort(-counts.astype(np.int64), kind="stable")
    return np.sort(ranked[:size]).astype(np.int32)


def coverage(counts: Int[np.ndarray, " V"], draft_to_target: Int[np.ndarray, " W"]) -> float:
    """Share of the counted tokens that the draft vocabulary contains: a ceiling for greedy acceptance."""
    total = int(np.sum(counts))
    if total == 0:
        raise ValueError("no token was counted; every mask is False or there is no text")
    return int(np.sum(np.asarray(counts)[draft_to_target])) / total
