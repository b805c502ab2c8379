"""The statistical evidence of one check of a contract."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from scipy import stats

from eagle3_jax.measure.frequencies import (
    ALPHA,
    POWER,
    Contrast,
    Fit,
    fit_counts,
    smallest_deviation,
)

DETECTED = "would be detected with 90 % power"


class Evidence:
    """The statistical tests of one check.

    Together they fail a correct part with probability ``ALPHA``.

    Attributes:
        contrasts: Sums, by the fault that they show; ``{}`` in it becomes "often" or "seldom".
    """

    def __init__(self) -> None:
        self.contrasts: dict[str, Contrast] = defaultdict(Contrast)
        self._counts: dict[str, Any] = defaultdict(int)
        self._expected: dict[str, Any] = defaultdict(int)

    def count(
        self, name: str, outcomes: Int[np.ndarray, " n"], expected: Float[np.ndarray, " C"]
    ) -> None:
        """Adds outcomes ``0 .. C - 1`` to the counts of a name, and their expected counts."""
        self._counts[name] += np.bincount(outcomes, minlength=len(expected))
        self._expected[name] += expected

    @functools.cached_property
    def fits(self) -> dict[str, Fit]:
        """The fit of each name, when everything is counted."""
        return {
            name: fit_counts(counts, self._expected[name])
            for name, counts in self._counts.items()
            if counts.any()
        }

    @property
    def level(self) -> float:
        """The significance of a single test."""
        return ALPHA / max(1, len(self.fits) + len(self.contrasts))

    def misfit(self, distribution: str) -> str | None:
        """Returns which counts do not follow their expectation, ``distribution`` in words."""
        name, fit = min(self.fits.items(), key=lambda entry: entry[1].p_value)
        if fit.p_value >= self.level:
            return None
        p_value = fit.p_value / self.level * ALPHA
        return f"{name} does not follow {distribution}: {fit.reason} (p = {p_value:.1g})"

    def bias(self) -> str | None:
        """Returns the fault of the sum that is farthest from zero, if it is too far."""
        fault, contrast = max(
            self.contrasts.items(), key=lambda entry: entry[1].is_normal * abs(entry[1].z)
        )
        if not contrast.is_normal or contrast.p_value >= self.level:
            return None
        fault = fault.format("often" if contrast.total > 0 else "seldom")
        return f"{fault}, by {abs(contrast.z):.1f} standard deviations"

    def smallest_deviation(self, suffix: str = "") -> float:
        """Returns the deviation that would have been detected in any fit.

        Args:
            suffix: Only the fits whose names end with it.
        """
        # Half of the significance is Pearson's, the other half is that of single outcomes.
        level = self.level / 2
        fits = [fit for name, fit in self.fits.items() if name.endswith(suffix) and fit.degrees]
        return max(
            (smallest_deviation(fit.draws, fit.degrees, alpha=level) for fit in fits),
            default=math.inf,
        )

    def smallest_tilt(self, suffix: str = "") -> float:
        """Returns the tilt that would have been detected in any sum.

        A distribution ``p`` with the tilt ``ε`` is ``p(x) (1 + ε · score(x))``.

        Args:
            suffix: Only the sums whose faults end with it.
        """
        chosen = [
            item
            for fault, item in self.contrasts.items()
            if fault.endswith(suffix) and item.is_normal
        ]
        deviations = float(stats.norm.isf(self.level / 2) + stats.norm.isf(1 - POWER))
        return max(
            (deviations / math.sqrt(contrast.variance) for contrast in chosen), default=math.inf
        )
