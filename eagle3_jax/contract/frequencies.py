"""Frequencies against a law, as the statistical checks of every contract judge them."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2

ALPHA = 1e-6  # how often a statistical check fails what is right

Law = dict[tuple[int, ...], float]


@dataclasses.dataclass(frozen=True)
class ChiSquare:
    """A comparison of frequencies with a law.

    Attributes:
        p_value: How often what is right would look as wrong.
        why: What was seen.
        visible: The root mean square deviation, relative to the law, that would have shown nine times in ten.
    """

    p_value: float
    why: str
    visible: float


def chi_square(counts: Counter, law: Law) -> ChiSquare:
    """Pearson's test; cells that expect fewer than ten are counted as one."""
    total = counts.total()
    impossible = [cell for cell in counts if cell not in law]
    if impossible:
        return ChiSquare(0.0, f"{len(impossible)} sequences that the target cannot write, as {impossible[0]}", 0.0)
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
    critical = chi2.isf(ALPHA, degrees)
    shift = brentq(lambda shift: ncx2.sf(critical, degrees, shift) - 0.9, 1e-3, 1e4)
    return ChiSquare(
        float(chi2.sf(statistic, degrees)),
        f"chi-square {statistic:.1f} on {degrees} degrees of freedom, {total} sequences",
        math.sqrt(float(shift) / total),  # type: ignore[arg-type]
    )
