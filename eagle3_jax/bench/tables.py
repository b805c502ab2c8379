"""Tables and plots as data, and tables in Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.writing import whole_file

Values = Collection[Any]  # a list or an array


@dataclasses.dataclass
class Table:
    """A table of the report."""

    title: str
    columns: list[str]
    rows: list[list[Any]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r} has {len(self.columns)} columns, but a row of {len(row)}")

    def column(self, name: str) -> list[Any]:
        """The values under a heading."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


@dataclasses.dataclass
class Plot:
    """A plot of the report, as data; drawn when the page is written.

    Attributes:
        title: Title.
        kind: ``line``, ``bar`` or ``scatter``.
        x_label: Label of the x axis, with its unit.
        y_label: Label of the y axis, with its unit.
        series: Name to ``(xs, ys)``; ``xs`` may be names, and ``ys`` have gaps (``None``).
    """

    title: str
    kind: str
    x_label: str
    y_label: str
    series: Mapping[str, tuple[Values, Values]]

    def __post_init__(self) -> None:
        if self.kind not in ("line", "bar", "scatter"):
            raise ValueError(f"plot {self.title!r} is of kind {self.kind!r}; use line, bar or scatter")
        for name, (xs, ys) in self.series.items():
            if len(xs) != len(ys):
                raise ValueError(f"plot {self.title!r}: series {name!r} has {len(xs)} xs and {len(ys)} ys")


def data_of(plot: Plot) -> Table:
    """A plot's numbers as a table: a row for each x, a column for each series."""
    names = list(plot.series)
    columns = [plot.x_label, *names]
    if plot.kind == "scatter" or any(len(set(xs)) < len(xs) for xs, _ in plot.series.values()):
        rows = [[name, x, y] for name, (xs, ys) in plot.series.items() for x, y in zip(xs, ys, strict=True)]
        return Table(plot.y_label, ["series", plot.x_label, plot.y_label], rows)
    values = {name: dict(zip(xs, ys, strict=True)) for name, (xs, ys) in plot.series.items()}
    every_x = {x: None for xs, _ in plot.series.values() for x in xs}
    return Table(plot.y_label, columns, [[x, *(values[name].get(x) for name in names)] for x in every_x])


def flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested facts as ``(dotted name, value)``."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def show(value: Any) -> str:
    """A value for people: four digits, thousands separated, a dash for ``None``."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value))
    return str(value)


def to_markdown(columns: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown; each cell on one line."""

    def line(cells: Sequence[Any]) -> str:
        return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])


def write_text(path: Path, text: str) -> None:
    """Writes a file that appears under its name only when complete."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
