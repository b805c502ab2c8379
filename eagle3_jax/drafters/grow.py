"""Grows a draft from a network that is run level by level: a chain, or EAGLE-2's dynamic tree.

Static trees are in ``static_tree.py``. Any draft is verified exactly; how it grows only decides how
much is accepted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.devices.kernels import indices
from eagle3_jax.sampling import argmax, draw, num_digits, probabilities, uniforms
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.tree import take_nodes
from eagle3_jax.types import Draft, SamplingMode, SamplingParams


class Level(NamedTuple):
    """The draft network's output for the nodes of one level.

    Attributes:
        logits: ``[B k W]`` over the draft vocabulary, for the children of each node; ``[B 1 W]`` if
            the children of all nodes have the same distribution.
        carry: Pytree of ``[B k ...]``, what each node passes to its children (for EAGLE-3 the
            head's output).
        memory: The network's memory of all levels run so far (for EAGLE-3 keys, values and
            positions).
    """

    logits: Float[Array, " B #k W"]
    carry: Any
    memory: Any


# Runs the network on one level. Arguments: target token ids [B k], carry of their parents, depth
# below the root minus 1, attention mask over all nodes run so far including these [B k M], memory.
RunLevel = Callable[[Int[Array, "B k"], Any, int, Bool[Array, "B k M"], Any], Level]


class DraftInputs(NamedTuple):
    """Everything that a draft is grown from.

    Attributes:
        root: ``[B]``, the last committed token.
        first: Logits and carry at the root, ``k = 1``.
        run: Runs the network on one level.
        draft_to_target: ``[W]``, target id of each draft id; ``None`` if these are the same.
        vocab_size: ``V``.
        keys: ``[B]``, the keys of this round.
        sampling: One value per row.
    """

    root: Int[Array, " B"]
    first: Level
    run: RunLevel
    draft_to_target: Int[Array, " W"] | None
    vocab_size: int
    keys: Key[Array, " B"]
    sampling: SamplingParams

    def to_target(self, ids: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """Returns the target ids of draft ids."""
        if self.draft_to_target is None:
            return ids.astype(jnp.int32)
        return self.draft_to_target[ids]

    def over_target(self, q: Float[Array, "*n W"]) -> Float[Array, "*n V"]:
        """Returns a distribution over draft ids as one over target ids.

        It is zero for tokens that the head lacks.
        """
        if self.draft_to_target is None:
            return q
        zeros = jnp.zeros((*q.shape[:-1], self.vocab_size), jnp.float32)
        return zeros.at[..., self.draft_to_target].add(q)

    def add_root(self, tokens: Int[Array, "B K"], parents: Int[Array, "B K"]) -> Draft:
        """Returns the draft of the root and the nodes below it."""
        tokens = jnp.concatenate([self.root[:, None], tokens.astype(jnp.int32)], axis=1)
        no_parent = jnp.full_like(self.root, -1)[:, None]
        parents = jnp.concatenate([no_parent, parents.astype(jnp.int32)], axis=1)
        valid = jnp.ones(tokens.shape, jnp.bool_)
        return Draft(tokens=tokens, parents=parents, valid=valid)


def grow_chain(chain: Chain, inputs: DraftInputs) -> tuple[Draft, Any]:
    """Drafts a chain greedily: the argmax at every step.

    Returns:
        A draft without ``probs`` (every proposal is a point mass), and the memory after the last
        level that was run.
    """
    level = inputs.first
    tokens = []
    for _ in range(chain.num_speculative_tokens):
        likeliest = argmax(level.logits[:, 0])
        tokens.append(inputs.to_target(likeliest))
        level = _run_next(chain, inputs, level, tokens)
    return _join_chain(inputs, tokens), level.memory


def sample_chain(chain: Chain, inputs: DraftInputs) -> tuple[Draft, Any]:
    """Drafts a chain by sampling each token from ``q = softmax(draft logits / temperature)``.

    Leviathan et al. (2023), algorithm 1. Top-k and top-p shape only the target's distribution, as
    in vLLM: any ``q`` is exact if the token was sampled from it. A row of temperature 0 drafts the
    argmax, with a point mass as ``q``.

    Returns:
        A draft with ``probs`` (``q`` over the target's ids; zeros at the root), and the memory
        after the last level that was run.
    """
    first = inputs.first
    depth = chain.num_speculative_tokens
    batch = inputs.root.shape[0]
    greedy = jnp.asarray(inputs.sampling.temperature) == 0
    digits = num_digits(first.logits.shape[-1])
    dice = uniforms(inputs.keys, depth * digits).reshape(batch, depth, digits)

    tokens = []
    probs = [jnp.zeros((batch, inputs.vocab_size), jnp.float32)]
    level = first
    for index in range(depth):
        logits = level.logits[:, 0]
        q = probabilities(level.logits, inputs.sampling, SamplingMode.TEMPERATURE)[:, 0]
        # If every temperature is the constant 0, the compiler keeps only the argmax.
        ids = jnp.where(greedy, argmax(logits), draw(q, dice[:, index]))
        tokens.append(inputs.to_target(ids))
        probs.append(inputs.over_target(q))
        level = _run_next(chain, inputs, level, tokens)

    draft = _join_chain(inputs, tokens)
    return draft.replace(probs=jnp.stack(probs, axis=1)), level.memory


def _run_next(
    chain: Chain, inputs: DraftInputs, level: Level, tokens: list[Int[Array, " B"]]
) -> Level:
    """Runs the network on the newest token of a chain.

    The level after the last token is not needed.
    """
    count = len(tokens)
    if count == chain.num_speculative_tokens:
        return level
    batch = inputs.root.shape[0]
    mask = jnp.ones((batch, 1, count), jnp.bool_)
    newest = tokens[-1][:, None]
    return inputs.run(newest, level.carry, count - 1, mask, level.memory)


def _join_chain(inputs: DraftInputs, tokens: list[Int[Array, " B"]]) -> Draft:
    batch = inputs.root.shape[0]
    count = len(tokens)
    parents = jnp.broadcast_to(indices(count), (batch, count))
    return inputs.add_root(jnp.stack(tokens, axis=1), parents)


def grow_dynamic_tree(topology: DynamicTree, inputs: DraftInputs) -> tuple[Draft, Any]:
    """Drafts EAGLE-2's tree (Li et al., 2024, section 4).

    The score of a node is the draft log-probability of its path, an estimate of the probability
    that the target accepts it. Expansion runs the network on the ``k`` best nodes of each level.
    Reranking keeps the best of all candidates.

    Candidates are numbered as the official code numbers them: the ``k`` children of the root, then
    level by level the ``k x k`` children of the expanded nodes, row by row.

    Returns:
        A draft without ``probs``, and the memory after the last level that was run.
    """
    width = topology.top_k
    batch = inputs.root.shape[0]

    # The first level: the k most likely children of the root, all of which are expanded. The pools
    # collect every candidate. `number` is the candidate number of each expanded node.
    logprobs, ids = _top_logprobs(inputs.first.logits[:, 0], width)
    tokens = inputs.to_target(ids)
    scores = logprobs
    number = jnp.broadcast_to(indices(width), (batch, width))
    pool_scores = [scores]
    pool_tokens = [tokens]
    pool_parents = [jnp.full((batch, width), -1, jnp.int32)]
    repeat = functools.partial(jnp.repeat, repeats=width, axis=1)
    carry = jax.tree.map(repeat, inputs.first.carry)
    itself = jnp.broadcast_to(jnp.eye(width, dtype=jnp.bool_), (batch, width, width))
    mask = itself
    memory = inputs.first.memory

    # Expansion: k nodes have k x k children, of which the k best are expanded next.
    for depth in range(topology.max_depth - 1):
        level = inputs.run(tokens, carry, depth, mask, memory)
        logprobs, ids = _top_logprobs(level.logits, width)
        cumulative = (scores[:, :, None] + logprobs).reshape(batch, -1)
        children = jnp.broadcast_to(inputs.to_target(ids), (batch, width, width))
        children = children.reshape(batch, -1)
        pool_scores.append(cumulative)
        pool_tokens.append(children)
        pool_parents.append(jnp.repeat(number, width, axis=1))

        # Child `best` is in row `best // k` of the k x k children, its parent's. It inherits the
        # parent's carry and ancestors.
        scores, best = lax.top_k(cumulative, width)
        parent = best // width
        tokens = jnp.take_along_axis(children, best, axis=1)
        number = width + depth * width**2 + best
        carry = jax.tree.map(functools.partial(take_nodes, nodes=parent), level.carry)
        mask = jnp.concatenate([take_nodes(mask, parent), itself], axis=-1)
        memory = level.memory

    # Reranking. The choice contains every ancestor: scores never rise along a path, and ties go to
    # the lower index, the parent's.
    candidate_parents = jnp.concatenate(pool_parents, axis=1)
    candidate_scores = jnp.concatenate(pool_scores, axis=1)
    _, chosen = lax.top_k(candidate_scores, topology.num_nodes - 1)
    chosen = jnp.sort(chosen, axis=1)

    # Nodes are numbered anew: the root is 0, and the chosen candidates follow in their order. So a
    # parent's number is 1 + the number of chosen candidates before it.
    chosen_parents = jnp.take_along_axis(candidate_parents, chosen, axis=1)
    is_before_parent = chosen[:, None, :] < chosen_parents[:, :, None]
    rank = jnp.sum(is_before_parent, axis=-1, dtype=jnp.int32)
    parents = jnp.where(chosen_parents < 0, 0, 1 + rank)

    candidate_tokens = jnp.concatenate(pool_tokens, axis=1)
    tokens = jnp.take_along_axis(candidate_tokens, chosen, axis=1)
    return inputs.add_root(tokens, parents), memory


def _top_logprobs(
    logits: Float[Array, "*B W"], count: int
) -> tuple[Float[Array, "*B k"], Int[Array, "*B k"]]:
    """Returns log-probabilities and ids of the ``count`` most likely tokens."""
    # Without the barriers XLA takes the maximum from a sort of all tokens. There are two of them
    # because XLA's CPU backend crashes on a mesh if one covers the pair.
    best, ids = map(lax.optimization_barrier, lax.top_k(logits, count))

    # log softmax of the best: l - max l - log Σ exp(l - max l).
    weights = jnp.exp(logits - best[..., :1])
    total = jnp.sum(weights, axis=-1, keepdims=True)
    logprobs = best - best[..., :1] - jnp.log(total)
    return logprobs, ids
