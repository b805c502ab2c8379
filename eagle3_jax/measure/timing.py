"""Clocks: compilation apart from running, and middle and spread instead of a single number."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from types import TracebackType

import jax
import numpy as np


class CompileClock:
    """Wall time that JAX spends on tracing, lowering and compiling while the context is open.

    Attributes:
        programs: How many it compiled, or took from its persistent cache.

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
        """Length of the union of all spans: inner functions are traced within outer ones."""
        total, reached = 0.0, -np.inf
        for start, end in sorted(self._spans):
            total += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return float(total)


@dataclasses.dataclass(frozen=True)
class Latency:
    """How long users wait.

    Attributes:
        p50: Half of them no longer than this, in seconds.
        p90: Nine in ten of them.
        p99: All but one in a hundred.
    """

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latency:
        """Quantiles of at least one value; of fewer than a hundred, ``p99`` lies by the largest."""
        p50, p90, p99 = np.quantile(np.asarray(list(seconds), float), [0.5, 0.9, 0.99])
        return cls(float(p50), float(p90), float(p99))


@dataclasses.dataclass(frozen=True)
class Spread:
    """Middle and spread of repeated measurements.

    Attributes:
        median: Of all repeats.
        low: First quartile.
        high: Third quartile.
    """

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
