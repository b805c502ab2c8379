"""Typical acceptance: accepts draft tokens that are not too unlikely.

Cai et al. (2024, section 2.3.1).
"""

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
    """Medusa's rule: accepts a draft token ``x`` if ``p(x) > min(ε, δ · exp(-H(p)))``.

    It is not lossless. ``p`` is the target's distribution for this token after all warpers, and
    ``H`` its entropy in nats. Of the paths whose tokens are all accepted, the longest is chosen,
    and of several longest paths the most likely one under the target. The distribution of the draft
    is not used, and acceptance is not random: the output has the tokens that the drafter prefers
    among the acceptable ones. Rows of temperature 0 are decoded greedily, which is exact.

    The token after the path is the target's most likely one at every temperature, as in the paper
    and its code. So a sampled row has the same text with any seed, except for its first token,
    which the loop samples.

    Attributes:
        epsilon: ``ε`` in [0, 1), the hard threshold; ``posterior_threshold`` in the authors' code,
            there 0.09.
        delta: ``δ``, at least 0, the factor of ``exp(-H)``; ``posterior_alpha`` there. The authors
            advise ``√ε``.
        draws_next: Whether to sample the token after the path from ``p`` instead.
    """

    epsilon: float = 0.09
    delta: float = 0.3
    draws_next: bool = False
    lossless = False

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon < 1:
            raise ValueError(
                f"epsilon is {self.epsilon}; expected a probability of at least 0 and below 1"
            )
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

        # p(x) > min(ε, δ · exp(-H(p))), with the distribution at the parent.
        probs = probabilities(logits, sampling, sampling_mode)
        entropy = jnp.sum(entr(probs), axis=-1)
        threshold = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entropy))
        parents = jnp.maximum(draft.parents, 0)
        p = jax.vmap(lambda probs, parents, tokens: probs[parents, tokens])(
            probs, parents, draft.tokens
        )
        accepted = (
            draft.valid
            & (draft.parents >= 0)
            & (p > jnp.take_along_axis(threshold, parents, axis=1))
        )

        # Of the paths whose nodes are all accepted the longest, and of these the likeliest.
        ancestors = ancestor_mask(draft.parents, max_depth)
        node = jnp.arange(draft.tokens.shape[1])
        is_from_root = ancestors[:, :, 0]
        passes = accepted[:, None, :] | (node == 0)[None, None] | ~ancestors
        path_accepted = is_from_root & jnp.all(passes, axis=-1)
        level = jnp.where(path_accepted, depths(ancestors), 0)
        on_path = ancestors & (node > 0)[None, None]
        likelihood = jnp.sum(jnp.where(on_path, jnp.log(p)[:, None, :], 0.0), axis=-1)
        longest = path_accepted & (level == jnp.max(level, axis=1, keepdims=True))
        last = jnp.argmax(jnp.where(longest, likelihood, -jnp.inf), axis=1)[:, None]

        last_ancestors = jnp.take_along_axis(ancestors, last[:, :, None], axis=1)[:, 0]
        path, count = path_of(last_ancestors, ancestors, max_depth)

        scores = probs if self.draws_next else logits
        next_scores = jnp.take_along_axis(scores, last[:, :, None], axis=1)[:, 0]
        _, choose = verification_uniforms(keys, logits.shape[1], logits.shape[2])
        next_token = draw(next_scores, choose) if self.draws_next else argmax(next_scores)
        return Verdict(path=path, num_accepted=count, next_token=next_token)
