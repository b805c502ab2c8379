"""The base of drafters that read only the text so far: no weights, no features."""

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
    """All tokens so far, the root included.

    Attributes:
        tokens: ``[B S]``, token ids.
        length: ``[B]``, number of tokens.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]

    def count_matches(self, most: int) -> Int[Array, "B S"]:
        """Counts for each slot how many tokens up to it equal the last tokens of the text.

        It counts up to ``most`` of them. The count is zero at the last token itself and after it.
        """
        end = self.length[:, None]
        slot = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)[None, :]
        run = jnp.zeros(self.tokens.shape, jnp.int32)
        unbroken = slot < end - 1

        # Backwards from both ends, until the first difference.
        for back in range(most):
            last = jnp.take_along_axis(self.tokens, jnp.maximum(end - 1 - back, 0), axis=1)
            shifted = jnp.roll(self.tokens, back, axis=1)
            unbroken &= (shifted == last) & (slot >= back) & (end - 1 >= back)
            run += unbroken.astype(jnp.int32)

        return run

    @property
    def root(self) -> Int[Array, "B 1"]:
        """``[B 1]``, the last known token."""
        last = jnp.maximum(self.length[:, None] - 1, 0)
        return jnp.take_along_axis(self.tokens, last, axis=1)


@dataclasses.dataclass(frozen=True)
class TextDrafter:
    """A :class:`~eagle3_jax.types.Drafter` without ``propose``.

    Its drafts are chains, and functions of the text.
    """

    #: ``K``, tokens of a draft. Default: the default length for one row.
    num_speculative_tokens: int = dataclasses.field(default_factory=default_draft_length)
    aux_layers = ()
    is_chain = True

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"num_speculative_tokens is {self.num_speculative_tokens}; expected at least 1"
            )

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return self.num_speculative_tokens + 1

    @property
    def max_depth(self) -> int:
        """``G``."""
        return self.num_speculative_tokens

    def with_topology(
        self, topology: Topology | None, draft_sampling: DraftSampling | str | None
    ) -> TextDrafter:
        """Returns the drafter with another number of tokens.

        Raises:
            ValueError: ``topology`` is a tree, or ``draft_sampling`` is probabilistic.
        """
        name = type(self).__name__
        sampling = None if draft_sampling is None else DraftSampling(draft_sampling)
        if sampling is DraftSampling.PROBABILISTIC:
            raise ValueError(
                f"{name} has no distribution to draw from; leave draft_sampling out or load a draft"
                " head"
            )

        if topology is None:
            return self
        if not isinstance(topology, Chain):
            raise ValueError(
                f"{name} cannot draft a tree; leave the option out or choose another drafter"
            )
        return dataclasses.replace(self, num_speculative_tokens=topology.num_speculative_tokens)

    def init(self, params: Any, batch: int, capacity: int) -> TextState:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params
        return TextState(
            tokens=jnp.zeros((batch, capacity), jnp.int32), length=jnp.zeros((batch,), jnp.int32)
        )

    def observe(self, params: Any, state: TextState, seen: Observation) -> TextState:
        """Appends the committed tokens.

        The last known token is the root, which is also the first committed one.
        """
        del params
        capacity = state.tokens.shape[1]
        fed = seen.tokens.shape[1]

        # The committed tokens, then `next_token` right after a row's last one.
        start = jnp.maximum(state.length - 1, 0)
        step = jnp.arange(fed + 1, dtype=jnp.int32)[None, :]
        new = jnp.concatenate([seen.tokens, seen.next_token[:, None]], axis=1)
        new = jnp.where(step == seen.length[:, None], seen.next_token[:, None], new)

        # Tokens that are not new go to a slot beyond the capacity, where writes are dropped.
        is_new = (step <= seen.length[:, None]) & (seen.length[:, None] > 0)
        slots = jnp.where(is_new, start[:, None] + step, capacity)
        append = jax.vmap(lambda tokens, slots, new: tokens.at[slots].set(new, mode="drop"))
        tokens = append(state.tokens, slots, new)

        length = jnp.where(seen.length > 0, start + seen.length + 1, state.length)
        return TextState(tokens=tokens, length=length)
