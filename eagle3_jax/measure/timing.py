"""A clock that separates compilation from running, and statistics of repeated measurements."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
_PERCENTILES = (0.5, 0.9, 0.99)
_QUARTILES = (0.5, 0.25, 0.75)
_RESAMPLES = 4999
_SEED = 0

Result = TypeVar("Result")


def timed(compute: Callable[..., Result], *arguments: Any, **options: Any) -> tuple[Result, float]:
    """Returns the result of a computation, and the seconds until its arrays are complete."""
    start = time.perf_counter()
    result = jax.block_until_ready(compute(*arguments, **options))
    return result, time.perf_counter() - start


class CompileClock:
    """Wall time that JAX spends on tracing, lowering and compiling while the context is open.

    Attributes:
        programs: Number of programs compiled, or read from the persistent cache.
        num_read: Number of those that were read from the cache.
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
        self.num_read = 0
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
        self.num_read += event == "/jax/compilation_cache/cache_retrieval_time_sec"
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
        """Returns percentiles of at least one value.

        With fewer than a hundred values ``p99`` is close to the largest.
        """
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


def ratio_of_sums(numerators: ArrayLike, denominators: ArrayLike) -> Interval:
    """Returns ``Σ numerators / Σ denominators``, resampled in pairs.

    The interval is that of the percentile bootstrap (Efron, 1979).

    Args:
        numerators: At least one value, such as the seconds of the baseline for each batch in each
            repeat.
        denominators: The seconds of a contender on the same batches in the same repeats.
    """

    def ratio(above: np.ndarray, below: np.ndarray, axis: int) -> Any:
        return above.sum(axis) / below.sum(axis)

    return _interval(ratio, numerators, denominators)


def geometric_mean(ratios: ArrayLike) -> Interval:
    """Returns ``(Π ratios)^(1/n)`` of at least one positive ratio, resampled over the ratios."""
    return _interval(lambda ratios, axis: np.exp(np.log(ratios).mean(axis)), ratios)


def _interval(statistic: Callable[..., Any], *data: ArrayLike) -> Interval:
    # Importing it takes longer than most uses of this module.
    from scipy import stats

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
