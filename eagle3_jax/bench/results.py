"""Results of a benchmark: the definition of every figure, and its computation from the runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.bench.contenders import Contender, DecoderContender, Run, Tokens
from eagle3_jax.bench.roofline import least_bytes_per_second
from eagle3_jax.bench.step_costs import StepCosts
from eagle3_jax.bench.timing import Interval, Latency, Spread, geometric_mean, ratio_of_sums
from eagle3_jax.decode import LoadedTarget
from eagle3_jax.stats import SpeculationStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance of drafts."""

    mean_acceptance_length: float  #: τ, tokens per round.
    draft_acceptance_rate: float  #: Accepted over drafted.
    per_position: list[float]  #: Share of drafts accepted up to each depth.
    conditional: list[float]  #: Share of drafts accepted at each depth among those accepted up to the depth before.

    @classmethod
    def of(cls, stats: SpeculationStats) -> Acceptance:
        """The acceptance from counters."""
        return cls(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            per_position=stats.acceptance_per_position,
            conditional=stats.conditional_acceptance_rate,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskRow:
    """One contender on the prompts of one task."""

    task: str  #: Name of the task.
    num_prompts: int  #: Number of its prompts.
    #: Geometric mean over its prompts of the time per token of the baseline over that of the contender; ``None`` if no
    #: batch was of this task alone.
    ratio: Interval | None
    #: Acceptance on its prompts; ``None`` without drafts, or if counters of a batch cannot be separated.
    acceptance: Acceptance | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The measurements of one contender at one batch size."""

    name: str  #: Name of the contender.
    dtype: str  #: Its precision.
    lossless: bool  #: Whether its output equals the target's own; false if acceptance is simulated.
    decode_tokens_per_second: Spread  #: Speed without the prefill and its token.
    total_tokens_per_second: Spread  #: Speed with the prefill.
    ratio: Spread  #: Decode speed over that of the baseline in the same repeat, by repeat.
    total_ratio: Spread  #: The same, prefill included.
    #: Decode time of the baseline over that of the contender, all batches and repeats summed; 95 % bootstrap interval
    #: over the pairs.
    ratio_interval: Interval
    total_ratio_interval: Interval  #: The same, prefill included.
    #: Geometric mean over prompts (batches) of their ratios of time per output token, each the mean over its repeats;
    #: 95 % bootstrap interval over prompts, so that it speaks of other prompts too.
    prompt_ratio: Interval
    acceptance: Acceptance | None  #: Acceptance of its drafts; ``None`` without drafts or counters.
    num_draft_steps: int  #: ``G``, 0 for plain decoding.
    step_seconds: StepCosts | None  #: Times of the parts of a round; ``None`` for other engines.
    verify_cost: float | None  #: ``v``, verification over the baseline's step.
    draft_cost: float | None  #: ``c``, draft step over the baseline's step.
    predicted_ratio: float | None  #: ``τ / (v + G·c)``.
    first_token: Latency  #: Time to first token in a batch (TTFT).
    per_token: Latency  #: Time per output token after the first, of each batch in each repeat (TPOT).
    #: Time between chunks of a stream, a round each, in separate runs; ``None`` for other engines.
    chunk: Latency | None
    #: Least memory traffic over the highest bandwidth measured on the device; above 1 the measurement is wrong.
    #: ``None`` if its rounds are unknown or no bandwidth was measured.
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
    programs_after_warm_up: int  #: Programs compiled while times were taken; the times are fair only if it is 0.
    #: Highest bandwidth of the device, measured before and after the runs; ``None`` if not measured.
    bytes_per_second: float | None
    not_measured: list[NotMeasured]  #: Contenders that do not take batches of this size.

    @property
    def too_fast(self) -> list[Row]:
        """Rows above the bandwidth of the device: the clock, the tokens or the bandwidth are wrong."""
        return [row for row in self.rows if row.bandwidth_share is not None and row.bandwidth_share > 1]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Measured:
    """Raw measurements of one contender."""

    contender: Contender  #: The contender.
    compile_seconds: float  #: Compilation time in its warm-up.
    runs: list[list[Run]] = dataclasses.field(default_factory=list)  #: Runs of each repeat and batch.
    costs: list[StepCosts] = dataclasses.field(default_factory=list)  #: Costs of each repeat.
    chunks: list[float] = dataclasses.field(default_factory=list)  #: Times between chunks, of all repeats.

    def speeds(self, *, total: bool = False) -> np.ndarray:
        """Tokens per second of each repeat, without the prefill and its token or with both."""
        tokens = [sum(len(row) - (not total) for run in runs for row in run.tokens) for runs in self.runs]
        seconds = [sum(run.decode_seconds + total * run.prefill_seconds for run in runs) for runs in self.runs]
        return np.divide(tokens, seconds)

    def times(self, *, total: bool = False) -> np.ndarray:
        """Seconds per token of a row, for each repeat and batch, without the prefill and its token or with both."""
        return np.array(
            [[run.total_seconds_per_token if total else run.seconds_per_token for run in runs] for runs in self.runs]
        )


def row_of(
    measured: Measured,
    plain: Measured,
    *,
    plain_output: list[list[Tokens]] | None,
    tasks: Sequence[Sequence[str]],
    most_bytes_per_second: float,
    target: LoadedTarget | None,
) -> Row:
    """All figures of a contender.

    Args:
        measured: Measurements of the contender.
        plain: Measurements of the baseline.
        plain_output: Tokens of plain decoding in the same precision, by batch.
        tasks: Task of each prompt of each batch.
        most_bytes_per_second: Highest bandwidth of the device; 0 if it was not measured.
        target: The target that a step reads; ``None`` if no contender is of this library.
    """
    contender = measured.contender
    runs = measured.runs
    speed = Spread.of(measured.speeds())
    times = measured.times()
    # Greedy decoding accepts the same in every repeat.
    stats = [run.stats for run in runs[0] if run.stats is not None]
    acceptance = Acceptance.of(SpeculationStats.merge(stats)) if contender.drafts and stats else None
    tau = 1.0 if acceptance is None else acceptance.mean_acceptance_length
    depth = 0
    if isinstance(contender, DecoderContender) and contender.drafts:
        depth = contender.decoder.loop.drafter.max_depth
    costs = verify = draft = None
    if measured.costs:
        costs = StepCosts(*np.median([dataclasses.astuple(cost) for cost in measured.costs], axis=0).tolist())
        step = len(plain.runs[0][0].tokens) / Spread.of(plain.speeds()).median
        verify = costs.verify_seconds / step
        draft = costs.draft_seconds / step
    share = None
    if most_bytes_per_second and target is not None and not (contender.drafts and acceptance is None):
        rows = len(runs[0][0].tokens)
        least = least_bytes_per_second(target, tokens_per_second=speed.median, tokens_per_round=tau, rows=rows)
        share = least / most_bytes_per_second
    written = [[run.tokens for run in passed] for passed in runs]
    same_texts = None
    if plain_output is not None and contender.lossless:
        pairs = zip(itertools.chain(*written[0]), itertools.chain(*plain_output), strict=True)
        same_texts = sum(ours == theirs for ours, theirs in pairs)
    prompt_ratios = np.exp(np.log(plain.times() / times).mean(axis=0)).tolist()
    return Row(
        name=contender.name,
        dtype=contender.dtype,
        lossless=contender.lossless,
        decode_tokens_per_second=speed,
        total_tokens_per_second=Spread.of(measured.speeds(total=True)),
        ratio=Spread.of(measured.speeds() / plain.speeds()),
        total_ratio=Spread.of(measured.speeds(total=True) / plain.speeds(total=True)),
        ratio_interval=ratio_of_sums(plain.times().ravel(), times.ravel()),
        total_ratio_interval=ratio_of_sums(plain.times(total=True).ravel(), measured.times(total=True).ravel()),
        prompt_ratio=geometric_mean(prompt_ratios),
        acceptance=acceptance,
        num_draft_steps=depth,
        step_seconds=costs,
        verify_cost=verify,
        draft_cost=draft,
        predicted_ratio=None if verify is None or draft is None else tau / (verify + depth * draft),
        first_token=Latency.of(run.prefill_seconds for passed in runs for run in passed),
        per_token=Latency.of(times.ravel()),
        chunk=Latency.of(measured.chunks) if measured.chunks else None,
        bandwidth_share=share,
        compile_seconds=measured.compile_seconds,
        same_texts=same_texts,
        repeatable=all(passed == written[0] for passed in written),
        tasks=_task_rows(measured, prompt_ratios, tasks),
        simulated_rates=contender.simulated_rates,
    )


def _task_rows(measured: Measured, ratios: list[float], tasks: Sequence[Sequence[str]]) -> list[TaskRow]:
    """The rows by task, from the ratio and the tasks of each batch."""
    rows = []
    for task in dict.fromkeys(itertools.chain(*tasks)):
        where = [[row for row, name in enumerate(batch) if name == task] for batch in tasks]
        alone = [ratio for ratio, batch in zip(ratios, tasks, strict=True) if set(batch) == {task}]
        stats = [run.stats_of(mine) for run, mine in zip(measured.runs[0], where, strict=True) if mine]
        known = [one for one in stats if one is not None]
        told = measured.contender.drafts and len(known) == len(stats)
        rows.append(
            TaskRow(
                task=task,
                num_prompts=sum(map(len, where)),
                ratio=geometric_mean(alone) if alone else None,
                acceptance=Acceptance.of(SpeculationStats.merge(known)) if told else None,
            )
        )
    return rows
