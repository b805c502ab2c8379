"""What a run found, as JSON for machines and as one page for people."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any

from validation.levels import LEVELS


class Verdict(enum.StrEnum):
    """How a check or a level ended. A level that ran in part is never green."""

    PASSED = "passed"
    FAILED = "failed"
    PARTLY = "partly run"
    NOT_RUN = "not run"


@dataclasses.dataclass
class Table:
    """A table of the report."""

    title: str
    columns: list[str]
    rows: list[list[Any]]


@dataclasses.dataclass
class Plot:
    """A plot of the report, as data; drawn when the page is written.

    Attributes:
        title: Above it.
        kind: ``line``, ``bar`` or ``scatter``.
        x_label: With its unit.
        y_label: With its unit.
        series: Name to ``(xs, ys)``; ``xs`` may be names.
    """

    title: str
    kind: str
    x_label: str
    y_label: str
    series: dict[str, tuple[list[Any], list[float]]]


@dataclasses.dataclass
class Check:
    """One test of a level, and the numbers behind its verdict.

    Attributes:
        level: Name of its level.
        name: What was checked.
        verdict: ``NOT_RUN`` until it has ended.
        reason: Why it failed or did not run.
        seconds: Wall time.
        numbers: Name to number or short text.
        tables: In order.
        plots: In order.
    """

    level: str
    name: str
    verdict: Verdict = Verdict.NOT_RUN
    reason: str = ""
    seconds: float = 0.0
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    tables: list[Table] = dataclasses.field(default_factory=list)
    plots: list[Plot] = dataclasses.field(default_factory=list)

    def number(self, **numbers: Any) -> None:
        """Keep numbers under their names."""
        self.numbers |= numbers

    def table(self, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Keep a table."""
        self.tables.append(Table(title, columns, rows))

    def plot(self, title: str, kind: str, x_label: str, y_label: str, series: dict[str, tuple[list, list]]) -> None:
        """Keep a plot; see :class:`Plot`."""
        self.plots.append(Plot(title, kind, x_label, y_label, series))
