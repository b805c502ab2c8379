"""Frequencies beside the law that they should follow, and what deviation from it would have been seen."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
from scipy import optimize, stats

Law = dict[tuple[int, ...], float]


@dataclasses.dataclass(frozen=True)
class ChiSquare:
    """A comparison of frequencies with a law.

    Attributes:
        p_value: How often what is right would look as wrong.
        why: What was seen.
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
        """The root mean square deviation, relative to the law, that would have shown nine times in ten."""
        return smallest_deviation(self.total, self.degrees, alpha=self.alpha)


def chi_square(counts: Counter, law: Law, *, alpha: float) -> ChiSquare:
    """Pearson's test; cells that expect fewer than ten are counted as one.

    Args:
        counts: How often each outcome was seen.
        law: Probability of each outcome.
        alpha: Significance at which the caller fails, for what would have been visible.
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
    """A sum of scores whose expectation under the law is zero: one question, to which all tokens contribute.

    Attributes:
        total: Sum of the scores.
        variance: Sum of their variances under the law.
    """

    total: float = 0.0
    variance: float = 0.0

    def add(self, scores: np.ndarray, variances: np.ndarray) -> None:
        """Scores, and the variance of each given those before it."""
        self.total += float(np.sum(scores))
        self.variance += float(np.sum(variances))

    @property
    def z(self) -> float:
        """The sum in standard deviations."""
        return self.total / math.sqrt(self.variance) if self.variance else 0.0

    @property
    def p_value(self) -> float:
        """How often what is right would lie as far from zero."""
        return float(2 * stats.norm.sf(abs(self.z)))

    def visible(self, alpha: float, power: float = 0.9) -> float:
        """The tilt ``ε`` that would be seen: a distribution of ``p(x) (1 + ε · score(x))``, to first order."""
        if not self.variance:
            return math.inf
        return float(stats.norm.isf(alpha / 2) + stats.norm.isf(1 - power)) / math.sqrt(self.variance)


def smallest_deviation(tokens: int, degrees: int, *, alpha: float, power: float = 0.9) -> float:
    """The root mean square by which cell probabilities must be off, relatively, to be seen with this power.

    With ``p'(x | s) = p(x | s) (1 + ε(x, s))`` Pearson's statistic over the cells ``(s, x)`` is a noncentral chi-square
    of noncentrality ``tokens · Σ p ε²``. Where a stratum mixes several laws, a deviation that they share is seen at
    least as well.

    Args:
        tokens: Draws.
        degrees: Degrees of freedom.
        alpha: Significance at which the test fails.
        power: Probability of a failure that is asked for.
    """
    if tokens == 0 or degrees == 0:
        return math.inf
    threshold = stats.chi2.isf(alpha, degrees)
    beyond = lambda noncentrality: stats.ncx2.sf(threshold, degrees, noncentrality) - power
    noncentrality = optimize.brentq(beyond, 1e-3, 100.0 * threshold)
    return math.sqrt(noncentrality / tokens)  # type: ignore[operator]
