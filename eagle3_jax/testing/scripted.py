"""Drafters without a network, for tests of a loop, a target or an acceptance rule.

Subclasses of :class:`FixedTree` choose the tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float, Int

from eagle3_jax.types import Draft, Observation


class RootState(struct.PyTreeNode, kw_only=True):
    """The last token of each row, and the number of tokens before it."""

    root: Int[Array, " B"]
    length: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class FixedTree:
    """A drafter without features whose drafts all have the same ``parents`` (-1 at the root)."""

    parents: tuple[int, ...]

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """No layers."""
        return ()

    def init(self, params: Any, batch: int, capacity: int) -> RootState:
        """Returns an empty state."""
        zero = jnp.zeros((batch,), jnp.int32)
        return RootState(root=zero, length=zero)

    def observe(self, params: Any, state: RootState, seen: Observation) -> RootState:
        """Takes in committed tokens."""
        root = jnp.where(seen.length > 0, seen.next_token, state.root)
        return RootState(root=root, length=state.length + seen.length)

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return len(self.parents)

    @property
    def levels(self) -> tuple[int, ...]:
        """Depth of each node."""
        levels = [0]
        for parent in self.parents[1:]:
            levels.append(levels[parent] + 1)
        return tuple(levels)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return max(self.levels)

    @property
    def is_chain(self) -> bool:
        """Whether the parent of each node is the node before it."""
        return self.parents == chain_parents(self.num_nodes - 1)

    def positions(self, state: RootState) -> Int[Array, "B N"]:
        """Returns the position of each node."""
        return state.length[:, None] + jnp.array(self.levels, jnp.int32)[None]

    def scripted(self, script: Int[Array, "B S"], state: RootState) -> Int[Array, "B N"]:
        """Returns for each node the token at its position in a text; past the end, the last one."""
        positions = jnp.minimum(self.positions(state), script.shape[1] - 1)
        return jnp.take_along_axis(script, positions, axis=1)

    def draft(
        self,
        state: RootState,
        tokens: Int[Array, "B N"],
        probs: Float[Array, "B N V"] | None = None,
    ) -> Draft:
        """Returns a draft of these tokens, with the root in place of the first one."""
        return Draft(
            tokens=tokens.at[:, 0].set(state.root),
            parents=jnp.broadcast_to(jnp.array(np.array(self.parents, np.int32)), tokens.shape),
            valid=jnp.ones(tokens.shape, jnp.bool_),
            probs=probs,
        )


def chain_parents(num_speculative_tokens: int) -> tuple[int, ...]:
    """Returns the parents of a chain's nodes."""
    return tuple(range(-1, num_speculative_tokens))
