"""``eagle3 inspect``: a description of a checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from eagle3_jax.bench.tables import Table, flat, show
from eagle3_jax.cli._options import CHECKPOINT, JsonOption
from eagle3_jax.cli._printing import Page, print_page

EXAMPLE = "Example: eagle3 inspect ./EAGLE3-LLaMA3.1-Instruct-8B --json"


def inspect(
    directory: Annotated[
        str | None, typer.Argument(help=f"{CHECKPOINT} of a target or a head. Default: the bundled pair.")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Describe a checkpoint: kind, size, configuration."""
    from eagle3_jax.conversion.inspect import describe
    from eagle3_jax.files.sources import locate

    parts = ("target", "eagle3") if directory is None else ("target",)
    descriptions = [describe(locate(directory, part)).to_json() for part in parts]
    for number, description in enumerate(descriptions):
        if number and not as_json:
            typer.echo()
        print_page(Page(description, [_table(description)]), as_json=as_json)


def _table(description: dict[str, Any]) -> Table:
    """Returns the fields of a description in words, and the configuration as the file has it, without empty ones."""
    from eagle3_jax.conversion.errors import printable

    rows = []
    for name, value in flat(description):
        if value not in ("", None):
            label = name if "." in name else name.replace("_", " ")
            rows.append([printable(label), printable(show(value))])
    return Table("", ["", ""], rows)
