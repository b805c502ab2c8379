"""Random distributions and draft trees."""

from __future__ import annotations

import numpy as np
import tiny

from eagle3_jax.types import Draft


def random_distribution(rng: np.random.Generator, size: int, zeros: int = 0) -> np.ndarray:
    weights = rng.gamma(0.7, size=size)
    weights[rng.permutation(size)[:zeros]] = 0.0
    return weights / weights.sum()


def random_trees(
    count: int, num_nodes: int, vocab_size: int, seed: int
) -> tuple[Draft, np.random.Generator]:
    """Returns random trees in topological order, whose siblings have different tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((count, num_nodes), np.int32)
    parents = np.full((count, num_nodes), -1, np.int32)

    for row in range(count):
        for node in range(1, num_nodes):
            parents[row, node] = rng.integers(0, node)
            siblings = [n for n in range(1, node) if parents[row, n] == parents[row, node]]
            taken = {tokens[row, sibling] for sibling in siblings}

            # A full family: the newest node is the parent instead.
            if len(taken) == vocab_size:
                parents[row, node] = node - 1
                taken = set()

            tokens[row, node] = rng.choice([x for x in range(vocab_size) if x not in taken])

    return tiny.draft_of(tokens, parents), rng
