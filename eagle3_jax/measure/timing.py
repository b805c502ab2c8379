"""A clock that separates compilation from running, and statistics of repeated measurements."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
_PERCENTILES = (0.5, 0.9, 0.99)
_QUARTILES = (0.5, 0.25, 0.75)
_RESAMPLES = 4999
_SEED = 0


class CompileClock:
    """Wall time that JAX spends on tracing, lowering and compiling while the context is open.

    Attributes:
        programs: Number of programs compiled, or taken from the persistent cache.
        on_compiling: Called when the compilation of a program begins.

    Example::

        with CompileClock() as clock:
            start = time.perf_counter()
            decoder.generate("def f(x):")
            running = time.perf_counter() - start - clock.seconds
    """

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []
        self.programs = 0
        self.on_compiling: Callable[[], Any] | None = None

    def __enter__(self) -> CompileClock:
        jax.monitoring.register_event_duration_secs_listener(self._listen)  # type: ignore[arg-type]
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._listen)  # type: ignore[arg-type]

    def _listen(self, event: str, duration: float, **details: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            now = time.perf_counter()
            self._spans.append((now - duration, now))
        self.programs += event == "/jax/core/compile/backend_compile_duration"
        if (
            event == "/jax/core/compile/jaxpr_to_mlir_module_duration"
            and self.on_compiling is not None
        ):
            self.on_compiling()

    @property
    def seconds(self) -> float:
        """Length of the union of all spans, since inner functions are traced within outer ones."""
        total = 0.0
        latest_end = -np.inf
        for start, end in sorted(self._spans):
            total += max(0.0, end - max(start, latest_end))
            latest_end = max(latest_end, end)
        return float(total)


@dataclasses.dataclass(frozen=True)
class Latency:
    """Percentiles of a waiting time, in seconds."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latency:
        """Returns percentiles of at least one value; with fewer than a hundred, ``p99`` is close to the largest."""
        return cls(*np.quantile(np.fromiter(seconds, float), _PERCENTILES).tolist())


@dataclasses.dataclass(frozen=True)
class Spread:
    """Median and quartiles (``low``, ``high``) of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Returns quartiles of at least one value."""
        return cls(*np.quantile(np.fromiter(values, float), _QUARTILES).tolist())


@dataclasses.dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float  #: The figure from all measurements.
    low: float | None = None  #: Lower end; ``None`` with too few measurements.
    high: float | None = None  #: Upper end.


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """Quantiles of a waiting time in seconds, each with its 95 % interval."""

    p50: Interval
    p90: Interval
    p99: Interval

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Quantiles:
        """Returns the quantiles of at least one value."""
        values = np.fromiter(seconds, float)
        return cls(*(quantile(values, share) for share in _PERCENTILES))


def quantile(values: np.ndarray, share: float) -> Interval:
    """Returns a quantile with its interval, whose ends are two of the values (Conover, 1999, section 3.2).

    An end is ``None`` where there are too few values to give one.
    """
    from scipy import stats

    interval = stats.quantile_test(values, p=share).confidence_interval(CONFIDENCE)
    low, high = (float(end) if np.isfinite(end) else None for end in interval)
    return Interval(float(np.quantile(values, share)), low, high)


def ratio_of_sums(numerators: ArrayLike, denominators: ArrayLike) -> Interval:
    """Returns ``Σ numerators / Σ denominators``, resampled in pairs (percentile bootstrap; Efron, 1979).

    Args:
        numerators: At least one value, such as the seconds of the baseline for each batch in each
            repeat.
        denominators: The seconds of a contender on the same batches in the same repeats.
    """
    return _interval(
        lambda above, below, axis: above.sum(axis) / below.sum(axis), numerators, denominators
    )


def geometric_mean(ratios: ArrayLike) -> Interval:
    """Returns ``(Π ratios)^(1/n)`` of at least one positive ratio, resampled over the ratios."""
    return _interval(lambda ratios, axis: np.exp(np.log(ratios).mean(axis)), ratios)


def _interval(statistic: Callable[..., Any], *data: ArrayLike) -> Interval:
    from scipy import stats  # here, because importing it takes longer than most uses of this module

    arrays = [np.asarray(values, float) for values in data]
    value = float(statistic(*arrays, axis=0))
    if arrays[0].size < 2:
        return Interval(value)
    bootstrap = stats.bootstrap(
        arrays,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=_SEED,
    )
    low, high = bootstrap.confidence_interval
    return Interval(value, float(low), float(high))
