"""Drafters that look at the text so far and at nothing else: they have no weights and read no features."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int

from eagle3_jax.topology import Chain, Topology, default_draft_length
from eagle3_jax.types import DraftSampling, Observation


class TextState(struct.PyTreeNode, kw_only=True):
    """Every token so far, the root included."""

    tokens: Int[Array, "B S"]  #: ``[B S]``.
    length: Int[Array, " B"]  #: ``[B]``.

    def matches(self, most: int) -> Int[Array, "B S"]:
        """How many tokens up to and including each slot equal those up to and including the last one, ``most`` at most.

        Zero at the last token itself and behind it.
        """
        end = self.length[:, None]
        slot = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :]
        run = jnp.zeros(self.tokens.shape, jnp.int32)
        unbroken = slot < end - 1
        for back in range(most):
            suffix = jnp.take_along_axis(self.tokens, jnp.maximum(end - 1 - back, 0), axis=1)
            here = jnp.roll(self.tokens, back, axis=1)
            unbroken &= (here == suffix) & (slot >= back) & (end - 1 >= back)
            run += unbroken.astype(jnp.int32)
        return run

    @property
    def root(self) -> Int[Array, "B 1"]:
        """The last token known."""
        return jnp.take_along_axis(self.tokens, jnp.maximum(self.length[:, None] - 1, 0), axis=1)


@dataclasses.dataclass(frozen=True)
class TextDrafter:
    """A :class:`~eagle3_jax.types.Drafter` but for ``propose``. What it drafts is a chain, a function of the text."""

    #: ``K``; the default length for one row when left out.
    num_speculative_tokens: int = dataclasses.field(default_factory=default_draft_length)
    aux_layers = ()
    is_chain = True

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}; expected at least 1")

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return self.num_speculative_tokens + 1

    @property
    def max_depth(self) -> int:
        """``G``."""
        return self.num_speculative_tokens

    def with_topology(self, topology: Topology | None, draft_sampling: DraftSampling | str | None) -> TextDrafter:
        """With another number of tokens.

        Raises:
            ValueError: A tree was asked for, or tokens that are drawn.
        """
        name = type(self).__name__
        if draft_sampling is not None and DraftSampling(draft_sampling) is DraftSampling.PROBABILISTIC:
            raise ValueError(f"{name} has no distribution to draw from; leave draft_sampling out or load a draft head")
        if topology is None:
            return self
        if not isinstance(topology, Chain):
            raise ValueError(f"{name} cannot draft a tree; leave the option out or choose another drafter")
        return dataclasses.replace(self, num_speculative_tokens=topology.num_speculative_tokens)

    def init(self, params: Any, batch: int, capacity: int) -> TextState:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params
        return TextState(tokens=jnp.zeros((batch, capacity), jnp.int32), length=jnp.zeros((batch,), jnp.int32))

    def observe(self, params: Any, state: TextState, seen: Observation) -> TextState:
        """Append the committed tokens. The last one known is the root, so new tokens start where it stands."""
        del params
        capacity = state.tokens.shape[1]
        fed = seen.tokens.shape[1]
        start = jnp.maximum(state.length - 1, 0)
        step = jnp.arange(fed + 1, dtype=jnp.int32)[None, :]
        new = jnp.concatenate([seen.tokens, seen.next_token[:, None]], axis=1)
        new = jnp.where(step == seen.length[:, None], seen.next_token[:, None], new)
        kept = (step <= seen.length[:, None]) & (seen.length[:, None] > 0)
        slots = jnp.where(kept, start[:, None] + step, capacity)
        append = jax.vmap(lambda tokens, slots, new: tokens.at[slots].set(new, mode="drop"))
        return TextState(
            tokens=append(state.tokens, slots, new),
            length=jnp.where(seen.length > 0, start + seen.length + 1, state.length),
        )
