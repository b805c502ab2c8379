"""Tests of frequencies against a distribution, and the smallest deviation that they would have detected."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
from scipy import optimize, stats

Law = dict[tuple[int, ...], float]


@dataclasses.dataclass(frozen=True)
class ChiSquare:
    """The result of Pearson's test.

    Attributes:
        p_value: Probability of a statistic as large under the expected distribution.
        why: The statistic in words.
        total: Number of outcomes.
        degrees: Degrees of freedom.
        alpha: Significance at which the caller fails.
    """

    p_value: float
    why: str
    total: int
    degrees: int
    alpha: float

    @property
    def visible(self) -> float:
        """The relative root mean square deviation that would have been detected with 90 % power."""
        return smallest_deviation(self.total, self.degrees, alpha=self.alpha)


def chi_square(counts: Counter, law: Law, *, alpha: float) -> ChiSquare:
    """Pearson's test; cells that expect fewer than ten are counted as one.

    Args:
        counts: Number of times that each outcome was seen.
        law: Probability of each outcome.
        alpha: Significance at which the caller fails; it decides what deviation is visible.
    """
    total = counts.total()
    impossible = [cell for cell in counts if cell not in law]
    if impossible:
        why = f"{len(impossible)} sequences that the target cannot write, as {impossible[0]}"
        return ChiSquare(0.0, why, total, 1, alpha)
    cells = [[counts[cell], total * mass] for cell, mass in sorted(law.items(), key=lambda item: -item[1])]
    large = [cell for cell in cells if cell[1] >= 10]
    small = [cell for cell in cells if cell[1] < 10]
    if small:
        rest = [sum(column) for column in zip(*small, strict=True)]
        if rest[1] >= 10 or not large:
            large.append(rest)
        else:
            large[-1] = [a + b for a, b in zip(large[-1], rest, strict=True)]
    observed, expected = np.array(large, float).T
    degrees = max(len(large) - 1, 1)
    statistic = float(np.sum((observed - expected) ** 2 / expected))
    return ChiSquare(
        float(stats.chi2.sf(statistic, degrees)),
        f"chi-square {statistic:.1f} on {degrees} degrees of freedom, {total} sequences",
        total,
        degrees,
        alpha,
    )


@dataclasses.dataclass
class Contrast:
    """A sum of scores whose expectation is zero: one test, to which all tokens contribute.

    Attributes:
        total: Sum of the scores.
        variance: Sum of their expected variances.
    """

    total: float = 0.0
    variance: float = 0.0

    def add(self, scores: np.ndarray, variances: np.ndarray) -> None:
        """Add scores, and the variance of each given those before it."""
        self.total += float(np.sum(scores))
        self.variance += float(np.sum(variances))

    @property
    def z(self) -> float:
        """The sum in standard deviations."""
        return self.total / math.sqrt(self.variance) if self.variance else 0.0

    @property
    def p_value(self) -> float:
        """Probability of a sum as far from zero."""
        return float(2 * stats.norm.sf(abs(self.z)))

    def visible(self, alpha: float, power: float = 0.9) -> float:
        """The tilt ``ε`` that would be detected: a distribution of ``p(x) (1 + ε · score(x))``, to first order."""
        if not self.variance:
            return math.inf
        return float(stats.norm.isf(alpha / 2) + stats.norm.isf(1 - power)) / math.sqrt(self.variance)


def smallest_deviation(tokens: int, degrees: int, *, alpha: float, power: float = 0.9) -> float:
    """The relative root mean square deviation of cell probabilities that is detected with this power.

    With ``p'(x | s) = p(x | s) (1 + ε(x, s))`` Pearson's statistic over the cells ``(s, x)`` is a noncentral chi-square
    of noncentrality ``tokens · Σ p ε²``. If a stratum mixes several distributions, a deviation that they share is
    detected at least as well.

    Args:
        tokens: Draws.
        degrees: Degrees of freedom.
        alpha: Significance at which the test fails.
        power: Probability of detecting it.
    """
    if tokens == 0 or degrees == 0:
        return math.inf
    threshold = stats.chi2.isf(alpha, degrees)
    beyond = lambda noncentrality: stats.ncx2.sf(threshold, degrees, noncentrality) - power
    noncentrality = optimize.brentq(beyond, 1e-3, 100.0 * threshold)
    return math.sqrt(noncentrality / tokens)  # type: ignore[operator]
