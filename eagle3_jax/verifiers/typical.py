"""Typical acceptance: drafts stay when the target does not find them unlikely (Cai et al., 2024, section 2.3.1)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.scipy.special import entr
from jaxtyping import Array, Float, Key

from eagle3_jax.acceptance import path_of, verification_uniforms, verify_greedy
from eagle3_jax.sampling import argmax, draw, probabilities
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import Draft, SamplingMode, SamplingParams, Verdict


@dataclasses.dataclass(frozen=True)
class TypicalAcceptance:
    """Not lossless: Medusa's rule, which accepts a draft token ``x`` when ``p(x) > min(ε, δ · exp(-H(p)))``.

    ``p`` is the target's distribution at its place after all warpers, ``H`` its entropy in nats. Of the paths whose
    tokens are all accepted the longest stays, and of several the likeliest under the target. The draft's own
    distribution plays no part, and nothing is thrown: what the drafter prefers among acceptable tokens is what comes
    out. Rows of temperature 0 are decoded greedily, exactly.

    The token after the path is the target's likeliest, in the paper and in its code at every temperature, so that a
    sampled row repeats itself word for word with any seed. The first token of a row is drawn by the loop all the same.

    Attributes:
        epsilon: ``ε`` in [0, 1), the hard threshold; ``posterior_threshold`` in the authors' code, which runs 0.09.
        delta: ``δ``, at least 0, the share of ``exp(-H)``; ``posterior_alpha`` there. The authors advise ``√ε``.
        draws_next: Draw the token after the path from ``p`` instead.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    draws_next: bool = False
    lossless = False

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise ValueError(f"epsilon is {self.epsilon}; expected a probability of at least 0 and below 1")
        if not 0 <= self.delta < float("inf"):
            raise ValueError(f"delta is {self.delta}; expected a finite number of at least 0")

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
        probs = probabilities(logits, sampling, sampling_mode)
        least = jnp.minimum(self.epsilon, self.delta * jnp.exp(-jnp.sum(entr(probs), axis=-1)))
        parents = jnp.maximum(draft.parents, 0)
        p = jax.vmap(lambda probs, parents, tokens: probs[parents, tokens])(probs, parents, draft.tokens)
        accepted = draft.valid & (draft.parents >= 0) & (p > jnp.take_along_axis(least, parents, axis=1))

        above = ancestor_mask(draft.parents, max_depth)
        node = jnp.arange(draft.tokens.shape[1])
        whole = above[:, :, 0] & jnp.all(accepted[:, None, :] | (node == 0)[None, None] | ~above, axis=-1)
        level = jnp.where(whole, depths(above), 0)
        likelihood = jnp.sum(jnp.where(above & (node > 0)[None, None], jnp.log(p)[:, None, :], 0.0), axis=-1)
        longest = whole & (level == jnp.max(level, axis=1, keepdims=True))
        last = jnp.argmax(jnp.where(longest, likelihood, -jnp.inf), axis=1)[:, None]

        path, count = path_of(jnp.take_along_axis(above, last[:, :, None], axis=1)[:, 0], above, max_depth)
        after = jnp.take_along_axis(probs if self.draws_next else logits, last[:, :, None], axis=1)[:, 0]
        _, choose = verification_uniforms(keys, logits.shape[1], logits.shape[2])
        return Verdict(
            path=path, num_accepted=count, next_token=draw(after, choose) if self.draws_next else argmax(after)
        )
