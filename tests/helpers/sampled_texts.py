"""Drafters of a tiny vocabulary, and how likely the texts are that were sampled with them."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import jax.numpy as jnp
import numpy as np
import oracle
import tiny
from scipy.stats import chi2

from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import Fallback, NGram, Plain
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.types import DraftSampling

VOCABULARY = 4
# The first token, three accepted drafts and their bonus.
HORIZON = 5
ALPHA = 1e-6
TARGET = tiny.target(VOCABULARY)


def sampled(parents: tuple[int, ...]) -> LoadedDrafter:
    table = np.random.default_rng(3).dirichlet(np.ones(VOCABULARY), VOCABULARY)
    # A token that is never proposed, and so can only come from the residual.
    table[1, 2] = 0.0
    return LoadedDrafter(
        tiny.Sampled(parents), jnp.array(table / table.sum(1, keepdims=True), jnp.float32)
    )


DRAFTERS = {
    "plain decoding": lambda: LoadedDrafter(Plain()),
    "n-grams": lambda: LoadedDrafter(NGram(3)),
    "an EAGLE-3 chain of 1": lambda: tiny.eagle3(TARGET, Chain(1)),
    "an EAGLE-3 chain of 3": lambda: tiny.eagle3(TARGET, Chain(3)),
    # Its draft ids are 0, 2 and 3.
    "a sampled EAGLE-3 chain": lambda: tiny.eagle3(
        TARGET, Chain(3), seed=2, draft_vocab_size=3, draft_sampling=DraftSampling.PROBABILISTIC
    ),
    "n-grams, else a sampled EAGLE-3 chain": lambda: Fallback.of(
        NGram(2, min_ngram=2), DRAFTERS["a sampled EAGLE-3 chain"]()
    ),
    "an EAGLE-3 dynamic tree": lambda: tiny.eagle3(
        TARGET, DynamicTree(num_nodes=7, max_depth=3, top_k=2)
    ),
    "an EAGLE-3 static tree": lambda: tiny.eagle3(TARGET, tiny.STATIC_TREE, draft_vocab_size=3),
    "a sampled chain": lambda: sampled((-1, 0, 1, 2)),
    "a sampled tree": lambda: sampled((-1, 0, 0, 1, 1, 2)),
}


@functools.cache
def logits_after(prompt: tuple[int, ...]) -> dict[tuple[int, ...], list[float]]:
    """Returns the target's logits after every continuation below the horizon, without a cache."""
    rows = list(itertools.product(range(VOCABULARY), repeat=HORIZON - 1))
    tokens = jnp.array([(*prompt, *row) for row in rows], jnp.int32)
    logits = np.asarray(tiny.forward(TARGET.model, TARGET.params, tokens)[0], np.float64)
    known = {}
    for row, values in zip(rows, logits, strict=True):
        for size in range(HORIZON):
            known[row[:size]] = values[len(prompt) - 1 + size].tolist()
    return known


def chi_square(counts: Counter, distribution: oracle.TextDistribution) -> tuple[float, str]:
    """Returns the p-value and a message for a failure.

    Cells that expect fewer than ten are counted as one.
    """
    total = sum(counts.values())
    impossible = {cell: count for cell, count in counts.items() if distribution.get(cell, 0) == 0}
    if impossible:
        return 0.0, f"sequences that the target cannot write: {impossible}"

    ranked = sorted(distribution, key=lambda cell: -distribution[cell])
    large = [cell for cell in ranked if total * distribution[cell] >= 10]
    observed = [counts[cell] for cell in large]
    expected = [total * distribution[cell] for cell in large]
    if len(large) < len(ranked):
        observed.append(total - sum(observed))
        expected.append(total - math.fsum(expected))
        if expected[-1] < 10 and len(expected) > 1:
            observed[-2:] = [sum(observed[-2:])]
            expected[-2:] = [sum(expected[-2:])]

    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    p_value = float(chi2.sf(statistic, len(expected) - 1)) if len(expected) > 1 else 1.0

    distance = oracle.total_variation(
        {cell: count / total for cell, count in counts.items()}, distribution
    )
    slack = math.sqrt((len(distribution) * math.log(2) + math.log(1 / ALPHA)) / (2 * total))
    return (
        p_value,
        (
            f"chi-square {statistic:.1f} on {len(expected) - 1} degrees, p {p_value:.2g}; total"
            f" variation {distance:.4f} seen in {total} sequences, below {distance + slack:.4f}"
            " with 1 - 1e-6"
        ),
    )
