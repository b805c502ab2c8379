"""The acceptance rule, once.

One walk over the nodes of a draft covers every published exact rule. A chain is a tree, greedy decoding is a point
mass, and a deterministic draft is a one-hot proposal, so this is Leviathan's rule on a chain (Leviathan et al., 2023,
algorithm 1), SpecInfer's multi-round rule on sampled siblings (Miao et al., 2023) and EAGLE's posterior evaluation on
deterministic trees (Li et al., 2024).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.sampling import draw, num_digits, probabilities, residual, uniforms
from eagle3_jax.types import Draft, SamplingParams, Verdict, Warping


@dataclasses.dataclass(frozen=True)
class Exact:
    """The rule that preserves the target's distribution, as a :class:`~eagle3_jax.types.Verifier`."""

    @property
    def lossless(self) -> bool:
        """Yes."""
        return True

    def __call__(
        self,
        draft: Draft,
        logits: Float[Array, "B N V"],
        sampling: SamplingParams,
        keys: Key[Array, " B"],
        *,
        warping: Warping,
        max_depth: int,
    ) -> Verdict:
        """See :class:`~eagle3_jax.types.Verifier`."""
        if warping is Warping.GREEDY:
            return verify_greedy(draft, jnp.argmax(logits, axis=-1).astype(jnp.int32), max_depth=max_depth)
        accept, choose = verification_dice(keys, logits.shape[1], logits.shape[2])
        probs = probabilities(logits, sampling, warping)
        return verify(draft, probs, accept=accept, choose=choose, max_depth=max_depth)


def verification_dice(
    keys: Key[Array, " B"], num_nodes: int, vocab_size: int
) -> tuple[Float[Array, "B N"], Float[Array, "B U"]]:
    """The uniforms ``accept`` and ``choose`` that :func:`verify` takes, from one key per row."""
    dice = uniforms(keys, num_nodes + num_digits(vocab_size))
    return dice[:, :num_nodes], dice[:, num_nodes:]


class _Walk(NamedTuple):
    """Where the walk of one row stands: at node ``current``, with ``p`` what the target still wants there."""

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
    """Accept a path of the draft so that what is emitted follows the target's distribution exactly.

    At node ``current`` with distribution ``p``, each valid child ``x`` drawn from ``q`` is accepted when
    ``u · q(x) < p(x)``; a refusal replaces ``p`` by the normalised ``max(p - q, 0)``. When no child is left the next
    token is drawn from what ``p`` has become.

    Args:
        draft: The proposal; nodes in topological order.
        target_probs: The target's distribution after each node, all warpers applied.
        accept: Uniforms in [0, 1), one per node.
        choose: Uniforms in [0, 1) that draw the next token, as many as :func:`~eagle3_jax.sampling.draw` takes.
        max_depth: ``G``, longest path below the root.
    """
    num_nodes, vocab_size = target_probs.shape[1:]

    def row(
        draft: Draft, probs: Float[Array, "N V"], accept: Float[Array, " N"], choose: Float[Array, " U"]
    ) -> Verdict:
        def visit(walk: _Walk, node: Int[Array, ""]) -> tuple[_Walk, None]:
            token = draft.tokens[node]
            q = jax.nn.one_hot(token, vocab_size) if draft.probs is None else draft.probs[node]
            rest, mass = residual(walk.p, q)
            child = draft.valid[node] & (draft.parents[node] == walk.current)
            # Strict, so that a token without target mass is never taken; without residual mass there is
            # nothing else to emit, which rounding alone can bring about, and the token is taken.
            fits = (accept[node] * q[token] < walk.p[token]) | ((mass <= 0) & (walk.p[token] > 0))
            taken = child & fits
            return _Walk(
                current=jnp.where(taken, node, walk.current),
                p=jnp.where(taken, probs[node], jnp.where(child, rest, walk.p)),
                path=jnp.where(taken, walk.path.at[walk.count].set(node, mode="drop"), walk.path),
                count=walk.count + taken.astype(jnp.int32),
            ), None

        start = _Walk(jnp.int32(0), probs[0], jnp.full((max_depth,), -1, jnp.int32), jnp.int32(0))
        walk, _ = lax.scan(visit, start, jnp.arange(1, num_nodes, dtype=jnp.int32))
        return Verdict(path=walk.path, num_accepted=walk.count, next_token=draw(walk.p, choose))

    return jax.vmap(row)(draft, target_probs, accept, choose)


def verify_greedy(draft: Draft, target_tokens: Int[Array, "B N"], *, max_depth: int) -> Verdict:
    """:func:`verify` for point masses, without building them: follow the nodes that equal the target's argmax.

    Args:
        draft: The proposal; nodes in topological order.
        target_tokens: The target's argmax after each node.
        max_depth: ``G``, longest path below the root.
    """

    def row(draft: Draft, wanted: Int[Array, " N"]) -> Verdict:
        def visit(node: Int[Array, ""], carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            current, path, count = carry
            child = draft.valid[node] & (draft.parents[node] == current)
            taken = child & (draft.tokens[node] == wanted[current])
            path = jnp.where(taken, path.at[count].set(node, mode="drop"), path)
            return jnp.where(taken, node, current), path, count + taken.astype(jnp.int32)

        start = (jnp.int32(0), jnp.full((max_depth,), -1, jnp.int32), jnp.int32(0))
        current, path, count = lax.fori_loop(1, draft.tokens.shape[0], visit, start)
        return Verdict(path=path, num_accepted=count, next_token=wanted[current])

    # The walk never reads probabilities: a point-mass target accepts a node when, and only when, it is the argmax.
    return jax.vmap(row)(draft.replace(probs=None), target_tokens)  # type: ignore[attr-defined]
