"""Records of measurements as JSON files: written after every figure, and continued by the same command."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.measure.tables import write_text
from eagle3_jax.measure.timing import Spread


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record; the file appears under its name only when complete."""
    write_text(path, json.dumps(record, indent=1) + "\n")


def read_record(path: Path, conditions: Mapping[str, Any]) -> dict[str, Any] | None:
    """Reads what an earlier run measured under the same conditions; ``None`` if there is no file.

    Args:
        path: The JSON file.
        conditions: Facts that the record repeats, such as the hash of the code. A change of any of
            them makes its figures incomparable with new ones.

    Raises:
        ValueError: The file is no such record, or one of other conditions.
    """
    if not path.exists():
        return None
    try:
        record = json.loads(path.read_text())
        changed = [name for name in conditions if record.get(name) != conditions[name]]
    except (ValueError, AttributeError):
        raise ValueError(f"{path} is no record of this experiment; give another --output") from None
    if changed:
        raise ValueError(
            f"{path} holds a run with another {', '.join(changed)}; give another --output"
        )
    return record


def failure(error: Exception) -> dict[str, str]:
    """Returns the figure of a cell that failed: the error in one line."""
    return {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def spread_of(values: Iterable[float]) -> dict[str, Any]:
    """Returns median, quartiles and every value."""
    values = list(values)
    return vars(Spread.of(values)) | {"values": values}
