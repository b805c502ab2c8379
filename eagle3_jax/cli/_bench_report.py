"""The report of ``eagle3 bench``: tables for the terminal, and files in JSON and Markdown."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.bench.tables import Table, to_markdown, write_text
from eagle3_jax.cli._errors import Misuse

if TYPE_CHECKING:
    from eagle3_jax.bench.results import NotMeasured, Report
    from eagle3_jax.bench.timing import Interval, Latency

_WIDTH = 124
_TIMES = ("p50", "p90", "p99")
_WORDS = {"method", "dtype", "task", "reason", "per position", "conditional"}  # columns of text
# Columns in the order in which a narrow terminal leaves them out; `--output` writes all of them.
_LEFT_OUT = (
    "compile", "total ratio", "total", "roofline", "95 %", "conditional", "commit ms", "verify ms", "draft ms",
    "TTFT p90", "TPOT p90", "chunk p90", "TTFT p99", "TPOT p99", "chunk p99", "dtype", "draft rate", "prompts",
    "per position", "same",
)  # fmt: skip

NOTES = """\
tokens/s: new tokens after the first over the time of the decode loop; total: all new tokens over all time, prefill too.
ratio: tokens/s over that of the baseline in the same repeat: median (quartiles) of the repeats, which take turns.
95 %: bootstrap interval of the ratio of all times, over pairs of the same prompts in the same repeat. Ratios by task:
geometric mean over prompts of their ratios of time per token, with its interval over prompts.
τ: tokens per round, 1 + accepted / drafts. v: verification over the baseline's step. c: one draft step over it.
S: the ratio predicted by τ / (v + G·c), G draft steps a round; v and c are measured apart from the runs.
roofline: least memory traffic over the highest bandwidth measured on this device; above 100 % the run fails.
same: texts with the tokens of plain decoding in that row's precision (blocks may round
approximately tied logits differently).
Warm-up and compilation are excluded; compile is their time for all programs of a row. Stop tokens are ignored.
TTFT: time to first token. TPOT: time per token after it. chunk: waits between chunks of a stream, a round each, driven
by the host in runs of their own. commit: the part of verification that writes the cache.
transformers decodes greedily, in eager PyTorch with its own cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """A whole run."""

    device: str  #: Short name of the hardware.
    about: dict[str, Any]  #: Environment of the run; see :func:`eagle3_jax.bench.environment.environment`.
    reports: Sequence[Report]  #: One for each batch size.
    missing: Sequence[NotMeasured]  #: Contenders that were not measured at all.

    @property
    def failures(self) -> list[str]:
        """Reasons why the measurements are invalid; empty if they are valid."""
        found = [
            f"batch {report.batch_size}: {row.name} reads memory at {row.bandwidth_share:.0%} of the "
            f"{(report.bytes_per_second or 0) / 1e9:.1f} GB/s that this device was measured to read at most; the "
            "clock, the tokens or the ceiling are wrong"
            for report in self.reports
            for row in report.too_fast
        ]
        found += [
            f"batch {report.batch_size}: {report.programs_after_warm_up} programs were compiled while times were taken"
            for report in self.reports
            if report.programs_after_warm_up
        ]
        return found

    @property
    def tables(self) -> list[Table]:
        """Every table that has rows."""
        found = [table for report in self.reports for table in _tables(report)]
        everyone = [*self.missing, *(one for report in self.reports for one in report.not_measured)]
        found.append(Table("Not measured", ["method", "reason"], [[one.name, one.reason] for one in everyone]))
        return [table for table in found if table.rows]

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "hardware": self.device,
            "about": self.about,
            "failures": self.failures,
            "not_measured": [dataclasses.asdict(one) for one in self.missing],
            "reports": [report.to_json() for report in self.reports],
        }


def check_directory(path: Path | None) -> None:
    """Refuses an output directory that holds something or could not be written, before any work is done."""
    if path is None:
        return
    if path.is_dir() and any(path.iterdir()):
        raise Misuse(f"--output {path} is not empty; give a new directory, so that nothing is overwritten")
    there = path.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir():
        raise Misuse(f"--output {path}: {there} is a file; give a directory")
    if not os.access(there, os.W_OK):
        raise Misuse(f"--output {path} cannot be written: no permission in {there}")


def write(findings: Findings, directory: Path) -> None:
    """Writes ``bench.json`` and ``bench.md``."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "bench.json", json.dumps(findings.to_json(), indent=1) + "\n")
    write_text(directory / "bench.md", to_text(findings))


def to_text(findings: Findings) -> str:
    """The report in Markdown."""
    parts = ["# eagle3 bench", *(headline(report, device=findings.device) for report in findings.reports)]
    parts += [f"**FAILED: {line}**" for line in findings.failures]
    for table in findings.tables:
        parts += [f"## {table.title}", to_markdown(table.columns, table.rows)]
    return "\n\n".join([*parts, *NOTES.splitlines()]) + "\n"


def show(findings: Findings) -> None:
    """Prints the tables in the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Drawing

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    for report in findings.reports:
        console.print(headline(report, device=findings.device), markup=False)
    for table in findings.tables:
        console.print(f"\n{table.title}", style="bold", markup=False)
        shown = fitting(table, console.width)
        drawing = Drawing(box=None, pad_edge=False, padding=(0, 1))
        for name in shown.columns:
            drawing.add_column(name, justify="left" if name in _WORDS else "right", overflow="fold")
        for row in shown.rows:
            drawing.add_row(*(escape(str(cell)) for cell in row))
        console.print(drawing)
    console.print("\n" + NOTES, markup=False)


def fitting(table: Table, width: int) -> Table:
    """The table without the least important columns that do not fit into ``width`` characters."""
    sizes = {
        name: 2 + max(len(str(cell)) for cell in (name, *cells))
        for name, *cells in zip(table.columns, *table.rows, strict=True)
    }
    for name in _LEFT_OUT:
        if sum(sizes.values()) > width:
            sizes.pop(name, None)
    rows = [[cell for name, cell in zip(table.columns, row, strict=True) if name in sizes] for row in table.rows]
    return Table(table.title, list(sizes), rows)


def headline(report: Report, *, device: str) -> str:
    """The measurement and the hardware in one line."""
    what = f"{report.num_prompts} prompts x {report.max_new_tokens} new tokens, {report.repeats} repeats"
    rates = max((row.simulated_rates for row in report.rows if row.simulated_rates), key=len, default=None)
    dice = "" if rates is None else f"; SIMULATED acceptance, share of rounds by depth: {_rates(rates)}"
    return f"{device}; batch {report.batch_size}, greedy, {what}; baseline: {report.baseline}{dice}"


def _tables(report: Report) -> list[Table]:
    """Speeds, latencies, parts of a round, and acceptance by task."""
    from eagle3_jax.bench.results import TaskRow

    at = f"at batch {report.batch_size}"
    baseline = report.baseline
    speed = []
    rounds = []
    tasks = []
    for row in report.rows:
        ours = row.name != baseline
        same = "" if row.same_texts is None else f"{row.same_texts}/{report.num_prompts}"
        speed.append(
            {
                "method": row.name,
                "dtype": row.dtype,
                "tokens/s": f"{row.decode_tokens_per_second.median:.1f}",
                "ratio": f"{row.ratio.median:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})" if ours else "baseline",
                "95 %": _interval(row.ratio_interval) if ours else "",
                "τ": "" if row.acceptance is None else f"{row.acceptance.mean_acceptance_length:.2f}",
                "total": f"{row.total_tokens_per_second.median:.1f}",
                "total ratio": f"{row.total_ratio.median:.2f}" if ours else "",
                "roofline": "" if row.bandwidth_share is None else f"{row.bandwidth_share:.0%}",
                "same": same if row.lossless else "not lossless",
                "compile": f"{row.compile_seconds:.1f} s" if row.compile_seconds else "",
            }
        )
        costs = row.step_seconds
        if costs is not None:  # of this library
            rounds.append(
                {
                    "method": row.name,
                    "draft ms": f"{1e3 * row.num_draft_steps * costs.draft_seconds:.3f}",
                    "verify ms": f"{1e3 * max(costs.verify_seconds - costs.commit_seconds, 0.0):.3f}",
                    "commit ms": f"{1e3 * costs.commit_seconds:.3f}",
                    "G": row.num_draft_steps,
                    "v": f"{row.verify_cost:.2f}",
                    "c": f"{row.draft_cost:.3f}",
                    "S": f"{row.predicted_ratio:.2f}",
                    "ratio": f"{row.ratio.median:.2f}",
                }
            )
        whole = TaskRow(task="all", num_prompts=report.num_prompts, ratio=row.prompt_ratio, acceptance=row.acceptance)
        for task in (whole, *row.tasks) if ours else ():
            found = task.acceptance
            tasks.append(
                {
                    "task": task.task,
                    "method": row.name,
                    "prompts": task.num_prompts,
                    "ratio": "" if task.ratio is None else f"{task.ratio.value:.2f} {_interval(task.ratio)}".rstrip(),
                    "τ": "" if found is None else f"{found.mean_acceptance_length:.2f}",
                    "draft rate": "" if found is None else f"{found.draft_acceptance_rate:.3f}",
                    "per position": "" if found is None else _rates(found.per_position),
                    "conditional": "" if found is None else _rates(found.conditional),
                }
            )
    waits = [f"{what} {quantile}" for what in ("TTFT", "TPOT", "chunk") for quantile in _TIMES]
    latency = [
        [row.name, *(_milliseconds(one, at) for one in (row.first_token, row.per_token, row.chunk) for at in _TIMES)]
        for row in report.rows
    ]
    order = ["all", *(task.task for task in report.rows[0].tasks)]
    tasks.sort(key=lambda cells: order.index(cells["task"]))
    return [
        _table(f"Speed {at}", speed),
        Table(f"Latency {at}, ms", ["method", *waits], latency),
        _table(f"A round {at}", rounds),
        _table(f"Ratio and acceptance by task {at}", tasks),
    ]


def _table(title: str, rows: list[dict[str, Any]]) -> Table:
    return Table(title, list(rows[0]) if rows else [], [list(row.values()) for row in rows])


def _interval(value: Interval) -> str:
    return "" if value.low is None else f"[{value.low:.2f}-{value.high:.2f}]"


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{rate:.2f}" for rate in rates)


def _milliseconds(value: Latency | None, quantile: str) -> str:
    return "" if value is None else f"{1e3 * getattr(value, quantile):.2f}"
