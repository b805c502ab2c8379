"""Statistics of sampled tokens, compared with the distribution that they should follow.

A token at index ``j`` of a round is emitted by a decision that depends on earlier events alone. So
whenever index ``j`` is reached, the token follows ``p``, the target's distribution after the
warpers, for any draft. Every statistic here compares a score of the token with the score's exact
mean and variance under ``p``, or the token's place in ``p`` with a uniform. None of them is
conditioned on acceptance, which would bias it.

No single statistic sees every bug: a token resampled from ``p`` in place of the residual keeps its
entropy, and a wrong residual can keep its direction. Hence several.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from flax import struct
from jaxtyping import Bool, Float, Int
from scipy import sparse, stats

from eagle3_jax.measure.frequencies import POWER, smallest_deviation

MOST_DIRECTED = (
    10.0  # ln(q/p) is cut at this size, so that a token with next to no mass cannot decide alone
)


@struct.dataclass
class Score:
    """A score of each token with its expected value."""

    observed: Float[np.ndarray, " n"]  #: ``[n]``, the score of the token.
    mean: Float[np.ndarray, " n"]  #: ``[n]``, its mean under ``p``.
    variance: Float[np.ndarray, " n"]  #: ``[n]``, its variance under ``p``.

    @property
    def z(self) -> float:
        """``Σ (observed - mean) / sqrt(Σ variance)``; 0 without variance.

        It is standard normal for an exact sampler.
        """
        spread = math.sqrt(self.variance.sum())
        return float((self.observed - self.mean).sum() / spread) if spread > 0 else 0.0

    def __getitem__(self, chosen: Bool[np.ndarray, " n"]) -> Score:
        """The chosen tokens only."""
        return jax.tree.map(lambda values: values[chosen], self)

    @classmethod
    def of(
        cls,
        scores: Float[np.ndarray, "n V"],
        p: Float[np.ndarray, "n V"],
        tokens: Int[np.ndarray, " n"],
    ) -> Score:
        """Makes a score from the values of the vocabulary, except tokens without mass."""
        possible = np.where(p > 0, scores, 0.0)
        mean = np.einsum("nv,nv->n", p, possible)
        centred = possible - mean[:, None]
        return cls(_at(scores, tokens), mean, np.einsum("nv,nv,nv->n", p, centred, centred))


def surprisal(p: Float[np.ndarray, "n V"], tokens: Int[np.ndarray, " n"]) -> Score:
    """``-ln p(x)``, whose mean is the entropy: sees text that is too sure, or not enough."""
    with np.errstate(divide="ignore"):
        return Score.of(-np.log(p), p, tokens)


def directed(
    p: Float[np.ndarray, "n V"], q: Float[np.ndarray, "n V"], tokens: Int[np.ndarray, " n"]
) -> Score:
    """``ln(q(x) / p(x))``, cut at :data:`MOST_DIRECTED`: sees a pull to or from the draft."""
    return Score.of(towards(p, q), p, tokens)


def towards(p: Float[np.ndarray, "n V"], q: Float[np.ndarray, "n V"]) -> Float[np.ndarray, "n V"]:
    """``ln(q / p)`` of every token, cut; 0 where neither has mass."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.log(q) - np.log(p)
    return np.clip(
        np.nan_to_num(ratio, nan=0.0, posinf=MOST_DIRECTED, neginf=-MOST_DIRECTED),
        -MOST_DIRECTED,
        MOST_DIRECTED,
    )


def drafted(
    p: Float[np.ndarray, "n V"], proposals: Int[np.ndarray, "n k"], tokens: Int[np.ndarray, " n"]
) -> Score:
    """Whether the token is one of those proposed: the directed score of deterministic proposals.

    Args:
        p: The target's distribution at each token.
        proposals: Distinct draft tokens at this place, padded with -1: one in a chain, the siblings
            in a tree.
        tokens: The emitted tokens.
    """
    mass = np.take_along_axis(p, np.maximum(proposals, 0), axis=1)
    mean = np.minimum((mass * (proposals >= 0)).sum(axis=1), 1.0)
    return Score((proposals == tokens[:, None]).any(axis=1).astype(float), mean, mean * (1 - mean))


def randomised_pit(
    p: Float[np.ndarray, "n V"],
    tokens: Int[np.ndarray, " n"],
    uniforms: Float[np.ndarray, " n"],
    *,
    order: Float[np.ndarray, "n V"],
) -> Float[np.ndarray, " n"]:
    """The probability integral transform, uniform on [0, 1] exactly when ``x ~ p``.

    It is ``P(before x) + u p(x)``.

    Args:
        p: The target's distribution at each token.
        tokens: The emitted tokens.
        uniforms: Fresh, in [0, 1).
        order: Tokens with a lower value come before; of equal ones, the lower id. ``-p`` orders by
            rank.
    """
    token_mass = _at(order, tokens)[:, None]
    ids = np.arange(p.shape[1])[None, :]
    before = (order < token_mass) | ((order == token_mass) & (ids < tokens[:, None]))
    return (p * before).sum(axis=1) + uniforms * _at(p, tokens)


def kolmogorov_smirnov(values: Float[np.ndarray, " n"]) -> float:
    """The p-value of the hypothesis that values are uniform on [0, 1]; 1 without values."""
    if values.size == 0:
        return 1.0
    return float(stats.kstest(np.clip(values, 0.0, 1.0), "uniform").pvalue)


@dataclasses.dataclass(frozen=True)
class Fluctuation:
    """The deviation of tokens from their expected counts, over all strata."""

    statistic: float  #: ``Σ d' C⁻¹ d`` over the strata; chi-square for an exact sampler.
    degrees: int  #: Its degrees of freedom.
    p_value: float  #: P-value of the statistic; 0 if a sampled token has no probability.
    tokens: int  #: Tokens that had a choice.
    impossible: int  #: Sampled tokens that have probability zero.

    def sees(self, alpha: float) -> float:
        """See :func:`smallest_deviation`."""
        return smallest_deviation(self.tokens, self.degrees, alpha=alpha)


@dataclasses.dataclass(frozen=True)
class Excess:
    """Counts of tokens minus their expected counts, in strata that were known before.

    Given its past, ``1[x = v] - p(v)`` has mean 0 and covariance ``diag(p) - p p'``, for every
    past. Its sum over tokens is a martingale, so one quadratic form tests any stratum: a context, a
    position, the token eight positions earlier, the token of a neighboring row.
    """

    observed: Float[np.ndarray, "S V"]  #: ``[S V]``, how often each token was sampled.
    expected: Float[np.ndarray, "S V"]  #: ``[S V]``, ``Σ p``.
    covariance: Float[np.ndarray, "S V V"]  #: ``[S V V]``, ``Σ diag(p) - p p'``.
    tokens: int  #: Tokens that had a choice.
    impossible: int  #: Sampled tokens that have probability zero.

    @classmethod
    def of(
        cls,
        p: Float[np.ndarray, "C V"],
        distributions: Int[np.ndarray, " n"],
        tokens: Int[np.ndarray, " n"],
        strata: Int[np.ndarray, " n"],
        size: int,
    ) -> Excess:
        """Count tokens.

        Args:
            p: All distributions.
            distributions: Index of the distribution that each token was sampled from.
            tokens: The sampled tokens.
            strata: The stratum of each, from 0.
            size: ``S``, how many strata there are.
        """
        count, vocabulary = p.shape
        ones = np.ones(len(tokens))
        # Duplicates are summed.
        often = sparse.csr_array((ones, (strata, distributions)), shape=(size, count))
        observed = sparse.csr_array((ones, (strata, tokens)), shape=(size, vocabulary)).toarray()

        expected = often @ p
        products = often @ np.einsum("cv,cw->cvw", p, p).reshape(count, -1)
        covariance = expected[:, :, None] * np.eye(vocabulary) - products.reshape(
            size, vocabulary, vocabulary
        )
        has_choice = (p > 0).sum(axis=1) > 1
        impossible = int(np.count_nonzero(p[distributions, tokens] == 0))
        return cls(observed, expected, covariance, int(has_choice[distributions].sum()), impossible)

    def __add__(self, second: Excess) -> Excess:
        """Adds the tokens of another part of the text, in the same strata."""
        return Excess(
            *(
                getattr(self, field.name) + getattr(second, field.name)
                for field in dataclasses.fields(self)
            )
        )

    def fluctuation(self, *, least: float = 10.0) -> Fluctuation:
        """The quadratic form over all strata.

        Args:
            least: Strata that expect fewer of some possible token are put together, so that the
                form is a chi-square.
        """
        if self.impossible:
            return Fluctuation(math.inf, 1, 0.0, self.tokens, self.impossible)
        few = ((self.expected > 0) & (self.expected < least)).any(axis=1)

        def together(values: np.ndarray) -> np.ndarray:
            return np.concatenate([values[~few], values[few].sum(axis=0, keepdims=True)])

        difference = together(self.observed - self.expected)
        covariance = together(self.covariance)

        spread, axes = np.linalg.eigh(covariance)
        along = np.einsum("sv,svk->sk", difference, axes)
        real = spread > 1e-6 * np.maximum(spread[:, -1:], 1.0)
        statistic = float((along[real] ** 2 / spread[real]).sum())
        degrees = int(np.count_nonzero(real))
        return Fluctuation(
            statistic, degrees, float(stats.chi2.sf(statistic, degrees)), self.tokens, 0
        )


def smallest_shift(tokens: int, most_z: float) -> float:
    """The smallest deviation along a score whose sum exceeds ``most_z`` with 90 % power.

    With ``p' = p (1 + ε s)`` and ``s`` the score made standard, ``z`` is normal with mean ``ε
    √tokens``. A deviation that is orthogonal to the score leaves it unchanged.
    """
    return (most_z + float(stats.norm.ppf(POWER))) / math.sqrt(tokens)


def _at(values: Float[np.ndarray, "n V"], tokens: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    return np.take_along_axis(values, tokens[:, None], axis=1)[:, 0]
