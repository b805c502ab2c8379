"""The one printer of the commands: a result as text, as JSON, or as a Markdown file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from eagle3_jax.measure.tables import Table, to_markdown

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_WIDTH = 160  # characters of a line in a file or a pipe
# Columns of words, which are aligned to the left like the first column. Columns of numbers are
# aligned to the right.
# fmt: off
_WORDS = {
    "method", "dtype", "reason", "per position", "conditional", "result", "detail", "note",
    "prediction", "measured",
}
_STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}
# Columns in the order in which a narrow terminal leaves them out. A pipe and a file have all of
# them.
_OPTIONAL = (
    "compile", "total ratio", "total", "roofline", "95 %", "conditional", "commit", "draft rate",
    "prompts", "per position", "same", "dtype", "lossless", "operations", "TFLOPS", "GB/s",
    "bytes read", "verify limit", "limit", "tokens for 1", "conditional acceptance rate",
    "draft acceptance rate", "K=8", "K=7", "K=6",
)
# fmt: on
# Size of the unit of a field, and the form of its values, by the end of its name.
_UNITS = {
    "bytes": (1e9, "{:.2f} GB"),
    "flops": (1e9, "{:,.0f} G"),
    "share": (1, "{:.1%}"),
    "experts": (1, "{:.1%}"),
}
# Form of a number by its least absolute value.
_DIGITS = {1000: "{:,.0f}", 100: "{:.1f}", 0.1: "{:.2f}", 0.001: "{:.3f}", 0: "{:.1g}"}


@dataclasses.dataclass(frozen=True)
class Page:
    """The result of a command."""

    values: Any  #: For ``--json``.
    text: Sequence[str | Text | Table]  #: Lines and tables for people.


def print_page(page: Page, *, as_json: bool = False) -> None:
    """Prints a result as one line of JSON, or as lines and tables that fit into the terminal."""
    from rich.console import Console

    if as_json:
        typer.echo(json.dumps(finite(page.values), allow_nan=False))
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_WIDTH)
    for part in page.text:
        if isinstance(part, Table):
            _print_table(console, part)
        else:
            console.print(part, soft_wrap=not console.is_terminal)


def finite(value: Any) -> Any:
    """Returns the value with ``None`` in place of infinite numbers, which JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table_of(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    """Returns a table of records.

    Args:
        title: The title.
        rows: Records of plain values, as in ``--json``.
        columns: The field of each column by its heading; a dotted name reads a nested record.
    """
    cells = [
        [cell_text(field, _value_at(row, field)) for field in columns.values()] for row in rows
    ]
    return Table(title, list(columns), cells)


def _value_at(row: Mapping[str, Any], field: str) -> Any:
    value: Any = row
    for name in field.split("."):
        value = None if value is None else value[name]
    return value


def cell_text(name: str, value: Any) -> str:
    """Returns a value as text.

    The name of its field gives the unit, and statistics have their spread.
    """
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case str():
            return value
        case {"median": median, "low": low, "high": high}:
            return f"{_number(median)} ({_number(low)}-{_number(high)})"
        case {"value": mean, "low": low, "high": high}:
            return (
                _number(mean)
                if low is None
                else f"{_number(mean)} [{_number(low)}-{_number(high)}]"
            )
        case {"p50": _, "p90": _, "p99": _}:
            return " ".join(f"{1e3 * seconds:.2f}" for seconds in value.values())
        case list() | tuple():
            return " ".join(cell_text(name, entry) for entry in value)

    if name.endswith("seconds"):
        return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.2f} ms"
    for unit, (size, form) in _UNITS.items():
        if name.endswith(unit):
            return form.format(value / size)
    return f"{value:,}" if isinstance(value, int) else _number(value)


def _number(value: float) -> str:
    """Returns a number with about three digits."""
    size = abs(value) or 1
    return next(form for least, form in _DIGITS.items() if size >= least).format(value)


def page_as_markdown(page: Page) -> str:
    """Returns the text of a page in Markdown, with every column of its tables."""
    parts = []
    for part in page.text:
        if isinstance(part, Table):
            parts += [f"## {part.title}", to_markdown(part.columns, part.rows)]
        else:
            parts += str(part).splitlines()

    return "\n\n".join(filter(None, parts)) + "\n"


def fit_table(table: Table, width: int) -> Table:
    """Returns the table without the least important columns that do not fit into ``width``.

    ``width`` is a number of characters.
    """
    sizes = {}
    for name, *cells in zip(table.columns, *table.rows, strict=True):
        sizes[name] = 2 + max(len(str(cell)) for cell in (name, *cells))
    for name in _OPTIONAL:
        if sum(sizes.values()) > width:
            sizes.pop(name, None)

    rows = [
        [cell for name, cell in zip(table.columns, row, strict=True) if name in sizes]
        for row in table.rows
    ]
    return Table(table.title, list(sizes), rows)


def _print_table(console: Console, table: Table) -> None:
    """Prints a table without borders; one without column names has its first column in bold."""
    from rich.table import Table as Drawing
    from rich.text import Text

    has_names = any(table.columns)
    fitted = fit_table(table, console.width) if has_names else table
    drawing = Drawing(box=None, pad_edge=False, padding=(0, 1), show_header=has_names)
    for index, name in enumerate(fitted.columns):
        is_left = not has_names or index == 0 or name in _WORDS
        style = "" if has_names or index else "bold"
        drawing.add_column(
            name, justify="left" if is_left else "right", style=style, overflow="fold"
        )
    for row in fitted.rows:
        drawing.add_row(*(Text(str(cell), _STYLES.get(str(cell), "")) for cell in row))

    if table.title:
        console.print(f"\n{table.title}", style="bold")
    if console.is_terminal:
        console.print(drawing)
        return

    # Rich fills the last column with spaces.
    with console.capture() as capture:
        console.print(drawing)
    for line in capture.get().splitlines():
        typer.echo(line.rstrip())
