"""Counts against a distribution, sums against an expectation, and what would have been seen."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy import optimize, stats

ALPHA = 1e-6  # probability that statistical tests together fail what is correct
POWER = 0.9  # of the deviations that reports name
_LEAST = 10.0  # smallest expected count of a cell


@dataclasses.dataclass(frozen=True)
class Fit:
    """Counted outcomes compared with their exact distribution.

    Attributes:
        draws: Number of outcomes.
        distance: Empirical total variation distance.
        chi_square: P-value of Pearson's test.
        g_test: P-value of the likelihood ratio test.
        statistic: Pearson's statistic.
        degrees: Its degrees of freedom.
        single_outcome: P-value of the outcome that deviates most, for all outcomes together.
        farthest: That outcome, in words.
        impossible: The counted outcomes of probability 0, which make all p-values 0.
    """

    draws: int
    distance: float
    chi_square: float = 0.0
    g_test: float = 0.0
    statistic: float = math.inf
    degrees: int = 0
    single_outcome: float = 0.0
    farthest: str = ""
    impossible: tuple[int, ...] = ()

    @property
    def p_value(self) -> float:
        """The p-value of Pearson's test and of the test of single outcomes together."""
        return min(1.0, 2 * min(self.chi_square, self.single_outcome))

    @property
    def reason(self) -> str:
        """The test that failed, in words."""
        if self.impossible:
            return f"{len(self.impossible)} outcomes of probability 0, as {self.impossible[0]}"
        if self.single_outcome < self.chi_square:
            return self.farthest
        return (
            f"chi-square {self.statistic:.1f} on {self.degrees} degrees of freedom,"
            f" {self.draws} outcomes"
        )


def fit_counts(counts: np.ndarray, expected: np.ndarray) -> Fit:
    """Returns Pearson's chi-square and the G-test of the counts of outcomes ``0 .. C - 1``.

    The rarest outcomes are counted as one, until a cell expects ``_LEAST`` of them.

    Args:
        counts: How often each outcome was seen.
        expected: Expected counts of any sum.
    """
    draws = int(counts.sum())
    masses = expected / expected.sum()
    distance = float(np.abs(counts / draws - masses).sum() / 2)
    impossible = np.flatnonzero((counts > 0) & (masses == 0))
    if impossible.size:
        return Fit(draws, distance, impossible=tuple(impossible.tolist()))

    ranked = np.argsort(-masses, kind="stable")[: np.count_nonzero(masses)]
    observed = counts[ranked].astype(float)
    masses = masses[ranked]
    # Binomial tails bound those of counts whose probabilities differ from draw to draw around the
    # same mean.
    tails = np.minimum(
        stats.binom.cdf(observed, draws, masses), stats.binom.sf(observed - 1, draws, masses)
    )
    index = int(tails.argmin())
    farthest = (
        f"{ranked[index]} came {observed[index]:.0f} times in {draws}; expected"
        f" {draws * masses[index]:.1f}"
    )
    single_outcome = min(1.0, 2 * len(tails) * float(tails[index]))

    # Pearson's statistic is nearly chi-square where each cell expects about ten.
    frequent = np.count_nonzero(draws * masses >= _LEAST)
    rare = draws * masses[frequent:].sum()

    # The rare outcomes are one cell. If they are too few even together, they join the rarest of the
    # frequent ones.
    starts = np.arange(max(1, frequent + (rare >= _LEAST)))
    observed = np.add.reduceat(observed, starts)
    expected = np.add.reduceat(masses, starts)
    if len(starts) == 1:
        return Fit(draws, distance, 1.0, 1.0, 0.0, 0, single_outcome, farthest)

    expected *= draws / expected.sum()
    pearson = stats.power_divergence(observed, expected, lambda_="pearson")
    likelihood = stats.power_divergence(observed, expected, lambda_="log-likelihood")
    return Fit(
        draws=draws,
        distance=distance,
        chi_square=float(pearson.pvalue),
        g_test=float(likelihood.pvalue),
        statistic=float(pearson.statistic),
        degrees=len(starts) - 1,
        single_outcome=single_outcome,
        farthest=farthest,
    )


@dataclasses.dataclass
class Contrast:
    """A sum of scores whose expectation is zero, and of their variances: one test of all tokens.

    Under a correct sampler the scores are a martingale's differences, so the sum is nearly normal.
    """

    total: float = 0.0
    variance: float = 0.0

    def add(self, scores: np.ndarray | np.floating, variances: np.ndarray | np.floating) -> None:
        """Adds scores, and the variance of each given those before it."""
        self.total += float(np.sum(scores))
        self.variance += float(np.sum(variances))

    def add_log_probabilities(self, probs: np.ndarray, tokens: np.ndarray) -> None:
        """Adds for each sampled token its log-probability less the expectation of that.

        A wrong temperature shifts this sum, and shows in it sooner than in frequencies.
        """
        log = np.log(np.where(probs > 0, probs, 1))
        mean = (probs * log).sum(-1)
        square = (probs * log**2).sum(-1)
        self.add(log[np.arange(len(tokens)), tokens] - mean, np.maximum(square - mean**2, 0))

    @property
    def is_normal(self) -> bool:
        """Whether enough scores were added, so that the sum is nearly normal."""
        return self.variance > 100

    @property
    def z(self) -> float:
        """The sum in standard deviations."""
        return self.total / math.sqrt(self.variance) if self.variance else 0.0

    @property
    def p_value(self) -> float:
        """Probability of a sum as far from zero."""
        return float(2 * stats.norm.sf(abs(self.z)))


def smallest_deviation(tokens: int, degrees: int, *, alpha: float) -> float:
    """Returns the smallest relative deviation of cell probabilities that is found with 90 % power.

    It is a root mean square.
    With ``p'(x | s) = p(x | s) (1 + ε(x, s))`` Pearson's statistic over the cells ``(s, x)`` is a
    noncentral chi-square of noncentrality ``tokens · Σ p ε²``. If a stratum mixes several
    distributions, a deviation that they share is detected at least as well. The test fails at the
    significance ``alpha``.
    """
    if tokens == 0 or degrees == 0:
        return math.inf
    threshold = stats.chi2.isf(alpha, degrees)

    def excess_power(noncentrality: float) -> float:
        return float(stats.ncx2.sf(threshold, degrees, noncentrality)) - POWER

    noncentrality = optimize.brentq(excess_power, 1e-3, 100.0 * threshold)
    return math.sqrt(noncentrality / tokens)  # type: ignore[operator]
