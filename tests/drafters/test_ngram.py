"""Prompt lookup against a search written with loops."""

from __future__ import annotations

import numpy as np
import pytest
from lookups import looked_up, propose

from eagle3_jax.drafters import NGram

pytestmark = pytest.mark.core


@pytest.mark.parametrize("earliest", [False, True])
@pytest.mark.parametrize("sizes", [(4, 1), (3, 2), (1, 1), (5, 5)])
def test_it_proposes_what_followed_the_longest_match(
    sizes: tuple[int, int], earliest: bool
) -> None:
    drafter = NGram(4, max_ngram=sizes[0], min_ngram=sizes[1], earliest=earliest)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 3, size=rng.integers(2, 20)).tolist() for _ in range(200)]
    draft = propose(drafter, rows)

    hits = 0
    for row, tokens, valid in zip(rows, draft.tokens.tolist(), draft.valid.tolist(), strict=True):
        expected = looked_up(row, drafter)
        assert tokens[0] == row[-1]
        assert valid == [True] + [node < len(expected) for node in range(4)]
        assert tokens[1 : 1 + len(expected)] == expected
        hits += bool(expected)

    assert hits > 3, "a comparison without matches would show nothing"
