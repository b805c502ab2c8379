"""What a network declares for its drafts after every text, as fractions, to enumerate its output."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import tiny
from exact_distributions import CHAIN, VOCABULARY, distribution_of_the_code
from oracle import Tree
from scipy import special

import eagle3_jax as e3
from eagle3_jax.sampling import row_keys
from eagle3_jax.testing.drafter import WithCache

PROMPT = (1, 2, 0)
HORIZON = 3
# Many keys for every prefix, so that every first token is drafted.
KEYS = 256
Prefix = tuple[int, ...]
Drafts = Callable[[Prefix], Iterator[tuple[Fraction, Tree]]]


class Declared:
    """Distributions of a target of three tokens, and of a drafter that samples chains of two.

    Attributes:
        p: The target's distribution after every prefix.
        q: For every prefix, the drafter's for the first token, and for the second after each first
            one that it can draft.
    """

    def __init__(self, target: e3.LoadedTarget, loaded: e3.LoadedDrafter):
        """Runs both networks on every text."""
        tokens = range(VOCABULARY)
        longer = itertools.product(tokens, repeat=HORIZON + 1)
        texts = np.array([(*PROMPT, *text) for text in longer])
        logits, _ = tiny.forward(target.model, target.params, jnp.asarray(texts, jnp.int32))
        probs = special.softmax(np.asarray(logits, np.float64), axis=-1)
        self.p: dict[Prefix, list[Fraction]] = {}
        for text, rows in zip(texts.tolist(), probs, strict=True):
            for size in range(HORIZON + 2):
                self.p[tuple(text[3 : 3 + size])] = fractions(rows[2 + size])

        prefixes = [
            text for size in range(HORIZON) for text in itertools.product(tokens, repeat=size)
        ]
        rows = [prefix for prefix in prefixes for _ in range(KEYS)]
        draft = _drafted(target, loaded, [(*PROMPT, *prefix) for prefix in rows])
        drafted = np.asarray(draft.tokens)
        declared = np.asarray(draft.probs)
        self.q: dict[Prefix, dict[Prefix, list[Fraction]]] = {prefix: {} for prefix in prefixes}
        for row, prefix in enumerate(rows):
            self.q[prefix][()] = fractions(declared[row, 1])
            self.q[prefix][int(drafted[row, 1]),] = fractions(declared[row, 2])

    def sampled(self, prefix: Prefix) -> Iterator[tuple[Fraction, Tree]]:
        """Yields every draft with its probability."""
        q = self.q[prefix]
        for first, second in itertools.product(range(VOCABULARY), repeat=2):
            # A token without mass is never the first one, and nothing is declared after it.
            mass = q[()][first] and q[()][first] * q[first,][second]
            if mass:
                declared = [[Fraction(0)] * VOCABULARY, q[()], q[first,]]
                yield mass, Tree((0, first, second), CHAIN, declared, [True] * 3)

    def distance(self, drafts: Drafts) -> float:
        """Returns the distance of the output from the target's, by enumeration of every decision."""
        code = distribution_of_the_code(self.p.__getitem__, drafts, HORIZON)
        emitted = oracle.distribution_of_rounds(code, HORIZON)
        target = oracle.autoregressive_distribution(self.p.__getitem__, HORIZON)
        return float(oracle.total_variation(emitted, target))


def _drafted(
    target: e3.LoadedTarget, loaded: e3.LoadedDrafter, texts: list[tuple[int, ...]]
) -> e3.Draft:
    """Drafts after texts, whose last token the target has not read."""
    part: Any = loaded.drafter
    params = loaded.params
    if getattr(part, "reads_cache", False):
        part = WithCache(part, target.model)
        params = (params, target.params)

    known = tiny.padded([text[:-1] for text in texts], 8)
    length = np.array([len(text) - 1 for text in texts], np.int32)
    positions = jnp.broadcast_to(jnp.arange(8, dtype=jnp.int32), known.shape)

    @jax.jit
    def drafted(params: Any, target_params: Any) -> e3.Draft:
        output = target.model(
            target_params,
            jnp.asarray(known),
            positions,
            tiny.causal_mask(8),
            aux_layers=part.aux_layers,
        )
        seen = tiny.seen_of(known, output.features, length, [text[-1] for text in texts])
        state = part.observe(params, part.init(params, len(texts), 16), seen)
        # At a high temperature, so that every token is drafted; any honest distribution is exact.
        high = tiny.per_row(e3.SamplingParams(temperature=4.0), len(texts))
        return part.propose(params, state, row_keys(0, len(texts)), high)

    return drafted(params, target.params)


def fractions(weights: np.ndarray) -> list[Fraction]:
    """Returns weights as fractions of their sum."""
    exact = [Fraction(float(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]
