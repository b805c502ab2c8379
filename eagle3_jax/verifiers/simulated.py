"""Acceptance by dice, to measure the speed of a shape without trained weights: not lossless."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.acceptance import verification_uniforms, verify, verify_greedy
from eagle3_jax.sampling import argmax, probabilities, uniforms
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import Draft, SamplingMode, SamplingParams, Verdict

# By the pair and the prompts that they are of: per depth, the share of rounds that accept the draft token there and all
# before it. These add up to the lengths that vLLM has published, 2.36 for K=2 to 3.54 for K=7.
PUBLISHED_RATES = {
    "Llama-3.1-8B with its EAGLE-3 head on MT-Bench": (0.78, 0.58, 0.43, 0.29, 0.24, 0.14, 0.08),
}


@dataclasses.dataclass(frozen=True)
class SimulatedAcceptance:
    """Not lossless: drafts are accepted by dice, whatever the target wants, to measure speed without trained weights.

    What a round costs does not depend on which tokens it accepts, only on how many, so a model of random weights is
    as fast as the real one would be at the same acceptance. vLLM calls this ``synthetic``; its text means nothing.

    Attributes:
        rates: Per depth, the share of rounds that accept the draft token there and all before it; not increasing.
    """

    rates: tuple[float, ...]
    lossless = False

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

    @classmethod
    def of_published(cls, name: str, max_depth: int) -> SimulatedAcceptance:
        """One of ``PUBLISHED_RATES``; deeper than it was published nothing is accepted."""
        rates = PUBLISHED_RATES[name]
        return cls((*rates, *[0.0] * max_depth)[:max_depth])

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
        """See :class:`~eagle3_jax.types.Verifier`; the exact rule, at its cost, over what the dice want.

        Raises:
            ValueError: There are fewer rates than depths.
        """
        if len(self.rates) < max_depth:
            raise ValueError(
                f"{len(self.rates)} simulated acceptance rates for drafts of depth {max_depth}; give one for each depth"
            )
        dice = uniforms(jax.vmap(jax.random.fold_in, (0, None))(keys, 0), 1)[:, 0]
        chosen = self._chosen(draft, dice, max_depth)
        draft = draft.replace(valid=chosen)
        if sampling_mode is SamplingMode.GREEDY:
            return verify_greedy(draft, _wanted(draft, argmax(logits)), max_depth=max_depth)
        probs = probabilities(logits, sampling, sampling_mode)
        wanted = _wanted(draft, jnp.full(chosen.shape, -1, jnp.int32))
        certain = jax.nn.one_hot(wanted, probs.shape[-1], dtype=probs.dtype)
        probs = jnp.where(wanted[:, :, None] >= 0, certain, probs)
        accept, choose = verification_uniforms(keys, *probs.shape[1:])
        return verify(draft, probs, accept=accept, choose=choose, max_depth=max_depth)

    def _chosen(self, draft: Draft, dice: Float[Array, " B"], max_depth: int) -> Bool[Array, "B N"]:
        """Which nodes are to be accepted: the path to the deepest one, as far as a row's uniform allows."""
        mask = ancestor_mask(draft.parents, max_depth)
        depth = depths(mask)
        reached = jnp.all(draft.valid[:, None, :] | ~mask, axis=-1)  # no padding on the way
        deepest = jnp.argmax(jnp.where(reached, depth, -1), axis=1)
        path = jnp.take_along_axis(mask, deepest[:, None, None], axis=1)[:, 0]
        rates = jnp.asarray(self.rates[:max_depth], jnp.float32)[None, :]
        count = jnp.sum(dice[:, None] < rates, axis=1, dtype=jnp.int32)
        return path & (depth <= count[:, None])


def _wanted(draft: Draft, otherwise: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """What the target is said to want after each node: the valid child where there is one."""
    rows = jnp.arange(otherwise.shape[0])[:, None]
    parents = jnp.where(draft.valid & (draft.parents >= 0), draft.parents, otherwise.shape[1])
    return otherwise.at[rows, parents].set(draft.tokens, mode="drop")
