"""Prompt lookup against a search written with loops."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny

from eagle3_jax.checks import per_row
from eagle3_jax.drafters import NGram, Suffix
from eagle3_jax.types import Draft, SamplingParams

pytestmark = pytest.mark.core


def looked_up(tokens: list[int], drafter: NGram) -> list[int]:
    """Returns the tokens after one earlier occurrence of the longest repeated suffix."""
    for size in range(min(drafter.max_ngram, len(tokens) - 1), drafter.min_ngram - 1, -1):
        positions = range(size, len(tokens))
        for position in positions if drafter.earliest else reversed(positions):
            if tokens[position - size : position] == tokens[-size:]:
                return tokens[position : position + drafter.num_speculative_tokens]
    return []


def propose(drafter: NGram | Suffix, rows: list[list[int]], capacity: int = 24) -> Draft:
    """Shows each row in two pieces, like a prompt and a round, and proposes."""
    state = drafter.init(None, len(rows), capacity)
    for part in (lambda row: row[: len(row) // 2 + 1], lambda row: row[len(row) // 2 :]):
        pieces = [part(row) for row in rows]
        tokens = tiny.padded([piece[:-1] for piece in pieces], max(map(len, pieces)))
        lengths_and_roots = [len(piece) - 1 for piece in pieces], [piece[-1] for piece in pieces]
        seen = tiny.seen_of(tokens, np.zeros((*tokens.shape, 0, 4)), *lengths_and_roots)
        state = jax.jit(drafter.observe)(None, state, seen)
    keys = jax.random.split(jax.random.key(0), len(rows))
    sampling = per_row(SamplingParams(), len(rows))
    return jax.jit(drafter.propose)(None, state, keys, sampling)


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
