"""Results of a benchmark: the definition of every figure, and how it is computed from the runs."""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eagle3_jax.bench.contenders import Contender, Run, Tokens
from eagle3_jax.bench.roofline import least_bytes_per_second
from eagle3_jax.bench.step_costs import StepCosts
from eagle3_jax.decode import LoadedTarget
from eagle3_jax.measure.timing import Interval, Latency, Spread, geometric_mean, ratio_of_sums
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.theory.speedup import round_cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance of drafts."""

    mean_acceptance_length: float  #: τ, tokens per round.
    draft_acceptance_rate: float  #: Accepted over drafted.
    per_position: list[float]  #: Share of drafts accepted up to each depth.
    #: Share of drafts accepted at each depth among those accepted up to the depth before.
    conditional: list[float]

    @classmethod
    def of(cls, stats: Iterable[SpeculationStats]) -> Acceptance:
        """Computes acceptance from the sums of counters."""
        total = SpeculationStats.merge(stats)
        return cls(
            mean_acceptance_length=total.mean_acceptance_length,
            draft_acceptance_rate=total.draft_acceptance_rate,
            per_position=total.acceptance_per_position,
            conditional=total.conditional_acceptance_rate,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One contender on the prompts of one task."""

    task: str  #: Name of the task.
    num_prompts: int  #: Number of its prompts.
    #: Geometric mean over its prompts of the time per token of the baseline over that of the
    #: contender; ``None`` if every batch has prompts of other tasks too.
    ratio: Interval | None
    #: Acceptance on its prompts; ``None`` without drafts, or if counters of a batch cannot be
    #: separated.
    acceptance: Acceptance | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The measurements of one contender at one batch size."""

    name: str  #: Name of the contender.
    dtype: str  #: Its precision.
    #: Whether its output follows the target's distribution; false if acceptance is simulated.
    lossless: bool
    decode_tokens_per_second: Spread  #: Speed without the prefill and its token.
    total_tokens_per_second: Spread  #: Speed with the prefill.
    ratio: Spread  #: Decode speed over that of the baseline in the same repeat, by repeat.
    total_ratio: Spread  #: The same, prefill included.
    #: Decode time of the baseline over that of the contender, all batches and repeats summed; 95 %
    #: bootstrap interval over the pairs.
    ratio_interval: Interval
    total_ratio_interval: Interval  #: The same, prefill included.
    #: Geometric mean over prompts (batches) of their ratios of time per output token, each the mean
    #: over its repeats. The 95 % bootstrap interval is over prompts, so that it holds for other
    #: prompts too.
    prompt_ratio: Interval
    acceptance: Acceptance | None  #: Acceptance of its drafts; ``None`` without drafts or counters.
    num_draft_steps: int  #: ``G``, 0 for plain decoding.
    step_seconds: StepCosts | None  #: Times of the parts of a round; ``None`` for other engines.
    verify_cost: float | None  #: ``v``, verification over the baseline's step.
    draft_cost: float | None  #: ``c``, draft step over the baseline's step.
    predicted_ratio: float | None  #: ``τ / (v + G·c)``.
    first_token: Latency  #: Time to first token in a batch (TTFT).
    #: Time per output token after the first, of each batch in each repeat (TPOT).
    per_token: Latency
    #: Time between chunks of a stream, a round each, in separate runs; ``None`` for other engines.
    chunk: Latency | None
    #: Least memory traffic over the highest bandwidth measured on the device; above 1 the
    #: measurement is wrong. ``None`` if its rounds are unknown or no bandwidth was measured.
    bandwidth_share: float | None
    compile_seconds: float  #: Compilation time of all programs; no other figure includes it.
    #: Number of texts equal to those of plain decoding in the same precision; ``None`` without it.
    same_texts: int | None
    repeatable: bool  #: Whether every repeat wrote the same tokens.
    tasks: list[TaskRow]  #: The same by task.
    simulated_rates: list[float] | None = None  #: Simulated acceptance: share of rounds per depth.


@dataclasses.dataclass(frozen=True)
class NotMeasured:
    """A contender that a report lacks, and the reason in one line."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All rows at one batch size, and the setting."""

    rows: list[Row]  #: In the order of the contenders.
    baseline: str  #: Name of the plain contender with the highest decode speed.
    num_prompts: int  #: Prompts decoded in each repeat.
    max_new_tokens: int  #: Tokens per prompt.
    repeats: int  #: Interleaved repeats, warm-up not counted.
    batch_size: int  #: Prompts decoded at once.
    #: Programs compiled while times were taken; the times are fair only if it is 0.
    programs_after_warm_up: int
    #: Highest bandwidth of the device, measured before and after the runs; ``None`` if not
    #: measured.
    bytes_per_second: float | None
    not_measured: list[NotMeasured]  #: Contenders that do not take batches of this size.

    @property
    def too_fast(self) -> list[Row]:
        """Rows above the bandwidth of the device: clock, tokens or bandwidth are wrong."""
        return [
            row for row in self.rows if row.bandwidth_share is not None and row.bandwidth_share > 1
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Measured:
    """Raw measurements of one contender."""

    contender: Contender  #: The contender.
    compile_seconds: float  #: Compilation time in its warm-up.
    #: Runs of each repeat and batch.
    runs: list[list[Run]] = dataclasses.field(default_factory=list)
    #: Costs of each repeat.
    costs: list[StepCosts] = dataclasses.field(default_factory=list)
    #: Times between chunks, of all repeats.
    chunks: list[float] = dataclasses.field(default_factory=list)

    def seconds(self, *, total: bool = False) -> np.ndarray:
        """Returns ``[repeat batch]`` seconds, without the prefill or, in ``total``, with it."""
        return np.array(
            [
                [run.decode_seconds + total * run.prefill_seconds for run in runs]
                for runs in self.runs
            ]
        )

    def speeds(self, *, total: bool = False) -> np.ndarray:
        """Returns the tokens per second of each repeat, in ``total`` with the prefill."""
        tokens = [
            sum(len(row) - (not total) for run in runs for row in run.tokens) for runs in self.runs
        ]
        return tokens / self.seconds(total=total).sum(axis=1)

    def times(self, *, total: bool = False) -> np.ndarray:
        """Returns ``[repeat batch]`` seconds per token of a row, as :meth:`speeds` counts."""
        lengths = [[len(run.tokens[0]) - (not total) for run in runs] for runs in self.runs]
        return self.seconds(total=total) / lengths

    def texts(self, repeat: int = 0) -> list[Tokens]:
        """Returns the tokens of all prompts in a repeat."""
        return [text for run in self.runs[repeat] for text in run.tokens]

    def acceptance(self) -> Acceptance | None:
        """Returns acceptance in the first repeat; every repeat accepts the same."""
        stats = [run.stats for run in self.runs[0] if run.stats is not None]
        return Acceptance.of(stats) if self.contender.drafts and stats else None

    def step_costs(self) -> StepCosts | None:
        """Returns the medians over the repeats."""
        seconds = [dataclasses.astuple(cost) for cost in self.costs]
        return StepCosts(*np.median(seconds, axis=0).tolist()) if seconds else None


def row_of(
    measured: Measured,
    plain: Measured,
    *,
    same_precision: Measured | None,
    tasks: Sequence[Sequence[str]],
    most_bytes_per_second: float,
    target: LoadedTarget | None,
) -> Row:
    """Computes all figures of a contender.

    Args:
        measured: Measurements of the contender.
        plain: Measurements of the baseline.
        same_precision: Measurements of plain decoding in the precision of the contender.
        tasks: Task of each prompt of each batch.
        most_bytes_per_second: Highest bandwidth of the device; 0 if it was not measured.
        target: The target that a step reads; ``None`` if no contender is of this library.
    """
    contender = measured.contender
    times = measured.times()
    speeds = measured.speeds()
    total_speeds = measured.speeds(total=True)
    acceptance = measured.acceptance()
    tau = acceptance.mean_acceptance_length if acceptance else 1.0
    rows = len(plain.runs[0][0].tokens)

    # S = τ / (v + G·c), with the costs in steps of the baseline.
    costs = measured.step_costs()
    verify = draft = predicted = None
    if costs is not None:
        step = rows / Spread.of(plain.speeds()).median
        verify = costs.verify_seconds / step
        draft = costs.draft_seconds / step
        predicted = tau / round_cost(
            contender.num_draft_steps, verify_cost=verify, draft_cost=draft
        )

    share = None
    rounds_are_known = acceptance is not None or not contender.drafts
    if most_bytes_per_second and target is not None and rounds_are_known:
        speed = Spread.of(speeds).median
        traffic = least_bytes_per_second(
            target, tokens_per_second=speed, tokens_per_round=tau, rows=rows
        )
        share = traffic / most_bytes_per_second

    texts = measured.texts()
    same_texts = None
    if same_precision is not None and contender.lossless:
        same_texts = sum(map(operator.eq, texts, same_precision.texts()))

    # The geometric mean over the repeats, of each batch.
    prompt_ratios = np.exp(np.log(plain.times() / times).mean(axis=0)).tolist()
    return Row(
        name=contender.name,
        dtype=contender.dtype,
        lossless=contender.lossless,
        decode_tokens_per_second=Spread.of(speeds),
        total_tokens_per_second=Spread.of(total_speeds),
        ratio=Spread.of(speeds / plain.speeds()),
        total_ratio=Spread.of(total_speeds / plain.speeds(total=True)),
        ratio_interval=ratio_of_sums(plain.times().ravel(), times.ravel()),
        total_ratio_interval=ratio_of_sums(
            plain.times(total=True).ravel(), measured.times(total=True).ravel()
        ),
        prompt_ratio=geometric_mean(prompt_ratios),
        acceptance=acceptance,
        num_draft_steps=contender.num_draft_steps,
        step_seconds=costs,
        verify_cost=verify,
        draft_cost=draft,
        predicted_ratio=predicted,
        first_token=Latency.of(run.prefill_seconds for repeat in measured.runs for run in repeat),
        per_token=Latency.of(times.ravel()),
        chunk=Latency.of(measured.chunks) if measured.chunks else None,
        bandwidth_share=share,
        compile_seconds=measured.compile_seconds,
        same_texts=same_texts,
        repeatable=all(measured.texts(repeat) == texts for repeat in range(len(measured.runs))),
        tasks=_task_rows(measured, prompt_ratios, tasks),
        simulated_rates=contender.simulated_rates,
    )


def _task_rows(
    measured: Measured, ratios: list[float], tasks: Sequence[Sequence[str]]
) -> list[TaskRow]:
    """Returns the rows by task, from the ratio and the tasks of each batch."""
    rows = []
    for task in dict.fromkeys(itertools.chain(*tasks)):
        rows_of_task = [[row for row, name in enumerate(batch) if name == task] for batch in tasks]

        # Only batches of this task alone have a time of the task.
        pure = [ratio for ratio, batch in zip(ratios, tasks, strict=True) if set(batch) == {task}]
        runs = zip(measured.runs[0], rows_of_task, strict=True)
        stats = [run.stats_of(batch_rows) for run, batch_rows in runs if batch_rows]
        is_known = measured.contender.drafts and None not in stats

        rows.append(
            TaskRow(
                task=task,
                num_prompts=sum(map(len, rows_of_task)),
                ratio=geometric_mean(pure) if pure else None,
                acceptance=Acceptance.of(stats) if is_known else None,  # type: ignore[arg-type]
            )
        )
    return rows
