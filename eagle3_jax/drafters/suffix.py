"""Suffix decoding: propose what most often followed the longest suffixes of the text (Oliaro et al., 2024).

SuffixDecoding (arXiv 2411.04975) keeps a suffix tree with counts. Here every match is found in the text itself, on the
device: a slot matches the last ``m`` tokens if the ``m`` tokens up to it equal them. Each length ``m`` walks ahead from
its matches, always to the token that most of them have next, and goes on with those that agree:

    ``P(d_1 .. d_k | m) = matches that agree with d_1 .. d_k / matches of m tokens``

The length with the largest sum of ``P`` over its walk, the expected number of accepted tokens, is proposed. A draft may
end where ``P`` falls below ``min_probability``: it is a function of the text alone, so any length of it is exact. It
does not by default, since a round here verifies a block of one size and a shorter draft saves nothing. Other requests'
texts, which the paper's second tree holds, are not looked at: a row would depend on its neighbours.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Key

from eagle3_jax.drafters.text import TextDrafter, TextState
from eagle3_jax.types import Draft, SamplingParams


@dataclasses.dataclass(frozen=True)
class Suffix(TextDrafter):
    """Continues the matches of all suffixes by majority; has no parameters and needs no training.

    Attributes:
        num_speculative_tokens: ``K``; the default length for one row when left out.
        max_suffix: Longest suffix tried.
        max_matches: How many matches are counted, the longest and of those the latest.
        min_probability: A draft ends where fewer of the matches agree with it than this share.
    """

    max_suffix: int = 24
    max_matches: int = 16
    min_probability: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_suffix", "max_matches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 1")
        if not 0 <= self.min_probability <= 1:
            raise ValueError(f"min_probability is {self.min_probability}; expected 0 to 1")

    def propose(self, params: Any, state: TextState, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """Walk ahead by majority; where a draft ends early, the rest is marked invalid."""
        del params, keys, sampling
        proposed, valid = jax.vmap(self._row)(state.tokens, state.length, state.matches(self.max_suffix))
        node = jnp.broadcast_to(jnp.arange(self.num_nodes, dtype=jnp.int32), (state.length.shape[0], self.num_nodes))
        return Draft(
            tokens=jnp.concatenate([state.root, proposed], axis=1),
            parents=node - 1,
            valid=jnp.concatenate([jnp.ones_like(valid[:, :1]), valid], axis=1),
        )

    def _row(
        self, tokens: Int[Array, " S"], end: Int[Array, ""], run: Int[Array, " S"]
    ) -> tuple[Int[Array, " K"], Bool[Array, " K"]]:
        """What one row proposes, and how much of it."""
        capacity = tokens.shape[0]
        depth = self.num_speculative_tokens
        # M suffixes, the longest first; C matches, the longest first and of those the latest.
        suffix = jnp.arange(self.max_suffix, 0, -1, dtype=jnp.int32)
        best, at = lax.top_k(
            jnp.where(run > 0, run * capacity + jnp.arange(capacity, dtype=jnp.int32), -1),
            min(self.max_matches, capacity),
        )
        ahead = at[:, None] + 1 + jnp.arange(depth, dtype=jnp.int32)[None, :]
        known = ahead < end
        following = tokens[jnp.minimum(ahead, capacity - 1)]
        agreeing = (run[at][None, :] >= suffix[:, None]) & (best >= 0)[None, :]
        total = jnp.sum(agreeing, axis=1, dtype=jnp.float32)
        score = jnp.zeros(suffix.shape, jnp.float32)
        going = total > 0
        drafted = []
        ends = []
        for index in range(depth):
            same = (
                (following[:, None, index] == following[None, :, index]) & known[:, None, index] & known[None, :, index]
            )
            count = jnp.where(agreeing, agreeing.astype(jnp.float32) @ same.astype(jnp.float32), 0.0)
            chosen = jnp.argmax(count, axis=1)  # the first of equals: the longest match, then the latest
            share = jnp.max(count, axis=1) / jnp.maximum(total, 1.0)
            going &= (share > 0) & (share >= self.min_probability)
            score += jnp.where(going, share, 0.0)
            drafted.append(following[chosen, index])
            ends.append(going)
            agreeing &= same[chosen]
        longest = jnp.argmax(jnp.round(score, 4))  # of sums that are equal but for rounding, the longest suffix's
        return jnp.stack(drafted, axis=1)[longest], jnp.stack(ends, axis=1)[longest]
