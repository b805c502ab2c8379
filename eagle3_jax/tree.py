"""Draft trees as integers: each node's parent, and the attention mask and depths that follow."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from eagle3_jax.devices.kernels import indices
from eagle3_jax.types import Draft

# A causal mask of at most this many tokens is a constant of the program.
_LONGEST_CONSTANT = 128


def ancestor_mask(parents: Int[Array, "B N"], max_depth: int) -> Bool[Array, "B N N"]:
    """Returns the attention mask of a tree: each node attends to itself and its ancestors.

    For the tree ``0 -> 1 -> 3``, ``0 -> 2``::

        parents  -1 0 0 1        mask   1 0 0 0
                                        1 1 0 0
                                        1 0 1 0
                                        1 1 0 1
    """
    num_nodes = parents.shape[1]
    nodes = indices(num_nodes)
    itself = jnp.eye(num_nodes, dtype=jnp.bool_)
    mask = jnp.broadcast_to(itself, (*parents.shape, num_nodes))

    # `ancestor` climbs one level with every turn; -1 is above the root and equals no node.
    ancestor = parents
    for _ in range(max_depth):
        mask = mask | (ancestor[..., None] == nodes[None, None])
        above_root = ancestor < 0
        parent = jnp.take_along_axis(parents, jnp.maximum(ancestor, 0), axis=1)
        ancestor = jnp.where(above_root, -1, parent)
    return mask


def depths(mask: Bool[Array, "B N N"]) -> Int[Array, "B N"]:
    """Returns the level of each node of an ancestor mask, 0 at the root."""
    return jnp.sum(mask, axis=-1, dtype=jnp.int32) - 1


def take_nodes(values: Array, nodes: Int[Array, "B k"] | slice) -> Array:
    """Returns the entries ``[B k ...]`` of some nodes, from ``values [B N ...]``.

    Args:
        values: One entry per node.
        nodes: ``[B k]``, node numbers; or a slice, for the same nodes of every row.
    """
    if isinstance(nodes, slice):
        return values[:, nodes]
    trailing = (1,) * (values.ndim - 2)
    return jnp.take_along_axis(values, nodes.reshape(*nodes.shape, *trailing), axis=1)


def causal_mask(size: int) -> Bool[Array, "1 T T"]:
    """Returns the mask with which every token attends to itself and to the tokens before it."""
    if size <= _LONGEST_CONSTANT:
        # No kernel has to write a constant.
        constant = np.tri(size, dtype=bool)
        return jnp.asarray(constant[None])
    return jnp.tril(jnp.ones((size, size), jnp.bool_))[None]


def sanitize_draft(
    draft: Draft, root: Int[Array, " B"], *, vocab_size: int, is_chain: bool
) -> Draft:
    """Repairs the root, ids and parents of a draft.

    Node 0 becomes the root. A node with an id outside the vocabulary, or with a declared
    distribution that is not finite, is marked invalid and holds the root's token, so that nothing
    is read out of range. In a declared chain every node's parent is the node before it; in a tree a
    parent that does not precede its child becomes -1, which cuts the node off (see
    :func:`drop_unreachable_nodes`).

    Args:
        draft: The proposal.
        root: ``[B]``, the last committed token.
        vocab_size: ``V``.
        is_chain: Whether the drafter declared a chain.
    """
    node = indices(draft.tokens.shape[1])[None, :]
    is_root = node == 0
    known = (draft.tokens >= 0) & (draft.tokens < vocab_size)
    if draft.probs is not None:
        # The distribution alone decides. Dropping a node because of the token that was sampled
        # would bias the output.
        mass = jnp.sum(draft.probs, axis=-1)
        known &= jnp.isfinite(mass)

    if is_chain:
        before = np.arange(-1, node.size - 1, dtype=np.int32)
        parents = jnp.asarray(np.broadcast_to(before, draft.parents.shape))
    else:
        topological = (draft.parents >= 0) & (draft.parents < node)
        parents = jnp.where(topological, draft.parents, -1)

    holds_root = is_root | ~known
    tokens = jnp.where(holds_root, root[:, None], draft.tokens)
    valid = is_root | (draft.valid & known)
    return draft.replace(tokens=tokens, parents=parents, valid=valid)


def drop_unreachable_nodes(draft: Draft, mask: Bool[Array, "B N N"]) -> Draft:
    """Marks nodes invalid that do not attend to the root.

    They are too deep, or below a node without a topological parent.

    Args:
        draft: The result of :func:`sanitize_draft`.
        mask: Its ancestor mask, limited to the drafter's ``max_depth``.
    """
    reaches_root = mask[:, :, 0]
    return draft.replace(valid=draft.valid & reaches_root)
