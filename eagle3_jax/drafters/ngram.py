"""Prompt lookup: propose what followed the last few tokens when they occurred before (Saxena, 2023)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Key

from eagle3_jax.tree import Chain, Topology
from eagle3_jax.types import Draft, DraftSampling, Observation, SamplingParams


@struct.dataclass(kw_only=True)
class NGramState:
    """Every token so far, the root included.

    Attributes:
        tokens: ``[B S]``.
        length: ``[B]``.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class NGram:
    """Matches the longest suffix of ``max_ngram`` down to ``min_ngram`` tokens; of several matches the latest wins.

    It has no parameters and needs no training; it pays where the output repeats the prompt or itself.

    Attributes:
        num_speculative_tokens: ``K``.
        max_ngram: Longest suffix tried.
        min_ngram: Shortest suffix tried.
    """

    num_speculative_tokens: int = 5
    max_ngram: int = 4
    min_ngram: int = 1

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}; expected at least 1")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"n-grams of {self.min_ngram} to {self.max_ngram} tokens; expected 1 <= min <= max")

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return self.num_speculative_tokens + 1

    @property
    def max_depth(self) -> int:
        """``G``."""
        return self.num_speculative_tokens

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """It reads no features."""
        return ()

    @property
    def is_chain(self) -> bool:
        """Always: one occurrence is continued."""
        return True

    @property
    def is_parallel(self) -> bool:
        """Always: it is read off the text."""
        return True

    def drafting(self, topology: Topology | None, draft_sampling: DraftSampling | None) -> NGram:
        """With another number of tokens.

        Raises:
            ValueError: A tree was asked for, or tokens that are drawn.
        """
        if draft_sampling is DraftSampling.PROBABILISTIC:
            raise ValueError("NGram has no distribution to draw from; leave draft_sampling out or load an EAGLE-3 head")
        if topology is None:
            return self
        if not isinstance(topology, Chain):
            raise ValueError("NGram cannot draft a tree; leave the option out or choose another drafter")
        return dataclasses.replace(self, num_speculative_tokens=topology.num_speculative_tokens)

    def init(self, params: Any, batch: int, capacity: int) -> NGramState:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params
        return NGramState(tokens=jnp.zeros((batch, capacity), jnp.int32), length=jnp.zeros((batch,), jnp.int32))

    def observe(self, params: Any, state: NGramState, seen: Observation) -> NGramState:
        """Append the committed tokens. The last one known is the root, so new tokens start where it stands."""
        del params
        capacity, fed = state.tokens.shape[1], seen.tokens.shape[1]
        start = jnp.maximum(state.length - 1, 0)
        step = jnp.arange(fed + 1)[None, :]
        new = jnp.concatenate([seen.tokens, seen.next_token[:, None]], axis=1)
        new = jnp.where(step == seen.length[:, None], seen.next_token[:, None], new)
        kept = (step <= seen.length[:, None]) & (seen.length[:, None] > 0)
        slots = jnp.where(kept, start[:, None] + step, capacity)
        append = jax.vmap(lambda tokens, slots, new: tokens.at[slots].set(new, mode="drop"))
        return NGramState(
            tokens=append(state.tokens, slots, new),
            length=jnp.where(seen.length > 0, start + seen.length + 1, state.length),
        )

    def propose(self, params: Any, state: NGramState, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """Continue the best earlier occurrence; what would reach past the known tokens is marked invalid."""
        del params, keys, sampling
        batch, capacity = state.tokens.shape
        end, slot = state.length[:, None], jnp.arange(capacity)[None, :]
        # run[s]: how many tokens up to and including slot s equal the tokens up to and including the last one.
        run, unbroken = jnp.zeros((batch, capacity), jnp.int32), slot < end - 1
        for back in range(self.max_ngram):
            suffix = jnp.take_along_axis(state.tokens, jnp.maximum(end - 1 - back, 0), axis=1)
            here = jnp.roll(state.tokens, back, axis=1)
            unbroken &= (here == suffix) & (slot >= back) & (end - 1 >= back)
            run += unbroken.astype(jnp.int32)
        # Longest first, then latest.
        score = jnp.where(run >= self.min_ngram, run * capacity + slot, -1)
        match = jnp.argmax(score, axis=1)[:, None]
        found = jnp.take_along_axis(score, match, axis=1) >= 0
        ahead = match + 1 + jnp.arange(self.num_speculative_tokens)[None, :]
        proposed = jnp.take_along_axis(state.tokens, jnp.minimum(ahead, capacity - 1), axis=1)
        root = jnp.take_along_axis(state.tokens, jnp.maximum(end - 1, 0), axis=1)
        node = jnp.arange(self.num_nodes, dtype=jnp.int32)
        return Draft(
            tokens=jnp.concatenate([root, proposed], axis=1),
            parents=jnp.broadcast_to(node - 1, (batch, self.num_nodes)),
            valid=jnp.concatenate([jnp.ones_like(found), found & (ahead < end)], axis=1),
        )
