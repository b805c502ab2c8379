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
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.sampling import draw, residual
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import Draft, Verdict


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
    choose: Float[Array, " B"],
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
        choose: Uniforms in [0, 1) that draw the next token.
        max_depth: ``G``, longest path below the root.
    """
    num_nodes, vocab_size = target_probs.shape[1:]

    def row(draft: Draft, probs: Float[Array, "N V"], accept: Float[Array, " N"], choose: Float[Array, ""]) -> Verdict:
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


@dataclasses.dataclass(frozen=True)
class SimulatedAcceptance:
    """Not lossless: drafts are accepted by dice, whatever the target wants, to measure speed without trained weights.

    What a round costs does not depend on which tokens it accepts, only on how many, so a model of random weights is
    as fast as the real one would be at the same acceptance. vLLM calls this ``synthetic``; its text means nothing.

    Attributes:
        rates: Per depth, the share of rounds that accept the draft token there and all before it; not increasing.
    """

    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        ordered = all(before >= after for before, after in zip((1.0, *self.rates), (*self.rates, 0.0), strict=True))
        if not self.rates or not ordered:
            raise ValueError(
                f"simulated acceptance rates are {self.rates}; expected one for each depth, from 1 down to 0, none "
                "above the one before it"
            )

    @classmethod
    def of_conditional_rate(cls, rate: float | int, max_depth: int) -> SimulatedAcceptance:
        """Every draft token is accepted with probability ``rate`` once all before it were: ``rate ** depth``."""
        if not 0 <= rate <= 1:
            raise ValueError(f"the simulated conditional acceptance rate is {rate:g}; expected 0 to 1")
        return cls(tuple(rate ** (depth + 1) for depth in range(max_depth)))

    @classmethod
    def of_length(cls, length: float | int, max_depth: int) -> SimulatedAcceptance:
        """A mean acceptance length ``τ`` with the least variance: 1, 1, ..., a fraction, 0."""
        if not 1 <= length <= max_depth + 1:
            raise ValueError(
                f"the simulated acceptance length is {length:g}; drafts of depth {max_depth} allow 1 to "
                f"{max_depth + 1}, the token after them included"
            )
        return cls(tuple(float(min(max(length - 1 - depth, 0), 1)) for depth in range(max_depth)))

    def choose(self, draft: Draft, dice: Float[Array, " B"]) -> Bool[Array, "B N"]:
        """Which nodes are to be accepted: the path to the deepest one, as far as a row's uniform allows."""
        mask = ancestor_mask(draft.parents, len(self.rates))
        depth = depths(mask)
        deepest = jnp.argmax(jnp.where(draft.valid, depth, -1), axis=1)
        path = jnp.take_along_axis(mask, deepest[:, None, None], axis=1)[:, 0]
        count = jnp.sum(dice[:, None] < jnp.asarray(self.rates), axis=1)
        return path & (depth <= count[:, None])

    def steer_greedy(self, draft: Draft, wanted: Int[Array, "B N"], dice: Float[Array, " B"]) -> tuple[Draft, Array]:
        """Arguments with which :func:`verify_greedy` accepts what :meth:`choose` chose, at its usual cost."""
        chosen = self.choose(draft, dice)
        rows = jnp.arange(wanted.shape[0])[:, None]
        parents = jnp.where(chosen & (draft.parents >= 0), draft.parents, wanted.shape[1])
        return (
            draft.replace(valid=chosen),  # type: ignore[attr-defined]
            wanted.at[rows, parents].set(draft.tokens, mode="drop"),
        )

    def steer(self, draft: Draft, probs: Float[Array, "B N V"], dice: Float[Array, " B"]) -> tuple[Draft, Array]:
        """Arguments with which :func:`verify` accepts what :meth:`choose` chose, at its usual cost."""
        none = jnp.full(draft.tokens.shape, -1, jnp.int32)
        steered, wanted = self.steer_greedy(draft, none, dice)
        certain = jax.nn.one_hot(wanted, probs.shape[-1], dtype=probs.dtype)
        return steered, jnp.where(wanted[:, :, None] >= 0, certain, probs)
