"""Simulated acceptance, to measure the speed of a model shape without trained weights.

It is not lossless.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.acceptance import verification_uniforms, verify, verify_greedy
from eagle3_jax.sampling import argmax, probabilities, uniforms
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import Draft, SamplingMode, SamplingParams, Verdict

# By pair and prompts: for each depth, the share of rounds that accept the draft token there and all
# tokens before it. Their sums give the acceptance lengths that vLLM has published, 2.36 for K=2 to
# 3.54 for K=7.
PUBLISHED_RATES = {
    "Llama-3.1-8B with its EAGLE-3 head on MT-Bench": (0.78, 0.58, 0.43, 0.29, 0.24, 0.14, 0.08),
}


@dataclasses.dataclass(frozen=True)
class SimulatedAcceptance:
    """Accepts draft tokens at random with given rates, to measure speed without trained weights.

    It is not lossless. The time of a round depends on the number of accepted tokens, not on which
    tokens they are. So a model of random weights is as fast as the trained model at the same
    acceptance. vLLM calls this ``synthetic``. The output is meaningless.

    Attributes:
        rates: For each depth, the share of rounds that accept the draft token there and all tokens
            before it; not increasing.
    """

    rates: tuple[float, ...]
    lossless = False

    def __post_init__(self) -> None:
        bounded = (1.0, *self.rates, 0.0)
        is_ordered = all(before >= after for before, after in itertools.pairwise(bounded))
        if not self.rates or not is_ordered:
            raise ValueError(
                f"simulated acceptance rates are {self.rates}; expected one for each depth, from 1"
                " down to 0, none above the one before it"
            )

    @classmethod
    def of_conditional_rate(cls, rate: float | int, max_depth: int) -> SimulatedAcceptance:
        """Returns a rule that accepts a draft token with probability ``rate`` if its parent is.

        The rates are ``rate ** depth``.

        Raises:
            ValueError: ``rate`` is not from 0 to 1.
        """
        if not 0 <= rate <= 1:
            raise ValueError(
                f"the simulated conditional acceptance rate is {rate:g}; expected 0 to 1"
            )
        return cls(tuple(rate ** (depth + 1) for depth in range(max_depth)))

    @classmethod
    def of_length(cls, length: float | int, max_depth: int) -> SimulatedAcceptance:
        """Returns a rule with the mean acceptance length ``length`` and the least variance.

        The rates are 1, 1, ..., a fraction, 0.

        Raises:
            ValueError: ``length`` is not from 1 to ``max_depth + 1``.
        """
        if not 1 <= length <= max_depth + 1:
            raise ValueError(
                f"the simulated acceptance length is {length:g}; drafts of depth {max_depth} allow"
                f" 1 to {max_depth + 1}, the token after them included"
            )
        remaining = (length - 1 - depth for depth in range(max_depth))
        return cls(tuple(float(min(max(share, 0), 1)) for share in remaining))

    @classmethod
    def of_published(cls, name: str, max_depth: int) -> SimulatedAcceptance:
        """Returns a rule with published rates, a key of ``PUBLISHED_RATES``.

        Beyond their depth the rates are 0.
        """
        rates = PUBLISHED_RATES[name]
        padded = (*rates, *[0.0] * max_depth)
        return cls(padded[:max_depth])

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
        """See :class:`~eagle3_jax.types.Verifier`.

        It runs the exact rule, at its full cost, with a target distribution that is certain of the
        accepted nodes.

        Raises:
            ValueError: There are fewer rates than depths.
        """
        if len(self.rates) < max_depth:
            raise ValueError(
                f"{len(self.rates)} simulated acceptance rates for drafts of depth {max_depth};"
                " give one for each depth"
            )

        round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, 0)
        dice = uniforms(round_keys, 1)[:, 0]
        accepted = self._accepted_nodes(draft, dice, max_depth)
        draft = draft.replace(valid=accepted)

        # Where an accepted child follows, the target is certain of it. So the exact rule accepts
        # these nodes and no others.
        if sampling_mode is SamplingMode.GREEDY:
            next_tokens = _replace_by_children(draft, argmax(logits))
            return verify_greedy(draft, next_tokens, max_depth=max_depth)

        probs = probabilities(logits, sampling, sampling_mode)
        children = _replace_by_children(draft, jnp.full(accepted.shape, -1, jnp.int32))
        certain = jax.nn.one_hot(children, probs.shape[-1], dtype=probs.dtype)
        probs = jnp.where(children[:, :, None] >= 0, certain, probs)
        accept, choose = verification_uniforms(keys, *probs.shape[1:])
        return verify(draft, probs, accept=accept, choose=choose, max_depth=max_depth)

    def _accepted_nodes(
        self, draft: Draft, dice: Float[Array, " B"], max_depth: int
    ) -> Bool[Array, "B N"]:
        """Returns the nodes to accept: as many on the path to the deepest node as ``dice`` give."""
        # A node counts if all its ancestors are valid.
        mask = ancestor_mask(draft.parents, max_depth)
        depth = depths(mask)
        reached = jnp.all(draft.valid[:, None, :] | ~mask, axis=-1)
        deepest = jnp.argmax(jnp.where(reached, depth, -1), axis=1)
        path = jnp.take_along_axis(mask, deepest[:, None, None], axis=1)[:, 0]

        # One uniform decides for all depths, because the rate of a depth includes those before it.
        rates = jnp.asarray(self.rates[:max_depth], jnp.float32)[None, :]
        count = jnp.sum(dice[:, None] < rates, axis=1, dtype=jnp.int32)
        return path & (depth <= count[:, None])


def _replace_by_children(draft: Draft, tokens: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """Replaces the token after each node by the token of its valid child, if it has one."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    parents = jnp.where(draft.valid & (draft.parents >= 0), draft.parents, tokens.shape[1])
    return tokens.at[rows, parents].set(draft.tokens, mode="drop")
