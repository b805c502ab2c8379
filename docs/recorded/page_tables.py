"""What the tables share: Markdown, committed records, and the words that name a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "validation" / "results"
Row = dict[str, Any]


def record(name: str) -> Row:
    """Reads a committed record."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Writes a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines
    )


def spread(ratio: Row) -> str:
    """Writes a median with its quartiles."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"


def version(about: Row) -> str:
    """Names the version and the commit of a run."""
    return f"Version {about['versions']['eagle3_jax']}, commit `{about['git']['commit'][:10]}`"


def cores(about: Row) -> str:
    """Names the processor of a run."""
    return f"{about['cpu']['cores']} cores of an {about['cpu']['model']}"
