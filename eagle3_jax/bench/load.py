"""Decoding under load: requests arrive, wait for a row, run in company and end. Times are those that users see.

In a closed loop each of ``C`` users sends a request, waits for the answer, and then sends the next
request. In an open loop requests arrive at given times, such as those of a Poisson process, and
wait while all rows are taken. A time to first token begins at the arrival, so it contains the wait.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from eagle3_jax.decode import padded_prompt
from eagle3_jax.engine.engine import Engine
from eagle3_jax.measure.timing import CompileClock, Quantiles, Spread
from eagle3_jax.prompts.request import Request
from eagle3_jax.stats import SpeculationStats


@dataclasses.dataclass(frozen=True)
class Load:
    """How requests arrive.

    Attributes:
        concurrency: ``C`` of a closed loop; ``None`` for an open one.
        rate: Requests per second of a Poisson process; ``None`` for other arrivals.
        times: Recorded times of arrival in seconds, ascending.
    """

    concurrency: int | None = None
    rate: float | None = None
    times: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """The load in words."""
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        return f"{self.rate:g} requests/s" if self.rate is not None else "recorded arrivals"

    def arrivals(self, count: int, seed: int) -> Float[np.ndarray, " N"] | None:
        """Returns times of arrival in seconds; ``None`` for a closed loop.

        Raises:
            ValueError: There are fewer recorded times than requests.
        """
        if self.concurrency is not None:
            return None
        if self.rate is not None:
            return np.random.default_rng(seed).exponential(1 / self.rate, count).cumsum()
        if len(self.times) < count:
            raise ValueError(
                f"{len(self.times)} times of arrival for {count} requests; give one each"
            )
        return np.array(self.times[:count])


@dataclasses.dataclass
class Timeline:
    """What one user saw.

    Attributes:
        arrival: Time of the request, in seconds since the run began.
        deliveries: Time and number of tokens of each delivery: what one tick of the engine wrote.
        output: All new tokens.
    """

    arrival: float
    deliveries: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    output: list[int] = dataclasses.field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Time to first token (TTFT), the wait for a row included."""
        return self.deliveries[0][0] - self.arrival

    @property
    def seconds(self) -> float:
        """Time from the arrival to the last token."""
        return self.deliveries[-1][0] - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Times between deliveries: the inter-token latency (ITL) of vLLM's benchmark."""
        return np.diff([moment for moment, _ in self.deliveries]).tolist()

    @property
    def per_token(self) -> float | None:
        """Time per token after the first delivery: the ITL of GuideLLM. ``None`` if all came at once."""
        tokens = sum(count for _, count in self.deliveries[1:])
        return sum(self.gaps) / tokens if tokens else None


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of all requests.

    Attributes:
        timelines: What each user saw, in the order of the requests.
        seconds: Time from the first arrival to the last token.
        rows_running: Mean number of rows that ran in a tick.
        stats: Counters of all rounds.
        programs: Number of programs compiled within the run, if that was counted.
    """

    timelines: list[Timeline]
    seconds: float
    rows_running: float
    stats: SpeculationStats
    programs: int = 0

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests over the time of the run."""
        return sum(len(timeline.output) for timeline in self.timelines) / self.seconds


def run_load(
    engine: Engine,
    requests: Sequence[Request],
    load: Load,
    *,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], Any] = time.sleep,
) -> Run:
    """Sends requests to an idle engine and notes when their tokens come.

    Args:
        engine: The engine; programs that it lacks are compiled within the run.
        requests: The requests, in the order of their arrival.
        load: How they arrive.
        seed: Seed of the arrivals.
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds, while the engine is idle.
    """
    arrivals = load.arrivals(len(requests), seed)
    timelines: dict[int, Timeline] = {}
    stats_before = engine.totals
    rows_running: list[int] = []
    num_ended = 0
    start = clock()
    while num_ended < len(requests):
        now = clock() - start
        for number in range(len(timelines), len(requests)):
            if arrivals is not None and arrivals[number] > now:
                break
            if load.concurrency is not None and number - num_ended >= load.concurrency:
                break
            request_id = engine.submit(requests[number])
            # A late arrival counts from the time at which it was due: the user has waited since
            # then.
            timelines[request_id] = Timeline(now if arrivals is None else float(arrivals[number]))
        if engine.idle:
            assert arrivals is not None
            sleep(max(0.0, arrivals[len(timelines)] - now))
            continue
        counts = collections.Counter()
        events = engine.tick()
        now = clock() - start
        for event in events:
            counts[event.request_id] += len(event.tokens)
            if event.output is not None:
                timelines[event.request_id].output = event.output
                num_ended += 1
        for request_id, count in counts.items():
            timelines[request_id].deliveries.append((now, count))
        rows_running.append(len(counts))
    first_arrival = min(timeline.arrival for timeline in timelines.values())
    last_token = max(timeline.deliveries[-1][0] for timeline in timelines.values())
    stats = jax.tree.map(np.subtract, engine.totals, stats_before)
    return Run(
        list(timelines.values()), last_token - first_arrival, float(np.mean(rows_running)), stats
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadRow:
    """One way of decoding under one load, over all repeats.

    Attributes:
        name: The way of decoding.
        load: The load in words.
        tokens_per_second: New tokens of all requests over the time of a run.
        ratio: The same over that of the first way of decoding in the same repeat.
        slots: Rows of the batch; ``None`` for a server that does not tell.
        rows_running: Mean number of rows that ran in a tick.
        mean_acceptance_length: ``τ``; ``None`` if nothing was drafted.
        first_token: Time to first token, the wait for a row included.
        gap: Time between deliveries of a request: the inter-token latency (ITL) of vLLM's
            benchmark.
        per_token: Time per token of a request after its first delivery: the ITL of GuideLLM.
        total: Time from the arrival of a request to its last token.
        same_texts: Number of texts equal to those of the first way of decoding.
        num_requests: Number of requests in each repeat.
        programs_after_warm_up: Programs compiled while times were taken; the times are fair only if
            it is 0.
    """

    name: str
    load: str
    tokens_per_second: Spread
    ratio: Spread
    slots: int | None
    rows_running: float
    mean_acceptance_length: float | None
    first_token: Quantiles
    gap: Quantiles
    per_token: Quantiles
    total: Quantiles
    same_texts: int
    num_requests: int
    programs_after_warm_up: int


def measure_load(
    engines: Mapping[str, Engine],
    requests: Sequence[Request],
    loads: Sequence[Load],
    *,
    repeats: int,
    on_progress: Callable[[str], None] = lambda step: None,
    on_result: Callable[[str], None] = lambda result: None,
) -> Iterator[LoadRow]:
    """Runs all engines in turn under each load, after a run that compiles.

    Args:
        engines: Idle engines by name. The others are compared with the first one.
        requests: The requests of each run.
        loads: The loads.
        repeats: Runs of each engine under each load. Arrivals differ by repeat and are the same for
            all engines.
        on_progress: Called with the current step before each run.
        on_result: Called with the result after each run.

    Yields:
        One row for each load and engine, when all runs of the load have ended.

    Raises:
        ValueError: There is no request, or one is refused by an engine.
    """
    if not requests or repeats < 1:
        raise ValueError("a load needs at least one request and one repeat")
    by_length = {padded_prompt(len(request.tokens)): request for request in requests}
    for name, engine in engines.items():
        on_progress(f"compiling {name}")
        # Every program of a prefill, and rows that end one after the other: a schedule then meets
        # every number of rows.
        engine.run([*requests[: engine.num_slots], *by_length.values()])
    for load in loads:
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        for repeat in range(repeats):
            for name, engine in engines.items():
                step = f"{load.name}, {name}, repeat {repeat + 1} of {repeats}"
                on_progress(step)
                with CompileClock() as clock:
                    run = run_load(engine, requests, load, seed=repeat)
                runs[name].append(dataclasses.replace(run, programs=clock.programs))
                on_result(f"{step}: {run.tokens_per_second:.1f} tokens/s")
        first_runs = next(iter(runs.values()))
        for name, runs_of_engine in runs.items():
            yield load_row(name, load, runs_of_engine, first_runs, slots=engines[name].num_slots)


def load_row(
    name: str,
    load: Load,
    runs: Sequence[Run],
    first_runs: Sequence[Run],
    *,
    slots: int | None = None,
) -> LoadRow:
    """Returns the figures of the runs of one way of decoding; ``first_runs`` are those that it is compared with."""
    timelines = [timeline for run in runs for timeline in run.timelines]
    speeds = np.array([run.tokens_per_second for run in runs])
    first_speeds = np.array([run.tokens_per_second for run in first_runs])
    stats = SpeculationStats.merge([run.stats for run in runs])
    per_token = [timeline.per_token for timeline in timelines]
    pairs = zip(runs[0].timelines, first_runs[0].timelines, strict=True)
    return LoadRow(
        name=name,
        load=load.name,
        tokens_per_second=Spread.of(speeds),
        ratio=Spread.of(speeds / first_speeds),
        slots=slots,
        rows_running=float(np.mean([run.rows_running for run in runs])),
        mean_acceptance_length=stats.mean_acceptance_length if int(stats.num_drafts) else None,
        first_token=Quantiles.of(timeline.first_token for timeline in timelines),
        gap=Quantiles.of(gap for timeline in timelines for gap in timeline.gaps),
        per_token=Quantiles.of(seconds for seconds in per_token if seconds is not None),
        total=Quantiles.of(timeline.seconds for timeline in timelines),
        same_texts=sum(ours.output == theirs.output for ours, theirs in pairs),
        num_requests=len(runs[0].timelines),
        programs_after_warm_up=sum(run.programs for run in runs),
    )
