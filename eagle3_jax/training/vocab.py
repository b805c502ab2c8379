"""Which tokens a draft head may propose: the most frequent ones of its training text.

A smaller output projection makes drafting cheaper; what it leaves out is drafted wrongly and costs acceptance, never
correctness (FR-Spec, Zhao et al., 2025; EAGLE-3, Li et al., 2025).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


def select_draft_vocabulary(counts: Int[np.ndarray, " V"], size: int) -> Int[np.ndarray, " W"]:
    """The ``size`` most frequent tokens, as ascending target ids: ``draft_to_target``.

    Ties go to the lower id; with fewer distinct tokens than ``size`` the lowest unused ids fill up.

    Raises:
        ValueError: ``size`` is not between 1 and ``V``.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"a draft vocabulary of {size} was asked for; expected 1 to the target's {len(counts)}")
    # A stable sort keeps equal counts in the order of their ids; unused tokens are those with the lowest count.
    ranked = np.argsort(-counts, kind="stable")
    return np.sort(ranked[:size]).astype(np.int32)


def coverage(counts: Int[np.ndarray, " V"], draft_to_target: Int[np.ndarray, " W"]) -> float:
    """Share of the counted tokens that the draft vocabulary contains: a ceiling for greedy acceptance."""
    return int(counts[draft_to_target].sum()) / int(counts.sum())
