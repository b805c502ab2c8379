"""Prompt lookup written with loops, and drafts of a lookup after some rows."""

from __future__ import annotations

import jax
import numpy as np
import tiny

from eagle3_jax.checks import per_row
from eagle3_jax.drafters import NGram, Suffix
from eagle3_jax.types import Draft, SamplingParams


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
