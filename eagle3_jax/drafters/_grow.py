"""Growing draft trees with a network that is run level by level; shared by the autoregressive drafters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.sampling import argmax, draw, num_digits, probabilities, uniforms
from eagle3_jax.tree import Chain, DynamicTree, StaticTree, Topology
from eagle3_jax.types import Draft, DraftSampling, SamplingParams, Warping


class Level(NamedTuple):
    """What running the draft network on the nodes of one level gives.

    Attributes:
        logits: ``[B k W]``, over the draft vocabulary, for the children of each node; ``[B 1 W]`` where the children of
            all nodes have one law.
        carry: Pytree of ``[B k ...]``, what a node hands to its children.
        memory: Whatever the network remembers of the levels run so far (keys and values), and before them.
    """

    logits: Float[Array, " B #k W"]
    carry: Any
    memory: Any


# (target token ids [B k], carry of their parents, depth below the root minus 1, mask over all nodes run so far
# including these [B k M], memory) -> Level
RunLevel = Callable[[Int[Array, "B k"], Any, int, Bool[Array, "B k M"], Any], Level]


def draft(
    topology: Topology,
    draft_sampling: DraftSampling,
    *,
    root: Int[Array, " B"],
    first: Level,
    run: RunLevel,
    draft_to_target: Int[Array, " W"] | None,
    vocab_size: int,
    keys: Key[Array, " B"],
    sampling: SamplingParams,
) -> tuple[Draft, Any]:
    """A draft of the likeliest tokens (:func:`grow`), or a drawn one (:func:`draw_chain`, :func:`draw_static`)."""
    if draft_sampling is DraftSampling.GREEDY:
        return grow(topology, root=root, first=first, run=run, draft_to_target=draft_to_target)
    drawn = draw_chain if isinstance(topology, Chain) else draw_static
    return drawn(
        topology,  # type: ignore[arg-type]
        root=root,
        first=first,
        run=run,
        draft_to_target=draft_to_target,
        vocab_size=vocab_size,
        keys=keys,
        sampling=sampling,
    )


def grow(
    topology: Topology,
    *,
    root: Int[Array, " B"],
    first: Level,
    run: RunLevel,
    draft_to_target: Int[Array, " W"] | None,
) -> tuple[Draft, Any]:
    """Draft a tree of the given topology, deterministically: the likeliest tokens under the draft network.

    Args:
        topology: Chain, dynamic tree or static tree.
        root: The last committed token.
        first: Logits and carry at the root, ``k = 1``.
        run: Runs the network on one level.
        draft_to_target: Target id of each draft id; ``None`` where these are the same.

    Returns:
        A draft without ``probs`` (each proposal is a point mass), and the memory after the last level that was run.
    """
    if isinstance(topology, StaticTree):
        return _grow_static(topology, root, first, run, draft_to_target)
    if isinstance(topology, Chain):
        return _grow_chain(topology, root, first, run, draft_to_target)
    return _grow_dynamic(topology, root, first, run, draft_to_target)


def draw_chain(
    chain: Chain,
    *,
    root: Int[Array, " B"],
    first: Level,
    run: RunLevel,
    draft_to_target: Int[Array, " W"] | None,
    vocab_size: int,
    keys: Key[Array, " B"],
    sampling: SamplingParams,
) -> tuple[Draft, Any]:
    """Draft a chain by drawing each token from ``q = softmax(draft logits / temperature)``.

    Leviathan et al. (2023), algorithm 1. Top-k and top-p shape the target alone, as in vLLM: any ``q`` is exact as long
    as it is the one that was drawn from. A row of temperature 0 drafts the likeliest token, with ``q`` a point mass.

    Args:
        chain: How many tokens.
        root: The last committed token.
        first: Logits and carry at the root, ``k = 1``.
        run: Runs the network on one level.
        draft_to_target: Target id of each draft id; ``None`` where these are the same.
        vocab_size: ``V``.
        keys: Of this round, one per row.
        sampling: One value per row.

    Returns:
        A draft with ``probs`` (``q`` over the target's ids, zero where the head has no token, and at the root), and the
        memory after the last token that was run.
    """
    batch, depth = root.shape[0], chain.num_speculative_tokens
    greedy = jnp.asarray(sampling.temperature) == 0
    digits = num_digits(first.logits.shape[-1])
    dice = uniforms(keys, depth * digits).reshape(batch, depth, digits)
    tokens, probs = [], [jnp.zeros((batch, vocab_size), jnp.float32)]
    level = first
    for index in range(depth):
        logits = level.logits[:, 0]
        q = probabilities(level.logits, sampling, Warping.TEMPERATURE)[:, 0]
        # Where every temperature is a constant 0 the compiler keeps the argmax alone.
        ids = jnp.where(greedy, argmax(logits), draw(q, dice[:, index]))
        tokens.append(to_target(draft_to_target, ids))
        probs.append(over_target(draft_to_target, q, vocab_size))
        if index + 1 < depth:
            seen = jnp.ones((batch, 1, index + 1), jnp.bool_)
            level = run(tokens[-1][:, None], level.carry, index, seen, level.memory)
    parents = jnp.broadcast_to(jnp.arange(depth, dtype=jnp.int32), (batch, depth))
    draft = _with_root(root, jnp.stack(tokens, axis=1), parents)
    return draft.replace(probs=jnp.stack(probs, axis=1)), level.memory  # type: ignore[attr-defined]


def draw_static(
    tree: StaticTree,
    *,
    root: Int[Array, " B"],
    first: Level,
    run: RunLevel,
    draft_to_target: Int[Array, " W"] | None,
    vocab_size: int,
    keys: Key[Array, " B"],
    sampling: SamplingParams,
) -> tuple[Draft, Any]:
    """Draft a static tree by drawing the children of each node one after the other, without replacement.

    EAGLE-1's tree at a temperature (Li et al., 2024, arXiv 2401.15077): the eldest child follows
    ``q = softmax(draft logits / temperature)``, each further one ``q`` without its elder siblings, renormalised. That
    is what a node declares, so SpecInfer's rule (:func:`eagle3_jax.verify`) is exact: whatever a refused
    sibling was, the next one is a fresh draw from a distribution that was known before it.

    Ranks say here in which order siblings are drawn, not how likely they are. A row of temperature 0 drafts the
    likeliest tokens in that order, each a point mass.

    Arguments and result are those of :func:`draw_chain`.
    """
    batch, size = root.shape[0], tree.num_nodes
    greedy = jnp.asarray(sampling.temperature)[:, None] == 0
    digits = num_digits(first.logits.shape[-1])
    dice = uniforms(keys, (size - 1) * digits).reshape(batch, size - 1, digits)
    rows, probs = jnp.arange(batch)[:, None], jnp.zeros((batch, size, vocab_size), jnp.float32)

    def without_replacement(logits: Array, slots: np.ndarray, ranks: np.ndarray, children: np.ndarray) -> Array:
        nonlocal probs
        logits = (
            jnp.broadcast_to(logits, (batch, slots.max() + 1, logits.shape[-1])) if logits.shape[1] == 1 else logits
        )
        ids = jnp.zeros((batch, children.size), jnp.int32)
        elder = np.sum((slots[:, None] == slots) & (ranks[:, None] > ranks), axis=1)
        for place in range(elder.max() + 1):
            (these,) = np.nonzero(elder == place)
            left, nodes = logits[:, slots[these]], children[these]
            q = probabilities(left, sampling, Warping.TEMPERATURE)
            drawn = jnp.where(greedy, argmax(left), draw(q, dice[:, nodes - 1]))
            ids = ids.at[:, these].set(drawn)
            probs = probs.at[:, nodes].set(over_target(draft_to_target, q, vocab_size))
            logits = logits.at[rows, slots[these], drawn].set(-jnp.inf)
        return ids

    draft, memory = _by_levels(tree, root, first, run, draft_to_target, without_replacement)
    return draft.replace(probs=probs), memory  # type: ignore[attr-defined]


def to_target(draft_to_target: Int[Array, " W"] | None, ids: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """Target ids of draft ids."""
    return ids.astype(jnp.int32) if draft_to_target is None else draft_to_target[ids]


def over_target(
    draft_to_target: Int[Array, " W"] | None, q: Float[Array, "*n W"], vocab_size: int
) -> Float[Array, "*n V"]:
    """A distribution over draft ids as one over target ids, zero where the head has no token."""
    if draft_to_target is None:
        return q
    return jnp.zeros((*q.shape[:-1], vocab_size), jnp.float32).at[..., draft_to_target].add(q)


def _grow_chain(
    chain: Chain, root: Int[Array, " B"], first: Level, run: RunLevel, draft_to_target: Int[Array, " W"] | None
) -> tuple[Draft, Any]:
    """The likeliest token after the likeliest token: the dynamic tree that is one node wide, without its scores."""
    batch, depth = root.shape[0], chain.num_speculative_tokens
    level, tokens = first, []
    for index in range(depth):
        tokens.append(to_target(draft_to_target, argmax(level.logits[:, 0])))
        if index + 1 < depth:
            seen = jnp.ones((batch, 1, index + 1), jnp.bool_)
            level = run(tokens[-1][:, None], level.carry, index, seen, level.memory)
    parents = jnp.broadcast_to(jnp.arange(depth, dtype=jnp.int32), (batch, depth))
    return _with_root(root, jnp.stack(tokens, axis=1), parents), level.memory


def _grow_dynamic(
    topology: DynamicTree, root: Int[Array, " B"], first: Level, run: RunLevel, draft_to_target: Int[Array, " W"] | None
) -> tuple[Draft, Any]:
    """EAGLE-2, section 4: expand by cumulative draft log-probability, then keep the best of all candidates.

    Candidates are numbered as the official code numbers them: the ``k`` children of the root, then level by level
    the ``k x k`` children of the expanded nodes, row by row.
    """
    width, batch = topology.top_k, root.shape[0]
    logprobs, ids = _likeliest(first.logits[:, 0], width)
    tokens = to_target(draft_to_target, ids)
    scores, flat = logprobs, jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
    pool_scores, pool_tokens, pool_parents = [scores], [tokens], [jnp.full((batch, width), -1, jnp.int32)]
    carry = jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=1), first.carry)
    itself = jnp.broadcast_to(jnp.eye(width, dtype=jnp.bool_), (batch, width, width))
    mask, memory = itself, first.memory

    for depth in range(topology.max_depth - 1):
        level = run(tokens, carry, depth, mask, memory)
        logprobs, ids = _likeliest(level.logits, width)
        cumulative = (scores[:, :, None] + logprobs).reshape(batch, -1)
        children = jnp.broadcast_to(to_target(draft_to_target, ids), (batch, width, width)).reshape(batch, -1)
        pool_scores.append(cumulative)
        pool_tokens.append(children)
        pool_parents.append(jnp.repeat(flat, width, axis=1))

        scores, best = lax.top_k(cumulative, width)
        slots = best // width
        tokens = jnp.take_along_axis(children, best, axis=1)
        flat = width + depth * width**2 + best
        carry = jax.tree.map(lambda leaf, slots=slots: _take(leaf, slots), level.carry)
        mask = jnp.concatenate([_take(mask, slots), itself], axis=-1)
        memory = level.memory

    pool_parents = jnp.concatenate(pool_parents, axis=1)
    # Scores never rise along a path and ties go to the lower index, where parents stand: the choice is ancestor-closed.
    _, chosen = lax.top_k(jnp.concatenate(pool_scores, axis=1), topology.num_nodes - 1)
    chosen = jnp.sort(chosen, axis=1)
    wanted = jnp.take_along_axis(pool_parents, chosen, axis=1)
    rank = jnp.sum(chosen[:, None, :] < wanted[:, :, None], axis=-1, dtype=jnp.int32)
    parents = jnp.where(wanted < 0, 0, 1 + rank)
    tokens = jnp.take_along_axis(jnp.concatenate(pool_tokens, axis=1), chosen, axis=1)
    return _with_root(root, tokens, parents), memory


def _likeliest(logits: Float[Array, "*B W"], count: int) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Log-probabilities and ids of the likeliest tokens; all others are only summed."""
    # Without a barrier XLA would cut the largest one out of a sort of everything. One for each of the two: on a mesh
    # XLA's CPU backend dies of one behind the pair.
    best, ids = map(lax.optimization_barrier, lax.top_k(logits, count))
    total = jnp.sum(jnp.exp(logits - best[..., :1]), axis=-1, keepdims=True)
    return best - best[..., :1] - jnp.log(total), ids


def _grow_static(
    topology: StaticTree, root: Int[Array, " B"], first: Level, run: RunLevel, draft_to_target: Int[Array, " W"] | None
) -> tuple[Draft, Any]:
    """Each child is the token of its rank under its parent."""

    def by_rank(logits: Array, slots: np.ndarray, ranks: np.ndarray, children: np.ndarray) -> Array:
        del children
        ids = lax.top_k(logits, int(ranks.max()) + 1)[1]
        return ids[:, slots if ids.shape[1] > 1 else 0, ranks]

    return _by_levels(topology, root, first, run, draft_to_target, by_rank)


# (logits [B k W] of the nodes that were run, or [B 1 W] of all of them; for each of their children its parent among
# them, its rank and its node) -> draft ids of the children [B c]
Choose = Callable[[Float[Array, "B k W"], np.ndarray, np.ndarray, np.ndarray], Int[Array, "B c"]]


def _by_levels(
    topology: StaticTree,
    root: Int[Array, " B"],
    first: Level,
    run: RunLevel,
    draft_to_target: Int[Array, " W"] | None,
    choose: Choose,
) -> tuple[Draft, Any]:
    """A static tree, level by level; only nodes with children are run."""
    batch, parents = root.shape[0], np.array(topology.parents)
    level_of = np.array([0, *(len(path) for path in topology.paths)])
    ranks = np.array([-1, *(path[-1] for path in topology.paths)])
    tokens = jnp.zeros((batch, topology.num_nodes), jnp.int32)
    level, running, ran = first, np.array([0]), np.array([], int)
    for depth in range(topology.max_depth):
        children = np.flatnonzero(level_of == depth + 1)
        slots = np.searchsorted(running, parents[children])
        ids = choose(level.logits, slots, ranks[children], children)
        tokens = tokens.at[:, children].set(to_target(draft_to_target, ids))
        expanding = children[np.isin(children, parents)]
        if expanding.size == 0:
            break
        carry = jax.tree.map(lambda leaf, at=np.searchsorted(running, parents[expanding]): leaf[:, at], level.carry)
        ran = np.concatenate([ran, expanding])
        seen = np.zeros((expanding.size, ran.size), bool)
        for row, node in enumerate(expanding):
            while node > 0:
                seen[row, np.flatnonzero(ran == node)] = True
                node = parents[node]
        mask = jnp.broadcast_to(jnp.asarray(seen), (batch, *seen.shape))
        level, running = run(tokens[:, expanding], carry, depth, mask, level.memory), expanding
    below = jnp.broadcast_to(jnp.asarray(parents[1:], jnp.int32), (batch, topology.num_nodes - 1))
    return _with_root(root, tokens[:, 1:], below), level.memory


def _take(leaf: Array, slots: Int[Array, "B k"]) -> Array:
    index = slots.reshape(*slots.shape, *(1,) * (leaf.ndim - 2))
    return jnp.take_along_axis(leaf, index, axis=1)


def _with_root(root: Int[Array, " B"], tokens: Int[Array, "B K"], parents: Int[Array, "B K"]) -> Draft:
    """Returns a draft of the root and the nodes below it."""
    tokens = jnp.concatenate([root[:, None], tokens.astype(jnp.int32)], axis=1)
    parents = jnp.concatenate([jnp.full_like(root, -1)[:, None], parents.astype(jnp.int32)], axis=1)
    return Draft(tokens=tokens, parents=parents, valid=jnp.ones(tokens.shape, jnp.bool_))
