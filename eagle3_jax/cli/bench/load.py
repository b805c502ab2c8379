"""``eagle3 bench --rate`` and ``--concurrency``: speed and waiting times of requests that come and go."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import parse_numbers, parse_schedule
from eagle3_jax.cli._printing import Page, table_of
from eagle3_jax.cli._progress import Activity, counted
from eagle3_jax.measure.tables import Table

if TYPE_CHECKING:
    from eagle3_jax.bench.contenders import DecoderContender
    from eagle3_jax.bench.load import Load, LoadRow
    from eagle3_jax.cli.bench.field import Models
    from eagle3_jax.engine.engine import Engine
    from eagle3_jax.prompts.benchmark import Prompt

_SLOTS = 8  # rows of the batch where nothing else gives their number
_SPEED = {
    "method": "name",
    "tokens/s": "tokens_per_second",
    "ratio": "ratio",
    "rows": "slots",
    "running": "rows_running",
    "τ": "mean_acceptance_length",
    "same": "same_texts",
}
_TIMES = {
    "method": "name",
    "TTFT p50 p90 p99": "first_token",
    "gap p50 p90 p99": "gap",
    "TPOT p50 p90 p99": "per_token",
    "total p50 p90 p99": "total",
}
NOTES = """\
tokens/s: new tokens of all requests over the time of a run, with quartiles; ratio: over that of the first method in
the same repeat. rows: of the batch; running: mean number of them that ran. τ: tokens per round. same: texts equal to
the first method's. TTFT: from the arrival to the first token, the wait for a row included. gap: between deliveries of
a request, one a round (inter-token latency in vLLM's benchmark). TPOT: time per token after the first delivery
(inter-token latency in GuideLLM). total: from the arrival to the last token. Intervals of all quantiles are in --json.
Stop tokens are ignored."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Requests that come and go, in place of batches that start and end together."""

    concurrency: Annotated[
        str | None,
        typer.Option(help="Keep this many requests running or waiting: '4', or several: '1,2,4'."),
    ] = None
    rate: Annotated[
        str | None,
        typer.Option(
            help="Let requests arrive at random, this many a second: '2', or several: '0.5,2'."
        ),
    ] = None
    arrivals: Annotated[
        Path | None,
        typer.Option(help="Let requests arrive at recorded times: a JSON list of seconds."),
    ] = None
    slots: Annotated[
        int | None,
        typer.Option(
            help=(
                "Rows of the batch under a load. Default: --concurrency, or 8 with other arrivals."
            ),
            min=1,
            max=4096,
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            help=(
                "Under a load, also measure the draft length by number of running rows:"
                " '[[1,4,5],[5,16,3]]'."
            )
        ),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            help="Under a load, also measure prompts that run in parts of this many tokens.", min=1
        ),
    ] = None

    @property
    def is_load(self) -> bool:
        """Whether requests come and go."""
        return (self.concurrency, self.rate, self.arrivals) != (None, None, None)

    def check(self) -> None:
        """Refuses options of a load without one."""
        options = {
            "--slots": self.slots,
            "--schedule": self.schedule,
            "--prefill-chunk": self.prefill_chunk,
        }
        for option, value in options.items():
            if value is not None and not self.is_load:
                raise Misuse(
                    f"{option} {value} is measured under a load; add --concurrency or --rate"
                )

    def loads(self, count: int) -> list[Load]:
        """Returns the loads in the order of the options.

        Args:
            count: Number of requests.
        """
        from eagle3_jax.bench.load import Load

        loads = []
        if self.concurrency is not None:
            loads += [
                Load(concurrency=users)
                for users in parse_numbers(self.concurrency, "--concurrency")
            ]
        if self.rate is not None:
            loads += [Load(rate=rate) for rate in _rates(self.rate)]
        if self.arrivals is not None:
            loads.append(Load(times=_times(self.arrivals, count)))
        return loads


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < 1e6 for rate in rates):
        raise Misuse(f"--rate {text!r}: expected positive numbers, such as '2' or '0.5,2'")
    return rates


def _times(path: Path, count: int) -> tuple[float, ...]:
    form = "expected a JSON list of seconds that do not fall, such as [0, 0.4, 1.7]"
    try:
        times = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Misuse(f"--arrivals {path}: {error}; {form}") from None
    are_numbers = isinstance(times, list) and all(
        type(moment) in (int, float) and moment >= 0 for moment in times
    )
    if not are_numbers or times != sorted(times):
        raise Misuse(f"--arrivals {path} holds something else; {form}")
    if len(times) < count:
        raise Misuse(
            f"--arrivals {path} has {len(times)} times for {count} prompts; lower --max-prompts"
        )
    return tuple(map(float, times[:count]))


def engines_of(
    contenders: Sequence[DecoderContender],
    models: Models,
    options: LoadOptions,
    *,
    slots: int,
    longest: int,
) -> dict[str, Engine]:
    """Returns an engine for each contender, and more for the schedule and for prompts in parts.

    Args:
        contenders: Decoders.
        models: The target and its heads.
        options: The schedule and the size of parts.
        slots: Rows of the batch.
        longest: Tokens of the longest prompt with its answer.
    """
    from eagle3_jax import SpeculativeDecoder
    from eagle3_jax.engine.engine import Engine
    from eagle3_jax.types import SamplingMode

    decoders = {contender.name: contender.decoder for contender in contenders}
    if options.schedule is not None:
        schedule = parse_schedule(options.schedule)
        heads = [head for head in models.drafters.values() if head is not None]
        if not heads:
            raise Misuse(
                "--schedule shortens the chains of a head, and there is none; choose another"
                " --drafter"
            )
        decoders["schedule"] = SpeculativeDecoder(
            models.target, heads[0], schedule=schedule, stop_tokens=()
        )
    chunks: dict[str, int | None] = {"": None}
    if options.prefill_chunk is not None:
        chunks[f", chunks of {options.prefill_chunk}"] = options.prefill_chunk
    engines = {}
    for name, decoder in decoders.items():
        capacity = longest + decoder.loop.drafter.num_nodes
        for suffix, chunk in chunks.items():
            engines[name + suffix] = Engine(
                decoder,
                slots=slots,
                capacity=capacity,
                sampling_mode=SamplingMode.GREEDY,
                chunk=chunk,
            )
    return engines


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadFindings:
    """The result of the command under a load."""

    device: str  #: Short name of the hardware.
    about: dict[str, Any]  #: Environment of the run.
    rows: Sequence[LoadRow]  #: One for each load and method.
    max_new_tokens: int  #: New tokens of each request.
    repeats: int  #: Interleaved repeats.
    interruption: str  #: The part that was measured, in words, if Ctrl-C ended the measurement.

    @property
    def failures(self) -> list[str]:
        """Reasons why the measurements are invalid; empty if they are valid."""
        return [
            f"{row.load}, {row.name}: {row.programs_after_warm_up} programs were compiled while"
            " times were taken"
            for row in self.rows
            if row.programs_after_warm_up
        ]

    def page(self) -> Page:
        """Returns the numbers, and two tables for each load."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        values = dataclasses.asdict(self) | {"rows": rows, "failures": self.failures}
        tables: list[Table] = []
        for load in dict.fromkeys(row["load"] for row in rows):
            of_load = [row for row in rows if row["load"] == load]
            tables += [
                table_of(f"Speed, {load}", of_load, _SPEED),
                table_of(f"Times in ms, {load}", of_load, _TIMES),
            ]
        size = (
            f"{self.rows[0].num_requests} requests x {self.max_new_tokens} new tokens,"
            f" {self.repeats} repeats"
        )
        return Page(values, [f"{self.device}; greedy, {size}", *tables, "\n" + NOTES])


def measure_loads(
    contenders: Sequence[DecoderContender],
    models: Models,
    options: LoadOptions,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: int,
    repeats: int,
    about: dict[str, Any],
    now: Activity,
) -> LoadFindings:
    """Measures all contenders under all loads, and shows the progress."""
    from eagle3_jax.bench.load import measure_load
    from eagle3_jax.measure.environment import hardware
    from eagle3_jax.prompts.request import Request

    requests = [Request(prompt.tokens, max_new_tokens, ignore_stop=True) for prompt in prompts]
    longest = max(len(prompt.tokens) for prompt in prompts) + max_new_tokens
    by_slots: dict[int, list[Load]] = {}
    for load in options.loads(len(prompts)):
        by_slots.setdefault(options.slots or load.concurrency or _SLOTS, []).append(load)
    rows: list[LoadRow] = []
    interruption = ""
    for slots, loads in by_slots.items():
        engines = engines_of(contenders, models, options, slots=slots, longest=longest)
        steps = counted(now, len(engines) * (1 + len(loads) * repeats))
        try:
            rows.extend(
                measure_load(
                    engines,
                    requests,
                    loads,
                    repeats=repeats,
                    on_progress=steps.say,
                    on_result=steps.tell,
                )
            )
        except KeyboardInterrupt:
            if not rows:
                raise
            interruption = ", ".join(dict.fromkeys(row.load for row in rows))
            break
    return LoadFindings(
        device=hardware(),
        about=about,
        rows=rows,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        interruption=interruption,
    )
