"""Tables as data and in Markdown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_jax.files.writing import whole_file


@dataclasses.dataclass
class Table:
    """A table of the report."""

    title: str
    columns: list[str]
    rows: list[list[Any]]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r} has {len(self.columns)} columns, but a row of {len(row)}"
                )

    def column(self, name: str) -> list[Any]:
        """Returns the values under a heading."""
        index = self.columns.index(name)
        return [row[index] for row in self.rows]


def flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields nested facts as ``(dotted name, value)``."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def show(value: Any) -> str:
    """Returns a value as text: four digits, thousands separated, a dash for ``None``."""
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
    """Returns a table in Markdown; each cell on one line."""
    return "\n".join(map(_line, [columns, ["---"] * len(columns), *rows]))


def _line(cells: Sequence[Any]) -> str:
    texts = [" ".join(str(cell).split()).replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(texts)} |"


def write_text(path: Path, text: str) -> None:
    """Writes a file that appears under its name only when complete."""
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
