"""A clock that separates compilation from running, and statistics of repeated measurements."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

import jax
import numpy as np
from scipy import stats

CONFIDENCE = 0.95
_RESAMPLES = 4999


class CompileClock:
    """Wall time that JAX spends on tracing, lowering and compiling while the context is open.

    Attributes:
        programs: Number of programs compiled, or taken from the persistent cache.

    Example::

        with CompileClock() as clock:
            start = time.perf_counter()
            decoder.generate("def f(x):")
            running = time.perf_counter() - start - clock.seconds
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self.programs = 0

    def __enter__(self) -> CompileClock:
        jax.monitoring.register_event_duration_secs_listener(self._listen)  # type: ignore[arg-type]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)  # type: ignore[arg-type]

    def _listen(self, event: str, duration: float, **details: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self._spans.append((now - duration, now))
        self.programs += event == "/jax/core/compile/backend_compile_duration"

    @property
    def seconds(self) -> float:
        """Length of the union of all spans, since inner functions are traced within outer ones."""
        total, reached = 0.0, -np.inf
        for start, end in sorted(self._spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return float(total)


@dataclasses.dataclass(frozen=True)
class Latency:
    """Percentiles of a waiting time, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latency:
        """Percentiles of at least one value; with fewer than a hundred, ``p99`` is close to the largest."""
        p50, p90, p99 = np.quantile(np.asarray(list(seconds), float), [0.5, 0.9, 0.99])
        return cls(float(p50), float(p90), float(p99))


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles (``low``, ``high``) of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Quartiles of at least one value."""
        low, median, high = np.quantile(np.asarray(list(values), float), [0.25, 0.5, 0.75])
        return cls(float(median), float(low), float(high))

    def to_json(self) -> dict[str, float]:
        """Plain numbers."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval.

    Attributes:
        value: The figure from all measurements.
        low: Lower end; ``None`` with fewer than two measurements.
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
        seed: Random seed of the resampling.

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
        seed: Random seed of the resampling.

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
    found = stats.bootstrap(
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
