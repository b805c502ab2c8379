"""Block verification: the tokens of a drawn chain are judged together (Sun et al., 2024, arXiv 2403.10444).

The token rule asks each drafted token by itself, and the first refusal ends the round. The block rule lets a token that
the target wants more often than it was drafted make up for one before it that it wants less often: as exact, and on
average never fewer tokens are accepted (no rule that knows a draft's distributions alone accepts more).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.acceptance import Exact, verify_points
from eagle3_jax.sampling import draw
from eagle3_jax.types import Draft, Verdict


def verify_block(
    draft: Draft,
    target_probs: Float[Array, "B N V"],
    *,
    accept: Float[Array, "B N"],
    choose: Float[Array, "B U"],
    max_depth: int,
) -> Verdict:
    """Accept a prefix of a drawn chain so that what is emitted follows the target's distribution exactly.

    With ``P_0 = 1``, ``P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i))`` and the mass that the target still wants after ``i``
    tokens, ``m_i = Σ max(P_i p_{i+1} - q_{i+1}, 0)``, token ``i`` passes with probability

        ``h_i = m_i / (m_i + 1 - P_i)`` for ``i < L``, ``h_L = P_L``.

    The *last* token that passes ends the accepted prefix, whatever failed before it. The next token is drawn from
    ``max(P_τ p_{τ+1} - q_{τ+1}, 0)``, and from ``p_{L+1}`` where all were accepted. Behind the end of the chain ``q``
    is zero, with which both formulas are one. The chain ends before its first invalid node.

    Args:
        draft: A chain with ``probs``; without them :func:`~eagle3_jax.acceptance.verify_points` decides, whose law is
            the same for point masses.
        target_probs: The target's distribution after each node, all warpers applied.
        accept: Uniforms in [0, 1), one per node.
        choose: Uniforms in [0, 1) that draw the next token.
        max_depth: ``G``, size of the verdict's path.
    """
    if draft.probs is None:
        return verify_points(draft, target_probs, accept=accept, choose=choose, max_depth=max_depth)
    node = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)
    chained = jnp.cumprod(draft.valid.astype(jnp.int32), axis=1) > 0
    survival = _survivals(draft, target_probs, chained)
    following = jnp.where(chained[:, 1:, None], draft.probs[:, 1:], 0.0)
    following = jnp.pad(following, ((0, 0), (0, 1), (0, 0)))
    wanted = jnp.maximum(survival[:, :, None] * target_probs - following, 0.0)
    mass = jnp.sum(wanted, axis=-1)
    refused = mass + 1.0 - survival
    passes = jnp.where(refused > 0, mass / jnp.where(refused > 0, refused, 1.0), 1.0)

    # Strict, so that a token without target mass, which survives with probability 0, is never taken.
    passed = chained & (node > 0)[None, :] & (accept < passes)
    count = jnp.max(jnp.where(passed, node, 0), axis=1)
    chosen = count[:, None, None]
    left = jnp.take_along_axis(wanted, chosen, axis=1)[:, 0]
    # Nothing left is what rounding alone can bring about; what is drawn then has mass, too.
    whole = jnp.take_along_axis(target_probs, chosen, axis=1)[:, 0]
    left = jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, whole)
    step = jnp.arange(1, max_depth + 1, dtype=jnp.int32)
    path = jnp.where(step[None, :] <= count[:, None], step, -1)
    return Verdict(path=path, num_accepted=count, next_token=draw(left, choose))


def _survivals(draft: Draft, target_probs: Float[Array, "B N V"], chained: Bool[Array, "B N"]) -> Float[Array, "B N"]:
    """``P_i`` after every node, 1 at the root and 0 behind the end of the chain."""
    tokens: Int[Array, "B K 1"] = draft.tokens[:, 1:, None]
    of_token = lambda probs: jnp.take_along_axis(probs, tokens, axis=2)[:, :, 0]
    # A quotient by the smallest number is still finite, so that a survival of 0 stays 0.
    q = jnp.maximum(of_token(draft.probs[:, 1:]), jnp.finfo(jnp.float32).tiny)  # type: ignore[index]
    ratio = jnp.where(chained[:, 1:], of_token(target_probs[:, :-1]) / q, 0.0)
    survivals = [jnp.ones_like(ratio[:, 0])]
    for index in range(ratio.shape[1]):
        survivals.append(jnp.minimum(survivals[-1] * ratio[:, index], 1.0))
    return jnp.stack(survivals, axis=1)


@dataclasses.dataclass(frozen=True)
class BlockVerification(Exact):
    """The block rule, as a :class:`~eagle3_jax.types.Verifier` of chains.

    It gains where tokens are drawn (``draft_sampling`` probabilistic) and there are at least two. A draft of point
    masses, or a greedy batch, is accepted just as the token rule accepts it.
    """

    rule: ClassVar[Callable[..., Verdict]] = staticmethod(verify_block)
    chains_only = True  # the rule is defined along one path
