"""What a benchmark found: rows of figures, each defined here, and how they follow from the runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.measure.contenders import Contender, DecoderContender, Run, Tokens
from eagle3_jax.measure.intervals import Interval, geometric_mean, ratio_of_sums
from eagle3_jax.measure.step_costs import StepCosts
from eagle3_jax.measure.timing import Latency, Spread
from eagle3_jax.stats import SpeculationStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """How much of what was drafted was accepted.

    Attributes:
        mean_acceptance_length: τ, tokens per round.
        draft_acceptance_rate: Accepted over drafted.
        per_position: Share of drafts accepted up to each depth.
        conditional: Share of those accepted at each depth that were accepted up to the one before.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    per_position: list[float]
    conditional: list[float]

    @classmethod
    def of(cls, stats: SpeculationStats) -> Acceptance:
        """From counters."""
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
        task: Its name.
        num_prompts: Of this task.
        ratio: Geometric mean over its prompts of the time per token of the baseline over that of the contender;
            ``None`` where no batch was of this task alone.
        acceptance: On its prompts; ``None`` where nothing was drafted or a batch's counters cannot be taken apart.
    """

    task: str
    num_prompts: int
    ratio: Interval | None
    acceptance: Acceptance | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """The measurements of one contender at one batch size.

    Attributes:
        name: Contender.
        dtype: Its precision.
        lossless: Whether its output is the target's own; where acceptance is simulated it is not.
        simulated_rates: Where acceptance is simulated, the shares of rounds, per depth, that it was made to have.
        decode_tokens_per_second: Without the prefill and the first token, which it gives.
        total_tokens_per_second: Prefill included.
        ratio: Decode speed over that of the baseline in the same repeat, by repeat.
        total_ratio: The same, prefill included.
        ratio_interval: Decode time of the baseline over that of the contender, all batches and repeats summed; 95 %
            bootstrap interval over the pairs.
        total_ratio_interval: The same, prefill included.
        prompt_ratio: Geometric mean over prompts (batches) of their ratios of time per output token, each the mean over
            its repeats; 95 % bootstrap interval over prompts, so that it speaks of other prompts too.
        acceptance: Of its drafts; ``None`` where nothing is drafted, or nothing is told.
        num_draft_steps: ``G``, 0 for plain decoding.
        step_seconds: What a round consists of; ``None`` for rivals.
        verify_cost: ``v``, verification over the baseline's step.
        draft_cost: ``c``, draft step over the baseline's step.
        predicted_ratio: ``τ / (v + G·c)``.
        first_token: Time to first token of a prompt in its batch (TTFT).
        per_token: Time per output token after the first, of each batch in each repeat (TPOT).
        chunk: Waits between the chunks of a stream, a round each, in runs of their own; ``None`` for rivals.
        bandwidth_share: Bytes per second that it reads at least, over what the device was measured to read at most;
            above 1 the measurement is wrong. ``None`` where its rounds are unknown or no ceiling was measured.
        compile_seconds: Of all programs, apart from every other number.
        same_texts: How many texts equal those of plain decoding in the same precision; ``None`` if there is none.
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
    """What should have been in a report and is not.

    Attributes:
        name: Contender.
        reason: In one line.
    """

    name: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """All rows at one batch size and what they were measured on.

    Attributes:
        rows: In the order of the contenders.
        baseline: Name of the plain contender with the highest decode speed.
        num_prompts: Prompts decoded in each repeat.
        max_new_tokens: Tokens per prompt.
        repeats: Interleaved repeats, warm-up not counted.
        batch_size: Prompts decoded at once.
        programs_after_warm_up: Programs that had to be compiled while times were taken; 0, or the times are not fair.
        bytes_per_second: What the device can read at most, as measured around the runs; ``None`` if it was not.
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
        """Rows that read memory faster than the device can: the clock, the tokens or the ceiling are wrong."""
        return [row for row in self.rows if row.bandwidth_share is not None and row.bandwidth_share > 1]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return dataclasses.asdict(self)


@dataclasses.dataclass
class Measured:
    """Raw measurements of one contender.

    Attributes:
        contender: Who was measured.
        compile_seconds: In its warm-up.
        runs: Of each repeat, of each batch.
        costs: Of each repeat.
        chunks: Of all repeats.
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
        """``G`` of a decoder of ours."""
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
        measured: Its measurements.
        plain: Those of the baseline.
        plain_output: Tokens of plain decoding in its precision, by batch.
        tasks: Of each prompt of each batch.
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
    """Of the first repeat; greedy decoding accepts the same in every other."""
    stats = [run.stats for run in measured.runs[0] if run.stats is not None]
    return Acceptance.of(SpeculationStats.merge(stats)) if measured.contender.drafts and stats else None


def _equal(ours: list[list[Tokens]], theirs: list[list[Tokens]]) -> int:
    """Texts that are the same in both, batch by batch and row by row."""
    pairs = [pair for batches in zip(ours, theirs, strict=True) for pair in zip(*batches, strict=True)]
    return sum(mine == other for mine, other in pairs)


def _quotients(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [mine / other for mine, other in zip(ours, theirs, strict=True)]


def _prompt_ratios(measured: Measured, plain: Measured) -> list[float]:
    """Of each batch: time per token of the baseline over that of the contender, geometric mean over the repeats."""

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
