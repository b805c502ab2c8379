"""The acceptance rule.

:func:`verify` walks over the nodes of a draft once and covers every published exact rule. A chain is a tree, greedy
decoding is a point mass, and a deterministic draft is a one-hot proposal. So this is Leviathan's rule on a chain
(Leviathan et al., 2023, algorithm 1), SpecInfer's multi-round rule on sampled siblings (Miao et al., 2023) and EAGLE's
posterior evaluation on deterministic trees (Li et al., 2024).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.sampling import argmax, draw, num_digits, probabilities, residual, uniforms
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import Draft, SamplingMode, SamplingParams, Verdict


def verification_uniforms(
    keys: Key[Array, " B"], num_nodes: int, vocab_size: int
) -> tuple[Float[Array, "B N"], Float[Array, "B U"]]:
    """The uniforms ``accept`` and ``choose`` of :func:`verify`, from one key per row."""
    dice = uniforms(keys, num_nodes + num_digits(vocab_size))
    return dice[:, :num_nodes], dice[:, num_nodes:]


class _Walk(NamedTuple):
    """The state of one row's walk: the node ``current``, and ``p``, what is left of the target's distribution there."""

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
    """Accepts a path of the draft so that the emitted tokens follow the target's distribution exactly.

    At node ``current`` with distribution ``p``, each valid child ``x`` sampled from ``q`` is accepted if
    ``u · q(x) < p(x)``. A rejection replaces ``p`` by the normalized ``max(p - q, 0)``. When no child is left, the next
    token is drawn from what ``p`` has become. Without ``probs`` every ``q`` is a point mass: :func:`verify_points`.

    Args:
        draft: The proposal; nodes in topological order.
        target_probs: The target's distribution after each node, after temperature, top-k and top-p.
        accept: Uniforms in [0, 1), one per node.
        choose: Uniforms in [0, 1) that draw the next token; :func:`~eagle3_jax.sampling.draw` says how many.
        max_depth: ``G``, longest path below the root.
    """
    if draft.probs is None:
        return verify_points(draft, target_probs, accept=accept, choose=choose, max_depth=max_depth)

    def row(
        draft: Draft, probs: Float[Array, "N V"], accept: Float[Array, " N"], choose: Float[Array, " U"]
    ) -> Verdict:
        def visit(walk: _Walk, node: Int[Array, ""]) -> tuple[_Walk, None]:
            token = draft.tokens[node]
            q = draft.probs[node]  # type: ignore[index]
            rest, mass = residual(walk.p, q)
            child = draft.valid[node] & (draft.parents[node] == walk.current)
            # The comparison is strict, so a token without target mass is never taken. If rounding leaves no residual
            # mass, there is nothing else to emit, and the token is taken.
            fits = (accept[node] * q[token] < walk.p[token]) | ((mass <= 0) & (walk.p[token] > 0))
            taken = child & fits
            return _Walk(
                current=jnp.where(taken, node, walk.current),
                p=jnp.where(taken, probs[node], jnp.where(child, rest, walk.p)),
                path=jnp.where(taken, walk.path.at[walk.count].set(node, mode="drop"), walk.path),
                count=walk.count + taken.astype(jnp.int32),
            ), None

        start = _Walk(jnp.int32(0), probs[0], jnp.full((max_depth,), -1, jnp.int32), jnp.int32(0))
        walk, _ = lax.scan(visit, start, jnp.arange(1, probs.shape[0], dtype=jnp.int32))
        return Verdict(path=walk.path, num_accepted=walk.count, next_token=draw(walk.p, choose))

    return jax.vmap(row)(draft, target_probs, accept, choose)


def verify_greedy(draft: Draft, target_tokens: Int[Array, "B N"], *, max_depth: int) -> Verdict:
    """:func:`verify` for greedy decoding: follows the nodes that equal the target's argmax.

    Args:
        draft: The proposal; nodes in topological order. Its ``probs`` are not read: a point mass as the target's
            distribution accepts a node if and only if it is the argmax.
        target_tokens: The target's argmax after each node.
        max_depth: ``G``, longest path below the root.
    """
    wanted = jnp.take_along_axis(target_tokens, jnp.maximum(draft.parents, 0), axis=1)
    path, count, last = follow_accepted(draft, draft.tokens == wanted, max_depth)
    return Verdict(path=path, num_accepted=count, next_token=jnp.take_along_axis(target_tokens, last[:, None], 1)[:, 0])


@dataclasses.dataclass(frozen=True)
class Exact:
    """The rule that preserves the target's distribution, as a :class:`~eagle3_jax.types.Verifier`."""

    #: The function that decides sampled rows, called like :func:`eagle3_jax.verify`. Other exact rules replace it.
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
