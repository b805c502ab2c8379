"""Prompt lookup: propose what followed the last few tokens when they occurred before (Saxena, 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from eagle3_jax.drafters.text import TextDrafter, TextState
from eagle3_jax.types import Draft, SamplingParams


@dataclasses.dataclass(frozen=True)
class NGram(TextDrafter):
    """Matches the longest suffix of ``max_ngram`` down to ``min_ngram`` tokens; of several matches one wins.

    It has no parameters and needs no training; it pays where the output repeats the prompt or itself.

    Attributes:
        num_speculative_tokens: ``K``; the default length for one row when left out.
        max_ngram: Longest suffix tried.
        min_ngram: Shortest suffix tried.
        earliest: Of several matches the earliest wins, as in vLLM, and not the latest.
    """

    max_ngram: int = 4
    min_ngram: int = 1
    earliest: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"n-grams of {self.min_ngram} to {self.max_ngram} tokens; expected 1 <= min <= max")

    def propose(self, params: Any, state: TextState, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """Continue the best earlier occurrence; what would reach past the known tokens is marked invalid."""
        del params, keys, sampling
        batch, capacity = state.tokens.shape
        end = state.length[:, None]
        slot = jnp.arange(capacity, dtype=jnp.int32)[None, :]
        run = state.matches(self.max_ngram)
        # Longest first, then by place.
        place = capacity - 1 - slot if self.earliest else slot
        score = jnp.where(run >= self.min_ngram, run * capacity + place, -1)
        match = jnp.argmax(score, axis=1)[:, None].astype(jnp.int32)
        found = jnp.take_along_axis(score, match, axis=1) >= 0
        ahead = match + 1 + jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)[None, :]
        proposed = jnp.take_along_axis(state.tokens, jnp.minimum(ahead, capacity - 1), axis=1)
        node = jnp.arange(self.num_nodes, dtype=jnp.int32)
        return Draft(
            tokens=jnp.concatenate([state.root, proposed], axis=1),
            parents=jnp.broadcast_to(node - 1, (batch, self.num_nodes)),
            valid=jnp.concatenate([jnp.ones_like(found), found & (ahead < end)], axis=1),
        )
