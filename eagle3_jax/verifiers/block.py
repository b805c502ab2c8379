"""Block verification: decides about all tokens of a sampled chain together.

Sun et al. (2024, arXiv 2403.10444). The token rule decides about each drafted token separately, and
the first rejection ends the round. In the block rule, a token that is more likely under the target
than under the drafter can compensate for an earlier token that is less likely. It is exact as well,
and on average accepts at least as many tokens. No rule that knows only the distributions of a draft
accepts more.
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
    """Accepts a prefix of a sampled chain; the output follows the target's distribution exactly.

    Let ``P_0 = 1`` and ``P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i))``. The residual mass after ``i``
    tokens is ``m_i = Σ max(P_i p_{i+1} - q_{i+1}, 0)``. Token ``i`` passes with probability

        ``h_i = m_i / (m_i + 1 - P_i)`` for ``i < L``, ``h_L = P_L``.

    The *last* token ``τ`` that passes ends the accepted prefix, even if tokens before it failed.
    The next token is sampled from ``max(P_τ p_{τ+1} - q_{τ+1}, 0)``, or from ``p_{L+1}`` if all
    were accepted. After the end of the chain ``q`` is zero; then both formulas are the same. The
    chain ends before its first invalid node.

    Args:
        draft: A chain with ``probs``. For a draft without ``probs``,
            :func:`~eagle3_jax.acceptance.verify_points` decides; for point masses its accepted
            counts have the same distribution.
        target_probs: ``[B N V]``, the target's distribution after each node, all warpers applied.
        accept: ``[B N]``, uniforms in [0, 1).
        choose: ``[B U]``, uniforms in [0, 1) for the next token.
        max_depth: ``G``, size of the verdict's path.
    """
    if draft.probs is None:
        return verify_points(draft, target_probs, accept=accept, choose=choose, max_depth=max_depth)

    # P_i, and m_i = Σ max(P_i p_{i+1} - q_{i+1}, 0). After the end of the chain q is zero.
    node = jnp.arange(draft.tokens.shape[1], dtype=jnp.int32)
    chained = jnp.cumprod(draft.valid.astype(jnp.int32), axis=1) > 0
    survival = _survivals(draft, target_probs, chained)
    following = jnp.where(chained[:, 1:, None], draft.probs[:, 1:], 0.0)
    following = jnp.pad(following, ((0, 0), (0, 1), (0, 0)))
    residual = jnp.maximum(survival[:, :, None] * target_probs - following, 0.0)
    mass = jnp.sum(residual, axis=-1)

    # h_i = m_i / (m_i + 1 - P_i). At the last token m_L is P_L, and so is h_L.
    total = mass + 1.0 - survival
    threshold = jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)

    # Strict, so that a token without target mass, whose survival is 0, is never accepted.
    passes = chained & (node > 0)[None, :] & (accept < threshold)
    count = jnp.max(jnp.where(passes, node, 0), axis=1)

    # The next token follows the residual after the last accepted one.
    last = count[:, None, None]
    next_probs = jnp.take_along_axis(residual, last, axis=1)[:, 0]
    # The residual can be zero only by rounding. Then the next token is sampled from the target's
    # distribution.
    last_probs = jnp.take_along_axis(target_probs, last, axis=1)[:, 0]
    next_probs = jnp.where(jnp.sum(next_probs, axis=-1, keepdims=True) > 0, next_probs, last_probs)

    step = jnp.arange(1, max_depth + 1, dtype=jnp.int32)
    path = jnp.where(step[None, :] <= count[:, None], step, -1)
    return Verdict(path=path, num_accepted=count, next_token=draw(next_probs, choose))


def _survivals(
    draft: Draft, target_probs: Float[Array, "B N V"], chained: Bool[Array, "B N"]
) -> Float[Array, "B N"]:
    """Returns ``P_i`` for every node: 1 at the root, and 0 after the end of the chain."""
    tokens: Int[Array, "B K 1"] = draft.tokens[:, 1:, None]

    def probs_of_tokens(probs: Float[Array, "B K V"]) -> Float[Array, "B K"]:
        return jnp.take_along_axis(probs, tokens, axis=2)[:, :, 0]

    # Division by the smallest positive number stays finite, so a survival of 0 stays 0.
    tiny = jnp.finfo(jnp.float32).tiny
    q = jnp.maximum(probs_of_tokens(draft.probs[:, 1:]), tiny)  # type: ignore[index]
    in_chain = chained[:, 1:]
    p = probs_of_tokens(target_probs[:, :-1])
    ratio = jnp.where(in_chain, p / q, 0.0)

    # P_i = min(1, P_{i-1} p_i / q_i).
    survivals = [jnp.ones_like(ratio[:, 0])]
    for index in range(ratio.shape[1]):
        survivals.append(jnp.minimum(survivals[-1] * ratio[:, index], 1.0))
    return jnp.stack(survivals, axis=1)


@dataclasses.dataclass(frozen=True)
class BlockVerification(Exact):
    """The block rule, as a :class:`~eagle3_jax.types.Verifier` of chains.

    It accepts more than the token rule if at least two tokens are sampled (``draft_sampling``
    probabilistic). For a draft of point masses, or a greedy batch, it accepts the same tokens as
    the token rule.
    """

    rule: ClassVar[Callable[..., Verdict]] = staticmethod(verify_block)
    # The rule is defined for a single path.
    chains_only = True
