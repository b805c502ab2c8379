"""The report of ``eagle3 bench``: tables for the terminal, and files in JSON and Markdown."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._printing import Page, cell_text, page_as_markdown, table_of
from eagle3_jax.measure.tables import Table, write_text

if TYPE_CHECKING:
    from eagle3_jax.bench.results import NotMeasured, Report

_SPEED = {
    "method": "name",
    "dtype": "dtype",
    "tokens/s": "decode_tokens_per_second.median",
    "ratio": "ratio",
    "95 %": "ratio_interval",
    "τ": "acceptance.mean_acceptance_length",
    "total": "total_tokens_per_second.median",
    "total ratio": "total_ratio.median",
    "roofline": "bandwidth_share",
    "same": "same_texts",
    "lossless": "lossless",
    "compile": "compile_seconds",
}
_LATENCY = {
    "method": "name",
    "TTFT p50 p90 p99": "first_token",
    "TPOT p50 p90 p99": "per_token",
    "chunk p50 p90 p99": "chunk",
}
_ROUND = {
    "method": "name",
    "draft step": "step_seconds.draft_seconds",
    "verify": "step_seconds.verify_seconds",
    "commit": "step_seconds.commit_seconds",
    "G": "num_draft_steps",
    "v": "verify_cost",
    "c": "draft_cost",
    "S": "predicted_ratio",
    "ratio": "ratio.median",
}
_TASK = {
    "task": "task",
    "method": "method",
    "prompts": "num_prompts",
    "ratio": "ratio",
    "τ": "acceptance.mean_acceptance_length",
    "draft rate": "acceptance.draft_acceptance_rate",
    "per position": "acceptance.per_position",
    "conditional": "acceptance.conditional",
}
_MISSING = {"method": "name", "reason": "reason"}

NOTES = """\
tokens/s: new tokens after the first over the time of the decode loop; total: all new tokens over all time, prefill too.
ratio: tokens/s over that of the baseline in the same repeat: median (quartiles) of the repeats, which take turns.
95 %: ratio of all times, and its bootstrap interval over pairs of the same prompts in the same repeat.
Ratios by task: geometric mean over prompts of their ratios of time per token, with its interval over prompts.
τ: tokens per round, 1 + accepted / drafts. v: verification over the baseline's step. c: one draft step over it.
S: the ratio predicted by τ / (v + G·c), G draft steps a round; v and c are measured in separate runs.
commit: the part of verification that writes the cache.
roofline: least memory traffic over the highest bandwidth measured on this device; above 100 % the run fails.
same: texts with the tokens of plain decoding in that row's precision (blocks may round approximately tied logits
differently). Warm-up and compilation are excluded; compile is their time for all programs. Stop tokens are ignored.
TTFT: time to first token. TPOT: time per token after it. chunk: time between chunks of a stream, one per round, in
separate runs that the host drives. transformers decodes greedily, in eager PyTorch with its own cache."""  # noqa: E501


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of the command."""

    device: str  #: Short name of the hardware.
    #: Environment of the run; see :func:`eagle3_jax.measure.environment.environment`.
    about: dict[str, Any]
    reports: Sequence[Report]  #: One for each batch size.
    missing: Sequence[NotMeasured]  #: Contenders that were not measured at all.
    interruption: str  #: The part that was measured, in words, if Ctrl-C ended the measurement.

    @property
    def failures(self) -> list[str]:
        """Reasons why the measurements are invalid; empty if they are valid."""
        too_fast = [
            f"batch {report.batch_size}: {row.name} reads memory at {row.bandwidth_share:.0%} of"
            f" the {(report.bytes_per_second or 0) / 1e9:.1f} GB/s that this device was measured to"
            " read at most; the clock, the tokens or the ceiling are wrong"
            for report in self.reports
            for row in report.too_fast
        ]

        compiled_late = [
            f"batch {report.batch_size}: {report.programs_after_warm_up} programs were compiled"
            " while times were taken"
            for report in self.reports
            if report.programs_after_warm_up
        ]

        return too_fast + compiled_late

    def page(self) -> Page:
        """Returns the numbers, and every table that has rows, with explanations of the columns."""
        values = {
            "hardware": self.device,
            "about": self.about,
            "failures": self.failures,
            "not_measured": [dataclasses.asdict(contender) for contender in self.missing],
            "reports": [report.to_json() for report in self.reports],
        }

        tables = []
        missing = list(self.missing)
        for report in self.reports:
            tables += _tables(report)
            missing += report.not_measured
        tables.append(table_of("Not measured", list(map(dataclasses.asdict, missing)), _MISSING))

        headlines = [headline(report, device=self.device) for report in self.reports]
        return Page(values, [*headlines, *(table for table in tables if table.rows), "\n" + NOTES])


def check_directory(path: Path | None) -> None:
    """Refuses an output directory that holds something or could not be written, before any work.

    The directory need not exist.
    """
    if path is None:
        return
    if path.is_dir() and any(path.iterdir()):
        raise Misuse(
            f"--output {path} is not empty; give a new directory, so that nothing is overwritten"
        )

    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise Misuse(f"--output {path}: {parent} is a file; give a directory")
    if not os.access(parent, os.W_OK):
        raise Misuse(f"--output {path} cannot be written: no permission in {parent}")


def write_report(findings: Findings, directory: Path) -> None:
    """Writes ``bench.json`` and ``bench.md``."""
    page = findings.page()
    failures = [f"**FAILED: {failure}**" for failure in findings.failures]
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / "bench.json", json.dumps(page.values, indent=1) + "\n")
    written = Page(None, ["# eagle3 bench", *failures, *page.text])
    write_text(directory / "bench.md", page_as_markdown(written))


def headline(report: Report, *, device: str) -> str:
    """Returns the measurement and the hardware in one line."""
    size = (
        f"{report.num_prompts} prompts x {report.max_new_tokens} new tokens, {report.repeats}"
        " repeats"
    )
    line = f"{device}; batch {report.batch_size}, greedy, {size}; baseline: {report.baseline}"
    rates = max(
        (row.simulated_rates for row in report.rows if row.simulated_rates), key=len, default=None
    )
    if rates is None:
        return line
    return f"{line}; SIMULATED acceptance, share of rounds by depth: {cell_text('rates', rates)}"


def _tables(report: Report) -> list[Table]:
    """Returns speeds, latencies, parts of a round, and acceptance by task."""
    at_batch = f"at batch {report.batch_size}"
    rows = report.to_json()["rows"]

    tasks = []
    for row in rows:
        if row["name"] != report.baseline:
            total = {"task": "all", "num_prompts": report.num_prompts, "ratio": row["prompt_ratio"]}
            total["acceptance"] = row["acceptance"]
            tasks += [{"method": row["name"], **task} for task in (total, *row["tasks"])]
    order = ["all", *(task["task"] for task in rows[0]["tasks"])]

    tasks.sort(key=lambda task: order.index(task["task"]))
    return [
        table_of(f"Speed {at_batch}", rows, _SPEED),
        table_of(f"Latency {at_batch}, ms", rows, _LATENCY),
        table_of(f"A round {at_batch}", [row for row in rows if row["step_seconds"]], _ROUND),
        table_of(f"Ratio and acceptance by task {at_batch}", tasks, _TASK),
    ]
