"""Tests of frequencies against a distribution, and the smallest deviation that they would have detected."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import optimize, stats

from eagle3_jax.testing.report import ALPHA, Broken

POWER = 0.9  # of the deviations that reports name
DETECTED = "would be detected with 90 % power"
_LEAST = 10.0  # smallest expected count of a cell


@dataclasses.dataclass(frozen=True)
class Fit:
    """Counted outcomes compared with their exact distribution: p-values, and the empirical total variation distance.

    ``impossible`` are the counted outcomes of probability 0, which make all p-values 0. ``statistic`` is Pearson's, on
    ``degrees`` degrees of freedom. ``single_outcome`` is the p-value of the outcome that deviates most, for all
    outcomes together, and ``farthest`` describes that outcome.
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
        return f"chi-square {self.statistic:.1f} on {self.degrees} degrees of freedom, {self.draws} outcomes"


def fit_counts(counts: Int[np.ndarray, " C"], expected: Float[np.ndarray, " C"]) -> Fit:
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
    # Binomial tails bound those of counts whose probabilities differ from draw to draw around the same mean.
    tails = np.minimum(stats.binom.cdf(observed, draws, masses), stats.binom.sf(observed - 1, draws, masses))
    index = int(tails.argmin())
    farthest = f"{ranked[index]} came {observed[index]:.0f} times in {draws}; expected {draws * masses[index]:.1f}"
    single_outcome = min(1.0, 2 * len(tails) * float(tails[index]))
    frequent = np.count_nonzero(draws * masses >= _LEAST)
    rare = draws * masses[frequent:].sum()
    # The rare outcomes are one cell. If they are too few even together, they join the rarest of the frequent ones.
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
    """A sum of scores whose expectation is zero, and of their variances: one test, to which all tokens contribute."""

    total: float = 0.0
    variance: float = 0.0

    def add(self, scores: np.ndarray | np.floating, variances: np.ndarray | np.floating) -> None:
        """Adds scores, and the variance of each given those before it."""
        self.total += float(np.sum(scores))
        self.variance += float(np.sum(variances))

    def add_log_probabilities(self, probs: Float[np.ndarray, "n V"], tokens: Int[np.ndarray, " n"]) -> None:
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


class Evidence:
    """The statistical tests of one check. Together they fail a correct part with probability ``ALPHA``.

    Attributes:
        contrasts: Sums, by the fault that they show; ``{}`` in it becomes "often" or "seldom".
    """

    def __init__(self) -> None:
        self.contrasts: dict[str, Contrast] = defaultdict(Contrast)
        self._counts: dict[str, Any] = defaultdict(int)
        self._expected: dict[str, Any] = defaultdict(int)

    def count(self, name: str, outcomes: Int[np.ndarray, " n"], expected: Float[np.ndarray, " C"]) -> None:
        """Adds outcomes ``0 .. C - 1`` to the counts of a name, and their expected counts."""
        self._counts[name] += np.bincount(outcomes, minlength=len(expected))
        self._expected[name] += expected

    @functools.cached_property
    def fits(self) -> dict[str, Fit]:
        """The fit of each name, when everything is counted."""
        return {name: fit_counts(counts, self._expected[name]) for name, counts in self._counts.items() if counts.any()}

    @property
    def level(self) -> float:
        """The significance of a single test."""
        return ALPHA / max(1, len(self.fits) + len(self.contrasts))

    def require_fits(self, distribution: str) -> None:
        """Raises ``Broken`` if counts do not fit; the message calls what they should follow ``distribution``."""
        name, fit = min(self.fits.items(), key=lambda entry: entry[1].p_value)
        if fit.p_value < self.level:
            p_value = fit.p_value / self.level * ALPHA
            raise Broken(f"{name} does not follow {distribution}: {fit.reason} (p = {p_value:.1g})")

    def require_contrasts(self) -> None:
        """Raises ``Broken`` if a sum is too far from zero; the message names the farthest one."""
        fault, contrast = max(self.contrasts.items(), key=lambda entry: entry[1].is_normal * abs(entry[1].z))
        if contrast.is_normal and contrast.p_value < self.level:
            fault = fault.format("often" if contrast.total > 0 else "seldom")
            raise Broken(f"{fault}, by {abs(contrast.z):.1f} standard deviations")

    def smallest_deviation(self, suffix: str = "") -> float:
        """Returns the deviation that every fit whose name ends with ``suffix`` would have detected."""
        level = self.level / 2  # the other half is that of single outcomes
        fits = [fit for name, fit in self.fits.items() if name.endswith(suffix) and fit.degrees]
        return max((smallest_deviation(fit.draws, fit.degrees, alpha=level) for fit in fits), default=math.inf)

    def smallest_tilt(self, suffix: str = "") -> float:
        """Returns the tilt that every sum whose fault ends with ``suffix`` would have detected.

        A distribution ``p`` with the tilt ``ε`` is ``p(x) (1 + ε · score(x))``.
        """
        chosen = [item for fault, item in self.contrasts.items() if fault.endswith(suffix) and item.is_normal]
        deviations = float(stats.norm.isf(self.level / 2) + stats.norm.isf(1 - POWER))
        return max((deviations / math.sqrt(contrast.variance) for contrast in chosen), default=math.inf)


def smallest_deviation(tokens: int, degrees: int, *, alpha: float) -> float:
    """Returns the relative root mean square deviation of cell probabilities that is detected with 90 % power.

    With ``p'(x | s) = p(x | s) (1 + ε(x, s))`` Pearson's statistic over the cells ``(s, x)`` is a noncentral chi-square
    of noncentrality ``tokens · Σ p ε²``. If a stratum mixes several distributions, a deviation that they share is
    detected at least as well. The test fails at the significance ``alpha``.
    """
    if tokens == 0 or degrees == 0:
        return math.inf
    threshold = stats.chi2.isf(alpha, degrees)
    excess_power = lambda noncentrality: stats.ncx2.sf(threshold, degrees, noncentrality) - POWER
    noncentrality = optimize.brentq(excess_power, 1e-3, 100.0 * threshold)
    return math.sqrt(noncentrality / tokens)  # type: ignore[operator]
