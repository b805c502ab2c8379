"""What was reached, in a committed file, and what may be spent: five per cent more."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from validation.aot.measured import Measured
from validation.aot.programs import Case

PATH = Path(__file__).resolve().parent.parent / "results" / "aot.json"
SLACK = 1.05


def load(path: Path = PATH) -> dict[str, Measured]:
    """Every row by the name of its case; rows of whole models stand behind their number of layers.

    Raises:
        ValueError: The file cannot be read.
    """
    try:
        rows = [Measured.from_json(row) for row in json.loads(path.read_text("utf-8"))["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path.name} is no record of compiled programs: {error}") from None
    return {key(row): row for row in rows}


def note_of(path: Path = PATH) -> dict[str, str]:
    """When a record was last written, and from which commit."""
    return json.loads(path.read_text("utf-8"))["note"]


def key(row: Measured) -> str:
    """What tells a row from others."""
    return row.case.name if len(row.facts) > 1 else f"{row.case.name} L{row.deep.layers}"


def save(rows: Iterable[Measured], path: Path, note: dict[str, str]) -> None:
    """Write rows, a line each, in place of those of the same cases; ``note`` says when and from what."""
    kept = load(path) if path.exists() else {}
    kept |= {key(row): row for row in rows}
    lines = ",\n".join(json.dumps(kept[name].to_json()) for name in sorted(kept))
    path.write_text(f'{{"note": {json.dumps(note)},\n"rows": [\n{lines}\n]}}\n', encoding="utf-8")


def recorded(case: Case, path: Path = PATH) -> Measured | None:
    """What was reached for a case at two depths; ``None`` where nobody recorded it."""
    return load(path).get(case.name)


def budget(reached: float | None) -> int:
    """What may be spent where this was reached; nothing more where it was nothing."""
    return math.ceil((reached or 0) * SLACK)
