"""Prompt lookup: proposes what followed the last tokens at an earlier occurrence (Saxena, 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from eagle3_jax.drafters.text import TextDrafter, TextState
from eagle3_jax.types import Draft, SamplingParams


@dataclasses.dataclass(frozen=True)
class NGram(TextDrafter):
    """Finds the longest suffix of the text that occurred before, and continues it.

    It has no parameters and needs no training. It is useful for output that repeats the prompt or
    itself.

    Attributes:
        num_speculative_tokens: ``K``, tokens of a draft. Default: the default length for one row.
        max_ngram: Longest suffix tried, in tokens.
        min_ngram: Shortest suffix tried, in tokens.
        earliest: Which of several matches is continued: the earliest, as in vLLM, or the latest.
    """

    max_ngram: int = 4
    min_ngram: int = 1
    earliest: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"n-grams of {self.min_ngram} to {self.max_ngram} tokens; expected 1 <= min <= max"
            )

    def propose(
        self, params: Any, state: TextState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Continues the best earlier occurrence. Nodes after the last known token are invalid."""
        del params, keys, sampling
        batch, capacity = state.tokens.shape
        end = state.length[:, None]
        slot = jnp.arange(capacity, dtype=jnp.int32)[None, :]
        run = state.count_matches(self.max_ngram)

        # The longest match wins. Of equally long ones, the slot decides.
        tie_break = capacity - 1 - slot if self.earliest else slot
        score = jnp.where(run >= self.min_ngram, run * capacity + tie_break, -1)
        match = jnp.argmax(score, axis=1)[:, None].astype(jnp.int32)
        has_match = jnp.take_along_axis(score, match, axis=1) >= 0

        following = match + 1 + jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)[None, :]
        proposed = jnp.take_along_axis(state.tokens, jnp.minimum(following, capacity - 1), axis=1)

        node = jnp.arange(self.num_nodes, dtype=jnp.int32)
        tokens = jnp.concatenate([state.root, proposed], axis=1)
        parents = jnp.broadcast_to(node - 1, (batch, self.num_nodes))
        valid = jnp.concatenate([jnp.ones_like(has_match), has_match & (following < end)], axis=1)
        return Draft(tokens=tokens, parents=parents, valid=valid)
