"""The draft vocabulary: the tokens that a head can propose, the most frequent of its text.

A smaller output projection makes drafting faster. Tokens outside the draft vocabulary are never
drafted, which lowers acceptance and does not change the output (FR-Spec, Zhao et al., 2025;
EAGLE-3, Li et al., 2025).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


def select_draft_vocabulary(counts: Int[np.ndarray, " V"], size: int) -> Int[np.ndarray, " W"]:
    """Returns the ``size`` most frequent tokens, as ascending target ids: ``draft_to_target``.

    Ties go to the lower id. If fewer tokens than ``size`` occur, the lowest unused ids are added.

    Raises:
        ValueError: ``size`` is not between 1 and ``V``.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(
            f"a draft vocabulary of {size} was asked for; expected 1 to the target's {len(counts)}"
        )
    # A stable sort keeps equal counts in the order of their ids; unused tokens are those with the
    # lowest count.
    ranked = np.argsort(-counts, kind="stable")
    return np.sort(ranked[:size]).astype(np.int32)


def coverage(counts: Int[np.ndarray, " V"], draft_to_target: Int[np.ndarray, " W"]) -> float:
    """Returns the share of the counted tokens in the draft vocabulary.

    It is an upper bound of greedy acceptance.
    """
    return int(counts[draft_to_target].sum()) / int(counts.sum())
