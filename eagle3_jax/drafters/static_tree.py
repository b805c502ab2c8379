"""Grows a static tree level by level: greedily, or by sampling siblings without replacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from eagle3_jax.drafters.grow import DraftInputs
from eagle3_jax.sampling import argmax, draw, num_digits, probabilities, uniforms
from eagle3_jax.topology import StaticTree
from eagle3_jax.types import Draft, SamplingMode

# Chooses the tokens of one level. Arguments: logits of the nodes that were run ([B k W], or [B 1 W]
# if all share one distribution), and for each child the index of its parent among those nodes, its
# rank, and its own node ([c] each). Result: draft ids [B c].
ChooseChildren = Callable[
    [Float[Array, "B k W"], np.ndarray, np.ndarray, np.ndarray], Int[Array, "B c"]
]


def grow_static_tree(tree: StaticTree, inputs: DraftInputs) -> tuple[Draft, Any]:
    """Drafts a static tree greedily: each child is the token of its rank under its parent.

    Returns:
        A draft without ``probs``, and the memory after the last level that was run.
    """

    def choose_by_rank(
        logits: Array, slots: np.ndarray, ranks: np.ndarray, children: np.ndarray
    ) -> Array:
        del children
        ids = lax.top_k(logits, int(ranks.max()) + 1)[1]
        return ids[:, slots if ids.shape[1] > 1 else 0, ranks]

    return _grow_by_levels(tree, inputs, choose_by_rank)


def sample_static_tree(tree: StaticTree, inputs: DraftInputs) -> tuple[Draft, Any]:
    """Drafts a static tree by sampling the children of each node without replacement.

    This is EAGLE-1's tree at a temperature (Li et al., 2024, arXiv 2401.15077). The first child
    follows ``q = softmax(draft logits / temperature)``; each further child follows ``q`` without
    its elder siblings, renormalized. Each node declares the distribution that it was sampled from,
    so SpecInfer's rule (:func:`eagle3_jax.verify`) is exact: after a rejected sibling the next one
    is a fresh sample from a distribution that was known before.

    Ranks give the order in which siblings are sampled, not their likelihood. A row of temperature 0
    drafts the most likely tokens in that order, each a point mass.

    Returns:
        A draft with ``probs``, and the memory after the last level that was run.
    """
    batch = inputs.root.shape[0]
    size = tree.num_nodes
    greedy = jnp.asarray(inputs.sampling.temperature)[:, None] == 0
    digits = num_digits(inputs.first.logits.shape[-1])
    dice = uniforms(inputs.keys, (size - 1) * digits).reshape(batch, size - 1, digits)
    rows = jnp.arange(batch)[:, None]
    probs = jnp.zeros((batch, size, inputs.vocab_size), jnp.float32)

    def sample_without_replacement(
        logits: Array, slots: np.ndarray, ranks: np.ndarray, children: np.ndarray
    ) -> Array:
        nonlocal probs
        if logits.shape[1] == 1:
            logits = jnp.broadcast_to(logits, (batch, slots.max() + 1, logits.shape[-1]))

        ids = jnp.zeros((batch, children.size), jnp.int32)
        # Children of equal order, the number of their elder siblings, have different parents and
        # are sampled together.
        order = np.sum((slots[:, None] == slots) & (ranks[:, None] > ranks), axis=1)
        for current in range(order.max() + 1):
            (selected,) = np.nonzero(order == current)
            candidates = logits[:, slots[selected]]
            nodes = children[selected]
            q = probabilities(candidates, inputs.sampling, SamplingMode.TEMPERATURE)
            sampled = jnp.where(greedy, argmax(candidates), draw(q, dice[:, nodes - 1]))
            ids = ids.at[:, selected].set(sampled)
            probs = probs.at[:, nodes].set(inputs.over_target(q))
            # Younger siblings cannot be the same token.
            logits = logits.at[rows, slots[selected], sampled].set(-jnp.inf)
        return ids

    draft, memory = _grow_by_levels(tree, inputs, sample_without_replacement)
    return draft.replace(probs=probs), memory


def _grow_by_levels(
    tree: StaticTree, inputs: DraftInputs, choose: ChooseChildren
) -> tuple[Draft, Any]:
    """Runs the network on the nodes that have children, level by level.

    Returns:
        A draft without ``probs``, and the memory after the last level that was run.
    """
    batch = inputs.root.shape[0]
    parents = np.array(tree.parents)
    level_of = np.array([0, *(len(path) for path in tree.paths)])
    ranks = np.array([-1, *(path[-1] for path in tree.paths)])

    # `running` are the nodes of the newest run, whose logits `level` has; `ran` all that have run
    # below the root. The shape of the tree is known, so these indices are constants.
    tokens = jnp.zeros((batch, tree.num_nodes), jnp.int32)
    level = inputs.first
    running = np.array([0])
    ran = np.array([], int)

    for depth in range(tree.max_depth):
        children = np.flatnonzero(level_of == depth + 1)
        slots = np.searchsorted(running, parents[children])
        ids = choose(level.logits, slots, ranks[children], children)
        tokens = tokens.at[:, children].set(inputs.to_target(ids))

        # Nodes without children need no run.
        expanding = children[np.isin(children, parents)]
        if expanding.size == 0:
            break
        of_parents = np.searchsorted(running, parents[expanding])
        carry = jax.tree.map(lambda leaf, index=of_parents: leaf[:, index], level.carry)

        # Each node attends to those of its ancestors that have run, and to itself.
        ran = np.concatenate([ran, expanding])
        seen = np.zeros((expanding.size, ran.size), bool)
        for row, node in enumerate(expanding):
            while node > 0:
                seen[row, np.flatnonzero(ran == node)] = True
                node = parents[node]
        mask = jnp.broadcast_to(jnp.asarray(seen), (batch, *seen.shape))

        level = inputs.run(tokens[:, expanding], carry, depth, mask, level.memory)
        running = expanding

    below = jnp.broadcast_to(jnp.asarray(parents[1:], jnp.int32), (batch, tree.num_nodes - 1))
    return inputs.add_root(tokens[:, 1:], below), level.memory
