"""How sure a measured ratio is: bootstrap intervals over pairs that were measured side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy.stats import bootstrap

CONFIDENCE = 0.95
_RESAMPLES = 4999


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval.

    Attributes:
        value: From all measurements.
        low: Lower end; ``None`` where fewer than two measurements tell nothing of their spread.
        high: Upper end.
    """

    value: float
    low: float | None = None
    high: float | None = None


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float], *, seed: int = 0) -> Interval:
    """``Σ numerators / Σ denominators``, resampled in pairs (percentile bootstrap; Efron, 1979).

    Args:
        numerators: Such as the seconds of the baseline, one for each batch of prompts in each repeat.
        denominators: Those of a contender on the same batches in the same repeats.
        seed: Of the resampling.

    Raises:
        ValueError: There are no pairs.
    """
    above, below = np.asarray(numerators, float), np.asarray(denominators, float)
    if above.shape != below.shape or above.size == 0:
        raise ValueError(f"{above.size} numerators and {below.size} denominators; expected pairs, at least one")
    value = float(above.sum() / below.sum())
    if above.size < 2:
        return Interval(value)

    def statistic(above: np.ndarray, below: np.ndarray, axis: int) -> np.ndarray:
        return above.sum(axis) / below.sum(axis)

    return _interval(value, (above, below), statistic, seed)


def geometric_mean(ratios: Sequence[float], *, seed: int = 0) -> Interval:
    """``(Π ratios)^(1/n)``, resampled over the ratios.

    Args:
        ratios: Positive, one for each prompt.
        seed: Of the resampling.

    Raises:
        ValueError: There are no ratios.
    """
    logs = np.log(np.asarray(ratios, float))
    if logs.size == 0:
        raise ValueError("no ratios were given; expected at least one")
    value = float(np.exp(logs.mean()))
    if logs.size < 2:
        return Interval(value)
    return _interval(value, (logs,), lambda logs, axis: np.exp(logs.mean(axis)), seed)


def _interval(value: float, data: tuple[np.ndarray, ...], statistic: object, seed: int) -> Interval:
    found = bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Interval(value, float(found.low), float(found.high))
