"""Where the findings of ``eagle3 bench`` go: the terminal, and a directory with JSON, CSV, Markdown and a page."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from eagle3_jax.cli._errors import Misuse

if TYPE_CHECKING:
    from eagle3_jax.measure.results import NotMeasured, Report
    from eagle3_jax.reporting.tables import Plot, Table

_WIDTH = 124


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """A whole run.

    Attributes:
        device: In a few words.
        about: Where it ran and on what; see :func:`eagle3_jax.reporting.environment.environment`.
        reports: One for each batch size.
        missing: Who was not measured at all.
        price_per_hour: Of the machine.
    """

    device: str
    about: dict[str, Any]
    reports: Sequence[Report]
    missing: Sequence[NotMeasured]
    price_per_hour: float | None

    @property
    def failures(self) -> list[str]:
        """Why the run counts for nothing; empty if it does."""
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
        """See :mod:`eagle3_jax.cli._bench_tables`."""
        from eagle3_jax.cli._bench_tables import all_tables

        return all_tables(self.reports, self.missing, self.price_per_hour)

    @property
    def plots(self) -> list[Plot]:
        """See :mod:`eagle3_jax.cli._bench_tables`."""
        from eagle3_jax.cli._bench_tables import all_plots

        return all_plots(self.reports)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {
            "hardware": self.device,
            "about": self.about,
            "price_per_hour": self.price_per_hour,
            "failures": self.failures,
            "not_measured": [dataclasses.asdict(one) for one in self.missing],
            "reports": [report.to_json() for report in self.reports],
        }


def check_directory(path: Path | None) -> None:
    """Refuse an output directory that holds something or could not be written, before any work is done."""
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


def write(findings: Findings, directory: Path) -> str:
    """Write all files.

    Returns:
        Why there is no page; empty where there is one.
    """
    from eagle3_jax.cli._bench_tables import flat_rows
    from eagle3_jax.reporting.tables import to_csv, write_text

    directory.mkdir(parents=True, exist_ok=True)
    rows = flat_rows(findings.reports, findings.missing, findings.price_per_hour)
    write_text(directory / "bench.json", json.dumps(findings.to_json(), indent=1) + "\n")
    write_text(directory / "bench.csv", to_csv(list(rows[0]), [list(row.values()) for row in rows]))
    write_text(directory / "bench.md", to_text(findings))
    try:
        import matplotlib  # noqa: F401 (a page without its plots would be a table twice)

        from eagle3_jax.reporting.drawing import render
    except ModuleNotFoundError as error:
        return f"no page: it needs {error.name}: pip install 'eagle3-jax[plot]'"
    write_text(directory / "bench.html", render(Path(__file__).with_name("bench.html.jinja"), **_page_values(findings)))
    return ""


def _page_values(findings: Findings) -> dict[str, Any]:
    from eagle3_jax.cli._bench_tables import NOTES, headline

    heads = [headline(report, device=findings.device) for report in findings.reports]
    lossy = sorted({row.name for report in findings.reports for row in report.rows if not row.lossless})
    return {"findings": findings, "heads": heads, "notes": NOTES, "lossy": lossy}


def to_text(findings: Findings) -> str:
    """Markdown."""
    from eagle3_jax.cli._bench_tables import NOTES, headline
    from eagle3_jax.reporting.tables import to_markdown

    parts = ["# eagle3 bench", *(headline(report, device=findings.device) for report in findings.reports)]
    parts += [f"**FAILED: {line}**" for line in findings.failures]
    for table in findings.tables:
        parts += [f"## {table.title}", to_markdown(table.columns, table.rows)]
    return "\n\n".join([*parts, *NOTES.splitlines()]) + "\n"


def show(findings: Findings) -> None:
    """Tables in the terminal."""
    from rich.console import Console

    from eagle3_jax.cli._bench_tables import NOTES, headline

    console = Console(highlight=False, width=max(Console().width, _WIDTH))  # a narrow terminal wraps, nothing is cut
    for report in findings.reports:
        console.print(headline(report, device=findings.device), markup=False)
    for table in findings.tables:
        console.print(f"\n{table.title}", style="bold", markup=False)
        console.print(_drawn(table))
    console.print("\n" + NOTES, markup=False)


def say_failures(findings: Findings) -> None:
    """One line each on the standard error; the run then ends with exit code 1."""
    for line in findings.failures:
        typer.echo(f"error: {line}", err=True)
    if findings.failures:
        raise typer.Exit(1)


def _drawn(table: Table) -> Any:
    from rich.markup import escape
    from rich.table import Table as Drawing

    drawing = Drawing(box=None, pad_edge=False, padding=(0, 1))
    words = {"method", "dtype", "task", "reason", "per position", "conditional"}
    for name in table.columns:
        drawing.add_column(name, justify="left" if name in words else "right", overflow="fold")
    for row in table.rows:
        drawing.add_row(*(escape(str(cell)) for cell in row))
    return drawing
