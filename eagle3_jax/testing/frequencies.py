"""Tests of frequencies against a distribution, and the smallest deviation that they would have detected."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy import optimize, stats


@dataclasses.dataclass(frozen=True)
class Fit:
    """Counted outcomes compared with their exact distribution: p-values, and the empirical total variation distance.

    ``cells`` is the number of outcomes that the distribution allows; ``impossible`` are counted outcomes that it does
    not allow, which make both p-values 0. ``statistic`` is Pearson's, on ``degrees`` degrees of freedom.
    """

    draws: int
    cells: int
    chi_square: float
    g_test: float
    distance: float
    impossible: Mapping[Any, Any]
    statistic: float = math.inf
    degrees: int = 0

    @property
    def why(self) -> str:
        """Pearson's statistic in words, or an impossible outcome."""
        if self.impossible:
            return f"{len(self.impossible)} outcomes that the target cannot write, as {next(iter(self.impossible))}"
        return f"chi-square {self.statistic:.1f} on {self.degrees} degrees of freedom, {self.draws} outcomes"

    def sees(self, alpha: float) -> float:
        """See :func:`smallest_deviation`."""
        return smallest_deviation(self.draws, self.degrees, alpha=alpha)


def goodness_of_fit(counts: Mapping[Any, Any], law: Mapping[Any, Any], *, least: float = 10.0) -> Fit:
    """Pearson's chi-square and the G-test of counts of outcomes; ``law`` has the exact probability of each.

    The rarest outcomes are counted as one, until a cell expects ``least`` of them.
    """
    draws = int(sum(counts.values()))
    possible = {outcome: float(mass) for outcome, mass in law.items() if mass > 0}
    impossible = {outcome: count for outcome, count in counts.items() if count and outcome not in possible}
    distance = (
        sum(abs(counts.get(x, 0) / draws - m) for x, m in possible.items()) + sum(impossible.values()) / draws
    ) / 2
    found = Fit(draws, len(possible), 0.0, 0.0, distance, impossible)
    if impossible:
        return found
    ranked = sorted(possible, key=lambda outcome: -possible[outcome])
    expected = draws * np.array([possible[outcome] for outcome in ranked])
    observed = np.array([counts.get(outcome, 0) for outcome in ranked], float)
    own = int(np.count_nonzero(expected >= least))
    if own < len(ranked):
        if expected[own:].sum() < least and own > 0:  # too small a tail for a cell: it joins the rarest one
            own -= 1
        observed = np.append(observed[:own], observed[own:].sum())
        expected = np.append(expected[:own], expected[own:].sum())
    if len(expected) == 1:
        return dataclasses.replace(found, chi_square=1.0, g_test=1.0, statistic=0.0)
    expected *= observed.sum() / expected.sum()
    pearson, likelihood = (
        stats.power_divergence(observed, expected, lambda_=name) for name in ("pearson", "log-likelihood")
    )
    return dataclasses.replace(
        found,
        chi_square=float(pearson.pvalue),
        g_test=float(likelihood.pvalue),
        statistic=float(pearson.statistic),
        degrees=len(expected) - 1,
    )


@dataclasses.dataclass
class Contrast:
    """A sum of scores whose expectation is zero, and of their variances: one test, to which all tokens contribute."""

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
    detected at least as well. The test fails at the significance ``alpha``.
    """
    if tokens == 0 or degrees == 0:
        return math.inf
    threshold = stats.chi2.isf(alpha, degrees)
    beyond = lambda noncentrality: stats.ncx2.sf(threshold, degrees, noncentrality) - power
    noncentrality = optimize.brentq(beyond, 1e-3, 100.0 * threshold)
    return math.sqrt(noncentrality / tokens)  # type: ignore[operator]
