"""Draft trees as integers: each node's parent, the attention mask that follows from it, and depths."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def ancestor_mask(parents: Int[Array, "B N"], max_depth: int) -> Bool[Array, "B N N"]:
    """The attention mask of a tree: each node sees itself and its ancestors.

    For the tree ``0 -> 1 -> 3``, ``0 -> 2``::

        parents  -1 0 0 1        mask   1 0 0 0
                                        1 1 0 0
                                        1 0 1 0
                                        1 1 0 1
    """
    num_nodes = parents.shape[1]
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    mask = jnp.broadcast_to(jnp.eye(num_nodes, dtype=jnp.bool_), (*parents.shape, num_nodes))
    ancestor = parents
    for _ in range(max_depth):
        mask = mask | (ancestor[..., None] == nodes[None, None])
        ancestor = jnp.where(ancestor < 0, -1, jnp.take_along_axis(parents, jnp.maximum(ancestor, 0), axis=1))
    return mask


def depths(mask: Bool[Array, "B N N"]) -> Int[Array, "B N"]:
    """The level of each node, 0 at the root."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1


def take_nodes(of_nodes: Array, nodes: Int[Array, "B k"] | slice) -> Array:
    """The entries ``[B k ...]`` of some nodes, from ``[B N ...]``; a slice takes the same nodes of every row."""
    if isinstance(nodes, slice):
        return of_nodes[:, nodes]
    return jnp.take_along_axis(of_nodes, nodes.reshape(*nodes.shape, *(1,) * (of_nodes.ndim - 2)), axis=1)
