"""Plain decoding as a drafter: one without a state, and one that keeps another drafter's state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Int, Key

from eagle3_jax.cache import Cache
from eagle3_jax.checks import propose, reads_cache
from eagle3_jax.types import Draft, Drafter, Observation, SamplingParams


class PlainState(struct.PyTreeNode, kw_only=True):
    """The state of :class:`Plain`.

    Attributes:
        root: ``[B]``, the last token chosen by the target.
    """

    root: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Plain:
    """Proposes nothing: a round is one target step.

    With ``num_nodes`` above 1, the other nodes of the block are padding that is never accepted. The
    target then runs in the same shapes as with a drafter of that size, so its logits are bit for
    bit those of verification. This is the shape-matched baseline.

    Attributes:
        num_nodes: Tokens of the target's block, root included.
    """

    num_nodes: int = 1
    aux_layers = ()
    is_chain = True

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes is {self.num_nodes}; expected at least 1, the root")

    @property
    def max_depth(self) -> int:
        """``G``, the depth of a chain with as many nodes; at least 1."""
        return max(self.num_nodes - 1, 1)

    def init(self, params: Any, batch: int, capacity: int) -> PlainState:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params, capacity
        return PlainState(root=jnp.zeros((batch,), jnp.int32))

    def observe(self, params: Any, state: PlainState, seen: Observation) -> PlainState:
        """Stores the next token as the root."""
        del params
        return PlainState(root=jnp.where(seen.length > 0, seen.next_token, state.root))

    def propose(
        self, params: Any, state: PlainState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Returns the root and padding."""
        del params, keys, sampling
        shape = (state.root.shape[0], self.num_nodes)
        node = jnp.broadcast_to(jnp.arange(self.num_nodes, dtype=jnp.int32), shape)
        return Draft(
            tokens=jnp.broadcast_to(state.root[:, None], shape),
            parents=node - 1,
            valid=node == 0,
        )


@dataclasses.dataclass(frozen=True)
class Silent:
    """Plain decoding that keeps the state of another drafter, which can draft again at any time.

    A schedule uses it at batch sizes without drafts. A draft head must still observe the target's
    features, because its cache could not be filled later.

    Attributes:
        drafter: The drafter whose state is kept.
    """

    drafter: Drafter[Any]
    num_nodes = 1
    # One level that is always empty, as for `Plain`.
    max_depth = 1
    is_chain = True

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers that the other drafter reads."""
        return self.drafter.aux_layers

    @property
    def reads_cache(self) -> bool:
        """Whether the other drafter reads the target's cache."""
        return reads_cache(self.drafter)

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        """Returns the other drafter's empty state."""
        return self.drafter.init(params, batch, capacity)

    def observe(self, params: Any, state: Any, seen: Observation) -> Any:
        """Updates the other drafter's state."""
        return self.drafter.observe(params, state, seen)

    def propose(
        self,
        params: Any,
        state: Any,
        keys: Key[Array, " B"],
        sampling: SamplingParams,
        *,
        cache: Cache | None = None,
    ) -> Draft:
        """Returns only the root of the other drafter's draft.

        The compiler removes the work for the other nodes.
        """
        root = propose(self.drafter, params, state, keys, sampling, cache).tokens[:, :1]
        return Draft(
            tokens=root, parents=jnp.full_like(root, -1), valid=jnp.ones_like(root, jnp.bool_)
        )
