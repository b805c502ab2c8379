"""Prompt lookup in all rows of the batch: proposes what followed the last tokens in any of them.

In reinforcement learning the rows of a batch are answers to the same few prompts, and an answer often
repeats a run of tokens that another answer to its prompt already has.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from eagle3_jax.drafters.text import TextDrafter, TextState
from eagle3_jax.types import Draft, SamplingParams


@dataclasses.dataclass(frozen=True)
class Siblings(TextDrafter):
    """Finds the longest suffix of a row in any row of the batch, and continues it.

    Of equally long matches a row takes one of its own, else one of the nearest row after it. The
    draft of a row depends on the other rows, and so do the random numbers that choose its tokens:
    each row still has the target's distribution, whatever the other rows say, but a seed has
    another sample in another batch. A round compares ``B² S max_ngram`` pairs of tokens.

    Attributes:
        num_speculative_tokens: ``K``, tokens of a draft. Default: the default length for one row.
        max_ngram: Longest suffix tried, in tokens.
        min_ngram: Shortest suffix tried, in tokens.
    """

    max_ngram: int = 6
    min_ngram: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"n-grams of {self.min_ngram} to {self.max_ngram} tokens; expected 1 <= min <= max"
            )

    def propose(
        self, params: Any, state: TextState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Continues the best match. Nodes after the last known token are invalid."""
        del params, keys, sampling
        batch, capacity = state.tokens.shape
        row = jnp.arange(batch, dtype=jnp.int32)
        slot = jnp.arange(capacity, dtype=jnp.int32)

        # run[b, r, s]: tokens up to slot s of row r that equal the last ones of row b. The last
        # token of a row has nothing after it.
        ends = state.length[:, None, None]
        last_of_row = state.length[None, :, None] - 1
        unbroken = slot < last_of_row
        run = jnp.zeros((batch, batch, capacity), jnp.int32)
        for back in range(self.max_ngram):
            last = jnp.take_along_axis(
                state.tokens, jnp.maximum(state.length[:, None] - 1 - back, 0), axis=1
            )
            shifted = jnp.roll(state.tokens, back, axis=1)
            is_same = shifted[None] == last[:, :, None]
            unbroken = unbroken & is_same & (slot >= back) & (ends - 1 >= back)
            run += unbroken.astype(jnp.int32)

        # The longest match wins; of equally long ones the nearest row, and its latest slot.
        distance = (row[None, :] - row[:, None]) % batch
        order = (batch - 1 - distance)[:, :, None] * capacity + slot
        score = jnp.where(run >= self.min_ngram, run * (batch * capacity) + order, -1)
        best = jnp.argmax(score.reshape(batch, -1), axis=1)
        found = jnp.max(score.reshape(batch, -1), axis=1) >= 0
        source, start = best // capacity, best % capacity

        following = start[:, None] + 1 + jnp.arange(self.num_speculative_tokens, dtype=jnp.int32)
        known = found[:, None] & (following < state.length[source][:, None])
        proposed = state.tokens[source[:, None], jnp.minimum(following, capacity - 1)]

        node = jnp.broadcast_to(
            jnp.arange(self.num_nodes, dtype=jnp.int32), (batch, self.num_nodes)
        )
        tokens = jnp.concatenate([state.root, proposed], axis=1)
        valid = jnp.concatenate([jnp.ones_like(known[:, :1]), known], axis=1)
        return Draft(tokens=tokens, parents=node - 1, valid=valid)
