"""Draft trees as integers: each node's parent, the attention mask that follows from it, and depths."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from eagle3_jax.types import Draft

# Longest causal mask that is stored as a constant. A longer one would be a large constant.
_SHORT = 128


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


def causal_mask(size: int) -> Bool[Array, "1 T T"]:
    """Every token sees itself and what stands before it."""
    if size <= _SHORT:
        return jnp.asarray(np.tri(size, dtype=bool)[None])  # a constant, which no kernel has to write
    return jnp.tril(jnp.ones((size, size), jnp.bool_))[None]


def sanitize_draft(draft: Draft, root: Int[Array, " B"], *, vocab_size: int, is_chain: bool) -> Draft:
    """Repair the root, ids and parents of a draft.

    Node 0 becomes the root. A node with an id outside the vocabulary, or with a declared distribution that is not
    finite, is marked invalid and holds the root's token, so that nothing is read out of range. In a declared chain
    every node's parent is the node before it; in a tree a parent that does not precede its child becomes -1, which
    cuts the node off (see :func:`drop_unreachable_nodes`).

    Args:
        draft: The proposal.
        root: ``[B]``, the last committed token.
        vocab_size: ``V``.
        is_chain: Whether the drafter declared a chain.
    """
    node = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)[None, :]
    is_root = node == 0
    known = (draft.tokens >= 0) & (draft.tokens < vocab_size)
    if draft.probs is not None:
        # Decided by the distribution alone: dropping a node for the token that was drawn would bias the output.
        known &= jnp.isfinite(jnp.sum(draft.probs, axis=-1))
    if is_chain:
        parents = jnp.asarray(np.broadcast_to(np.arange(-1, node.size - 1, dtype=np.int32), draft.parents.shape))
    else:
        topological = (draft.parents >= 0) & (draft.parents < node)
        parents = jnp.where(topological, draft.parents, -1)
    return draft.replace(
        tokens=jnp.where(is_root | ~known, root[:, None], draft.tokens),
        parents=parents,
        valid=is_root | (draft.valid & known),
    )


def drop_unreachable_nodes(draft: Draft, mask: Bool[Array, "B N N"]) -> Draft:
    """Drop the nodes that do not see the root: too deep, or below a node without a topological parent.

    Args:
        draft: After :func:`sanitize_draft`.
        mask: Its ancestor mask, limited to the drafter's ``max_depth``.
    """
    return draft.replace(valid=draft.valid & mask[:, :, 0])
