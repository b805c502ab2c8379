"""Verification of point masses: all nodes of a draft at once instead of one after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.kernels import draw
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import Draft, Verdict


def verify_points(
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    *,
    accept: Float[Array, "B N"],
    choose: Float[Array, "B U"],
    max_depth: int,
) -> Verdict:
    """:func:`eagle3_jax.verify` for proposals that are point masses, without a walk from node to node.

    A rejected point mass removes its own token from ``p`` and nothing else. Whether a node is accepted once the walk is
    at its parent therefore depends only on its elder siblings: ``u · (1 - Σ p(x_elder)) < p(x)``.

    The arguments are those of :func:`eagle3_jax.verify`; the draft's ``probs`` are not read.
    """
    vocab_size = target_probs.shape[-1]
    pick = jax.vmap(lambda probs, parents, tokens: probs[jnp.maximum(parents, 0), tokens])
    without = jax.vmap(lambda p, tokens: p.at[tokens].set(0.0, mode="drop"))
    # A token that an elder sibling has proposed has no mass left.
    elder = _elder_siblings(draft) & draft.valid[:, None, :]
    again = jnp.any(elder & (draft.tokens[:, :, None] == draft.tokens[:, None, :]), axis=-1)
    p = jnp.where(again, 0.0, pick(target_probs, draft.parents, draft.tokens))
    # By rounding, elder siblings can add up to more than one. So a token without mass is rejected explicitly.
    left = 1.0 - jnp.sum(jnp.where(elder, p[:, None, :], 0.0), axis=-1)
    path, count, last = follow_accepted(draft, (p > 0) & (accept * left < p), max_depth)

    refused = draft.valid & (draft.parents == last[:, None])
    whole = jnp.take_along_axis(target_probs, last[:, None, None], axis=1)[:, 0]
    rest = without(whole, jnp.where(refused, draft.tokens, vocab_size))
    # Only rounding can leave no mass at all. Then any token with mass may be drawn.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, whole)
    return Verdict(path=path, num_accepted=count, next_token=draw(rest, choose))


def follow_accepted(
    draft: Draft, taken: Bool[Array, "B N"], max_depth: int
) -> tuple[Int[Array, "B G"], Int[Array, " B"], Int[Array, " B"]]:
    """Follows the first child that is ``taken``, from the root on.

    A node is on the path if it and all its ancestors are each the first child that their parent takes. This needs no
    walk, each step of which would cost several kernels.

    Returns:
        The path below the root, -1 padded; its length; the node where it ends.
    """
    node = jnp.arange(draft.parents.shape[1], dtype=jnp.int32)
    taken = taken & draft.valid & (draft.parents >= 0)
    first = taken & ~jnp.any(_elder_siblings(draft) & taken[:, None, :], axis=-1)
    above = ancestor_mask(draft.parents, max_depth)
    on_path = above[:, :, 0] & jnp.all(first[:, None, :] | (node == 0)[None, None] | ~above, axis=-1)
    path, count = path_of(on_path, above, max_depth)
    return path, count, jnp.max(jnp.where(on_path, node, 0), axis=-1)


def path_of(
    on_path: Bool[Array, "B N"], above: Bool[Array, "B N N"], max_depth: int
) -> tuple[Int[Array, "B G"], Int[Array, " B"]]:
    """Lists the nodes of one path in order, -1 padded, and counts those below the root.

    Args:
        on_path: The nodes of the path, including the root.
        above: The ancestors of each node, including itself.
        max_depth: ``G``, longest path below the root.
    """
    node = jnp.arange(on_path.shape[1], dtype=jnp.int32)
    level = jnp.where(on_path, depths(above), 0)
    reached = level[:, None, :] == jnp.arange(1, max_depth + 1, dtype=jnp.int32)[:, None][None]
    path = jnp.max(jnp.where(reached, node, -1), axis=-1)
    return path, jnp.sum(path >= 0, axis=-1, dtype=jnp.int32)


def _elder_siblings(draft: Draft) -> Bool[Array, "B N N"]:
    """``[b, n, m]``: node ``m`` has the same parent as node ``n`` and a lower number."""
    node = jnp.arange(draft.parents.shape[1], dtype=jnp.int32)
    return (draft.parents[:, :, None] == draft.parents[:, None, :]) & (node[None, :] < node[:, None])[None]
