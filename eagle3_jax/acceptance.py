"""The acceptance rule.

:func:`verify` walks over the nodes of a draft once and covers every published exact rule. A chain
is a tree, greedy decoding is a point mass, and a deterministic draft is a one-hot proposal. So this
is Leviathan's rule on a chain (Leviathan et al., 2023, algorithm 1), SpecInfer's multi-round rule
on sampled siblings (Miao et al., 2023) and EAGLE's posterior evaluation on deterministic trees (Li
et al., 2024).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.devices.kernels import entry_of_rows, indices
from eagle3_jax.sampling import argmax, draw, num_digits, probabilities, residual, uniforms
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import Draft, SamplingMode, SamplingParams, Verdict


def verification_uniforms(
    keys: Key[Array, " B"], num_nodes: int, vocab_size: int
) -> tuple[Float[Array, "B N"], Float[Array, "B U"]]:
    """Returns the uniforms ``accept`` and ``choose`` of :func:`verify`, from one key per row."""
    count = num_nodes + num_digits(vocab_size)
    dice = uniforms(keys, count)
    accept = dice[:, :num_nodes]
    choose = dice[:, num_nodes:]
    return accept, choose


class _Walk(NamedTuple):
    """The state of one row's walk.

    Attributes:
        current: The last accepted node.
        p: The target's distribution after it, without the mass of the children that were rejected.
        path: ``[G]``, accepted nodes, -1 padded.
        count: Number of accepted nodes.
    """

    current: Int[Array, ""]
    p: Float[Array, " V"]
    path: Int[Array, " G"]
    count: Int[Array, ""]


def verify(
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    *,
    accept: Float[Array, "B N"],
    choose: Float[Array, "B U"],
    max_depth: int,
) -> Verdict:
    """Accepts a path of the draft; emitted tokens follow the target's distribution exactly.

    At node ``current`` with distribution ``p``, each valid child ``x`` sampled from ``q`` is
    accepted if ``u · q(x) < p(x)``. A rejection replaces ``p`` by the normalized ``max(p - q, 0)``.
    When no child is left, the next token is sampled from what ``p`` has become. Without ``probs``
    every ``q`` is a point mass: :func:`verify_points`.

    Args:
        draft: The proposal; nodes in topological order.
        target_probs: The target's distribution after each node, after temperature, top-k and top-p.
        accept: Uniforms in [0, 1), one per node.
        choose: ``[B U]`` uniforms in [0, 1) that sample the next token, for ``U = num_digits(V)``.
        max_depth: ``G``, longest path below the root.
    """
    if draft.probs is None:
        return verify_points(draft, target_probs, accept=accept, choose=choose, max_depth=max_depth)

    walk = functools.partial(_walk, max_depth=max_depth)
    return jax.vmap(walk)(draft, target_probs, accept, choose)


def _walk(
    draft: Draft,
    target_probs: Float[Array, "N V"],
    accept: Float[Array, " N"],
    choose: Float[Array, " U"],
    *,
    max_depth: int,
) -> Verdict:
    """Verifies the draft of one row; see :func:`verify`."""

    def visit(walk: _Walk, node: Int[Array, ""]) -> tuple[_Walk, None]:
        token = draft.tokens[node]
        q = draft.probs[node]  # type: ignore[index]
        rejected_p, mass = residual(walk.p, q)
        is_child = draft.valid[node] & (draft.parents[node] == walk.current)

        # Accepted with probability min(1, p(x) / q(x)), without a division by q. The comparison is
        # strict, so a token without target mass is never taken.
        passes = accept[node] * q[token] < walk.p[token]
        # If rounding leaves no residual mass, there is nothing else to emit, and the token is
        # taken.
        is_only_choice = (mass <= 0) & (walk.p[token] > 0)
        taken = is_child & (passes | is_only_choice)

        # A taken node is the new current one, with the target's distribution after it. A refused
        # child leaves the residual to its younger siblings. Other nodes change nothing.
        current = jnp.where(taken, node, walk.current)
        p_at_node = target_probs[node]
        p_at_current = jnp.where(is_child, rejected_p, walk.p)
        p = jnp.where(taken, p_at_node, p_at_current)

        longer_path = walk.path.at[walk.count].set(node, mode="drop")
        path = jnp.where(taken, longer_path, walk.path)
        count = walk.count + taken.astype(jnp.int32)
        return _Walk(current, p, path, count), None

    p_at_root = target_probs[0]
    empty_path = jnp.full((max_depth,), -1, jnp.int32)
    start = _Walk(current=jnp.int32(0), p=p_at_root, path=empty_path, count=jnp.int32(0))

    # One pass is enough: parents precede their children, and elder siblings the younger ones.
    nodes = jnp.arange(1, target_probs.shape[0], dtype=jnp.int32)
    walk, _ = lax.scan(visit, start, nodes)
    next_token = draw(walk.p, choose)
    return Verdict(path=walk.path, num_accepted=walk.count, next_token=next_token)


def verify_greedy(draft: Draft, target_tokens: Int[Array, "B N"], *, max_depth: int) -> Verdict:
    """:func:`verify` for greedy decoding: follows the nodes that equal the target's argmax.

    Args:
        draft: The proposal; nodes in topological order. Its ``probs`` are not read: a point mass as
            the target's distribution accepts a node if and only if it is the argmax.
        target_tokens: The target's argmax after each node.
        max_depth: ``G``, longest path below the root.
    """
    parents = jnp.maximum(draft.parents, 0)
    expected = jnp.take_along_axis(target_tokens, parents, axis=1)
    accepted = follow_accepted(draft, draft.tokens == expected, max_depth)
    next_token = jnp.take_along_axis(target_tokens, accepted.last[:, None], 1)[:, 0]
    return Verdict(path=accepted.path, num_accepted=accepted.count, next_token=next_token)


@dataclasses.dataclass(frozen=True)
class Exact:
    """The rule that preserves the target's distribution: a :class:`~eagle3_jax.types.Verifier`."""

    #: The function that decides sampled rows, called like :func:`eagle3_jax.verify`. Other exact
    #: rules replace it.
    rule: ClassVar[Callable[..., Verdict]] = staticmethod(verify)

    @property
    def lossless(self) -> bool:
        """True."""
        return True

    def __call__(
        self,
        draft: Draft,
        logits: Float[Array, "B N V"],
        sampling: SamplingParams,
        keys: Key[Array, " B"],
        *,
        sampling_mode: SamplingMode,
        max_depth: int,
    ) -> Verdict:
        """See :class:`~eagle3_jax.types.Verifier`."""
        if sampling_mode is SamplingMode.GREEDY:
            return verify_greedy(draft, argmax(logits), max_depth=max_depth)
        accept, choose = verification_uniforms(keys, logits.shape[1], logits.shape[2])
        probs = probabilities(logits, sampling, sampling_mode)
        return self.rule(draft, probs, accept=accept, choose=choose, max_depth=max_depth)


def verify_points(
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    *,
    accept: Float[Array, "B N"],
    choose: Float[Array, "B U"],
    max_depth: int,
) -> Verdict:
    """:func:`eagle3_jax.verify` for a draft of point masses, without a walk from node to node.

    A rejected point mass removes its own token from ``p`` and nothing else. Whether a node is
    accepted once the walk is at its parent therefore depends only on its elder siblings: ``u · (1 -
    Σ p(x_elder)) < p(x)``.

    The arguments are those of :func:`eagle3_jax.verify`; the draft's ``probs`` are not read.
    """
    vocab_size = target_probs.shape[-1]
    at_parents = jax.vmap(lambda probs, parents, tokens: probs[jnp.maximum(parents, 0), tokens])
    remove = jax.vmap(lambda p, tokens: p.at[tokens].set(0.0, mode="drop"))

    # A token that an elder sibling has proposed has no mass left.
    elders = _elder_siblings(draft) & draft.valid[:, None, :]
    same_token = draft.tokens[:, :, None] == draft.tokens[:, None, :]
    is_repeated = jnp.any(elders & same_token, axis=-1)
    p = at_parents(target_probs, draft.parents, draft.tokens)
    p = jnp.where(is_repeated, 0.0, p)

    # After its elders are rejected, a token has the share p(x) / (1 - Σ p(x_elder)). By rounding,
    # elders can add up to more than one, so a token without mass is rejected explicitly.
    p_of_elders = jnp.where(elders, p[:, None, :], 0.0)
    remaining_mass = 1.0 - jnp.sum(p_of_elders, axis=-1)
    is_accepted = (p > 0) & (accept * remaining_mass < p)
    accepted = follow_accepted(draft, is_accepted, max_depth)

    # The residual: the target's distribution at the end of the path, without the children there,
    # all of which were rejected.
    is_rejected = draft.valid & (draft.parents == accepted.last[:, None])
    p_after_path = entry_of_rows(target_probs, accepted.last)
    rejected_tokens = jnp.where(is_rejected, draft.tokens, vocab_size)
    p_after_rejections = remove(p_after_path, rejected_tokens)
    # Only rounding can leave no mass at all. Then any token with mass may be sampled.
    has_mass = jnp.sum(p_after_rejections, axis=-1, keepdims=True) > 0
    p_next = jnp.where(has_mass, p_after_rejections, p_after_path)
    next_token = draw(p_next, choose)
    return Verdict(path=accepted.path, num_accepted=accepted.count, next_token=next_token)


class AcceptedPath(NamedTuple):
    """The accepted nodes of each row.

    Attributes:
        path: ``[B G]``, nodes below the root in order, -1 padded.
        count: ``[B]``, number of nodes below the root.
        last: ``[B]``, the node where the path ends.
    """

    path: Int[Array, "B G"]
    count: Int[Array, " B"]
    last: Int[Array, " B"]


def follow_accepted(draft: Draft, taken: Bool[Array, "B N"], max_depth: int) -> AcceptedPath:
    """Follows the first child that is ``taken``, from the root on.

    A node is on the path if it and all its ancestors are each the first child that their parent
    takes. This needs no walk, each step of which would cost several kernels.
    """
    node = indices(draft.parents.shape[1])
    taken = taken & draft.valid & (draft.parents >= 0)
    taken_elders = _elder_siblings(draft) & taken[:, None, :]
    is_first = taken & ~jnp.any(taken_elders, axis=-1)

    # A node is on the path if each of its ancestors, itself included, passes. The root passes.
    ancestors = ancestor_mask(draft.parents, max_depth)
    reaches_root = ancestors[:, :, 0]
    passes = is_first[:, None, :] | (node == 0)[None, None] | ~ancestors
    on_path = reaches_root & jnp.all(passes, axis=-1)

    path, count = path_of(on_path, ancestors, max_depth)
    last = jnp.max(jnp.where(on_path, node, 0), axis=-1)
    return AcceptedPath(path, count, last)


def path_of(
    on_path: Bool[Array, "B N"], ancestors: Bool[Array, "B N N"], max_depth: int
) -> tuple[Int[Array, "B G"], Int[Array, " B"]]:
    """Lists the nodes of one path in order, -1 padded, and counts those below the root.

    Args:
        on_path: ``[B N]``, whether each node is on the path; the root is.
        ancestors: ``[B N N]``, the ancestors of each node, including itself.
        max_depth: ``G``, longest path below the root.
    """
    # A path has one node on each level, so the maximum over a level finds it.
    node = indices(on_path.shape[1])
    level_of_node = jnp.where(on_path, depths(ancestors), 0)[:, None, :]
    level = jnp.arange(1, max_depth + 1, dtype=jnp.int32)[:, None]
    is_at_level = level_of_node == level[None]
    path = jnp.max(jnp.where(is_at_level, node, -1), axis=-1)
    count = jnp.sum(path >= 0, axis=-1, dtype=jnp.int32)
    return path, count


def _elder_siblings(draft: Draft) -> Bool[Array, "B N N"]:
    """``[b, n, m]``: node ``m`` has the same parent as node ``n`` and a lower number."""
    node = indices(draft.parents.shape[1])
    same_parent = draft.parents[:, :, None] == draft.parents[:, None, :]
    is_lower = node[None, :] < node[:, None]
    return same_parent & is_lower[None]
