"""A drafter that proposes nothing for a while and keeps up with the text, so that it can go on at any time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from eagle3_jax.types import Draft, Drafter, Observation, SamplingParams


@dataclasses.dataclass(frozen=True)
class Silent:
    """Plain decoding with the state of another drafter, which sees every token and drafts none.

    What a schedule falls back to where speculation does not pay: the draft head still takes in the target's features,
    because its cache could not be filled later.

    Attributes:
        drafter: Whose state is kept.
    """

    drafter: Drafter[Any]

    @property
    def num_nodes(self) -> int:
        """The root."""
        return 1

    @property
    def max_depth(self) -> int:
        """As :class:`eagle3_jax.drafters.Plain`, one level that is always empty."""
        return 1

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Those of the other drafter."""
        return self.drafter.aux_layers

    @property
    def is_chain(self) -> bool:
        """Nothing branches."""
        return True

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        """See :class:`eagle3_jax.types.Drafter`."""
        return self.drafter.init(params, batch, capacity)

    def observe(self, params: Any, state: Any, seen: Observation) -> Any:
        """As the other drafter does."""
        return self.drafter.observe(params, state, seen)

    def propose(self, params: Any, state: Any, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """The root alone; the compiler drops the rest of the other drafter's proposal, which nothing reads."""
        root = self.drafter.propose(params, state, keys, sampling).tokens[:, :1]
        return Draft(tokens=root, parents=jnp.full_like(root, -1), valid=jnp.ones_like(root, jnp.bool_))
