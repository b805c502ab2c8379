"""Results of a benchmark: the definition of every figure, and its computation from the runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.bench.contenders import Contender, DecoderContender, Run, Tokens
from eagle3_jax.bench.step_costs import StepCosts
from eagle3_jax.bench.timing import Interval, Latency, Spread, geometric_mean, ratio_of_sums
from eagle3_jax.stats import SpeculationStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance of drafts.

    Attributes:
        mean_acceptance_length: τ, tokens per round.
        draft_acceptance_rate: Accepted over drafted.
        per_position: Share of drafts accepted up to each depth.
        conditional: Share of drafts accepted at each depth among those accepted up to the depth before.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    per_position: list[float]
    conditional: list[float]

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
    """One contender on the prompts of one task.

    Attributes:
        task: Name of the task.
        num_prompts: Number of its prompts.
        ratio: Geometric mean over its prompts of the time per token of the baseline over that of the contender;
            ``None`` if no batch was of this task alone.
        acceptance: Acceptance on its prompts; ``None`` without drafts, or if counters of a batch cannot be separated.
    """

    task: str
    num_prompts: int
    ratio: Interval | None
    acceptance: Acceptance | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The measurements of one contender at one batch size.

    Attributes:
        name: Name of the contender.
        dtype: Its precision.
        lossless: Whether its output equals the target's own; false if acceptance is simulated.
        simulated_rates: Simulated acceptance: share of rounds per depth.
        decode_tokens_per_second: Speed without the prefill and its token.
        total_tokens_per_second: Speed with the prefill.
        ratio: Decode speed over that of the baseline in the same repeat, by repeat.
        total_ratio: The same, prefill included.
        ratio_interval: Decode time of the baseline over that of the contender, all batches and repeats summed; 95 %
            bootstrap interval over the pairs.
        total_ratio_interval: The same, prefill included.
        prompt_ratio: Geometric mean over prompts (batches) of their ratios of time per output token, each the mean over
            its repeats; 95 % bootstrap interval over prompts, so that it speaks of other prompts too.
        acceptance: Acceptance of its drafts; ``None`` without drafts or counters.
        num_draft_steps: ``G``, 0 for plain decoding.
        step_seconds: Times of the parts of a round; ``None`` for other engines.
        verify_cost: ``v``, verification over the baseline's step.
        draft_cost: ``c``, draft step over the baseline's step.
        predicted_ratio: ``τ / (v + G·c)``.
        first_token: Time to first token in a batch (TTFT).
        per_token: Time per output token after the first, of each batch in each repeat (TPOT).
        chunk: Time between chunks of a stream, a round each, in separate runs; ``None`` for other engines.
        bandwidth_share: Least memory traffic over the highest bandwidth measured on the device; above 1 the
            measurement is wrong. ``None`` if its rounds are unknown or no bandwidth was measured.
        compile_seconds: Compilation time of all programs; no other figure includes it.
        same_texts: Number of texts equal to those of plain decoding in the same precision; ``None`` without it.
        repeatable: Whether every repeat wrote the same tokens.
        tasks: The same by task.
    """

    name: str
    dtype: str
    lossless: bool
    decode_tokens_per_second: Spread
    total_tokens_per_second: Spread
    ratio: Spread
    total_ratio: Spread
    ratio_interval: Interval
    total_ratio_interval: Interval
    prompt_ratio: Interval
    acceptance: Acceptance | None
    num_draft_steps: int
    step_seconds: StepCosts | None
    verify_cost: float | None
    draft_cost: float | None
    predicted_ratio: float | None
    first_token: Latency
    per_token: Latency
    chunk: Latency | None
    bandwidth_share: float | None
    compile_seconds: float
    same_texts: int | None
    repeatable: bool
    tasks: list[TaskRow]
    simulated_rates: list[float] | None = None


@dataclasses.dataclass(frozen=True)
class NotMeasured:
    """A contender that a report lacks, and the reason in one line."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All rows at one batch size, and the setting.

    Attributes:
        rows: In the order of the contenders.
        baseline: Name of the plain contender with the highest decode speed.
        num_prompts: Prompts decoded in each repeat.
        max_new_tokens: Tokens per prompt.
        repeats: Interleaved repeats, warm-up not counted.
        batch_size: Prompts decoded at once.
        programs_after_warm_up: Programs compiled while times were taken; the times are fair only if it is 0.
        bytes_per_second: Highest bandwidth of the device, measured before and after the runs; ``None`` if not measured.
        not_measured: Contenders that do not take batches of this size.
    """

    rows: list[Row]
    baseline: str
    num_prompts: int
    max_new_tokens: int
    repeats: int
    batch_size: int
    programs_after_warm_up: int
    bytes_per_second: float | None
    not_measured: list[NotMeasured]

    @property
    def too_fast(self) -> list[Row]:
        """Rows above the bandwidth of the device: the clock, the tokens or the bandwidth are wrong."""
        return [row for row in self.rows if row.bandwidth_share is not None and row.bandwidth_share > 1]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Measured:
    """Raw measurements of one contender.

    Attributes:
        contender: The contender.
        compile_seconds: Compilation time in its warm-up.
        runs: Runs of each repeat and batch.
        costs: Costs of each repeat.
        chunks: Times between chunks, of all repeats.
    """

    contender: Contender
    compile_seconds: float
    runs: list[list[Run]] = dataclasses.field(default_factory=list)
    costs: list[StepCosts] = dataclasses.field(default_factory=list)
    chunks: list[float] = dataclasses.field(default_factory=list)

    @property
    def decode_speeds(self) -> list[float]:
        """Tokens per second of each repeat, without prefill."""
        return [
            sum(len(row) - 1 for run in runs for row in run.tokens) / sum(run.decode_seconds for run in runs)
            for runs in self.runs
        ]

    @property
    def total_speeds(self) -> list[float]:
        """Tokens per second of each repeat, prefill included."""
        return [
            sum(len(row) for run in runs for row in run.tokens)
            / sum(run.prefill_seconds + run.decode_seconds for run in runs)
            for runs in self.runs
        ]

    @property
    def num_draft_steps(self) -> int:
        """``G``, for decoders of this library."""
        if not isinstance(self.contender, DecoderContender) or not self.contender.drafts:
            return 0
        return self.contender.decoder.loop.drafter.max_depth

    @property
    def step_seconds(self) -> StepCosts | None:
        """The median of each part over the repeats."""
        if not self.costs:
            return None
        return StepCosts(*np.median([dataclasses.astuple(cost) for cost in self.costs], axis=0).tolist())


def row_of(
    measured: Measured,
    plain: Measured,
    *,
    plain_output: list[list[Tokens]] | None,
    tasks: Sequence[Sequence[str]],
    bandwidth_share: float | None,
) -> Row:
    """All figures of a contender.

    Args:
        measured: Measurements of the contender.
        plain: Measurements of the baseline.
        plain_output: Tokens of plain decoding in the same precision, by batch.
        tasks: Task of each prompt of each batch.
        bandwidth_share: See :class:`Row`.
    """
    contender, runs, depth = measured.contender, measured.runs, measured.num_draft_steps
    step = len(plain.runs[0][0].tokens) / Spread.of(plain.decode_speeds).median
    acceptance = acceptance_of(measured)
    costs = measured.step_seconds
    verify, draft = (None, None) if costs is None else (costs.verify_seconds / step, costs.draft_seconds / step)
    tau = 1.0 if acceptance is None else acceptance.mean_acceptance_length
    written = [[run.tokens for run in passed] for passed in runs]
    return Row(
        name=contender.name,
        dtype=contender.dtype,
        lossless=contender.lossless,
        decode_tokens_per_second=Spread.of(measured.decode_speeds),
        total_tokens_per_second=Spread.of(measured.total_speeds),
        ratio=Spread.of(_quotients(measured.decode_speeds, plain.decode_speeds)),
        total_ratio=Spread.of(_quotients(measured.total_speeds, plain.total_speeds)),
        ratio_interval=ratio_of_sums(
            [run.seconds_per_token for passed in plain.runs for run in passed],
            [run.seconds_per_token for passed in runs for run in passed],
        ),
        total_ratio_interval=ratio_of_sums(
            [run.total_seconds_per_token for passed in plain.runs for run in passed],
            [run.total_seconds_per_token for passed in runs for run in passed],
        ),
        prompt_ratio=geometric_mean(_prompt_ratios(measured, plain)),
        acceptance=acceptance,
        num_draft_steps=depth,
        step_seconds=costs,
        verify_cost=verify,
        draft_cost=draft,
        predicted_ratio=None if verify is None or draft is None else tau / (verify + depth * draft),
        first_token=Latency.of(run.prefill_seconds for passed in runs for run in passed),
        per_token=Latency.of(run.seconds_per_token for passed in runs for run in passed),
        chunk=Latency.of(measured.chunks) if measured.chunks else None,
        bandwidth_share=bandwidth_share,
        compile_seconds=measured.compile_seconds,
        same_texts=None if plain_output is None or not contender.lossless else _equal(written[0], plain_output),
        repeatable=all(passed == written[0] for passed in written),
        tasks=_task_rows(measured, plain, tasks),
        simulated_rates=contender.simulated_rates,
    )


def acceptance_of(measured: Measured) -> Acceptance | None:
    """Acceptance in the first repeat; greedy decoding accepts the same in every repeat."""
    stats = [run.stats for run in measured.runs[0] if run.stats is not None]
    return Acceptance.of(SpeculationStats.merge(stats)) if measured.contender.drafts and stats else None


def _equal(ours: list[list[Tokens]], theirs: list[list[Tokens]]) -> int:
    """Number of equal texts, batch by batch and row by row."""
    pairs = [pair for batches in zip(ours, theirs, strict=True) for pair in zip(*batches, strict=True)]
    return sum(mine == other for mine, other in pairs)


def _quotients(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def _prompt_ratios(measured: Measured, plain: Measured) -> list[float]:
    """Per batch: time per token of the baseline over that of the contender, geometric mean over repeats."""

    def logs(one: Measured) -> np.ndarray:
        return np.log([[run.seconds_per_token for run in passed] for passed in one.runs])

    return np.exp((logs(plain) - logs(measured)).mean(axis=0)).tolist()


def _task_rows(measured: Measured, plain: Measured, tasks: Sequence[Sequence[str]]) -> list[TaskRow]:
    ratios = _prompt_ratios(measured, plain)
    rows = []
    for task in dict.fromkeys(name for batch in tasks for name in batch):
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
