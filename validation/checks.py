"""Checks, what they found, and what the checks of a level amount to."""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.reporting.tables import Plot, Table, show
from validation.levels import Level


class Verdict(enum.StrEnum):
    """How a check or a level ended. A level that ran in part is never green."""

    PASSED = "passed"
    FAILED = "failed"
    PARTLY = "partly run"
    NOT_RUN = "not run"


@dataclasses.dataclass
class Check:
    """One test of a level, and the numbers behind its verdict.

    Attributes:
        level: Name of its level.
        name: What was checked.
        verdict: ``NOT_RUN`` until it has ended. A check that passes on less than it should have seen sets ``PARTLY``.
        reason: Why it failed or did not run.
        seconds: Wall time.
        numbers: Name to number or short text.
        tables: In order.
        plots: In order.
        sees: The smallest deviation that the check would have seen with 90 % power, in words; empty where chance has
            no part in it.
    """

    level: str
    name: str
    verdict: Verdict = Verdict.NOT_RUN
    reason: str = ""
    seconds: float = 0.0
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)
    tables: list[Table] = dataclasses.field(default_factory=list)
    plots: list[Plot] = dataclasses.field(default_factory=list)
    sees: str = ""

    @property
    def deselected(self) -> bool:
        """Whether the run was told to leave it out."""
        return self.verdict is Verdict.NOT_RUN and self.reason.startswith("deselected")

    def number(self, **numbers: Any) -> None:
        """Keep numbers under their names."""
        self.numbers |= numbers

    def table(self, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Keep a table."""
        self.tables.append(Table(title, columns, rows))

    def plot(self, title: str, kind: str, x_label: str, y_label: str, series: dict[str, tuple[list, list]]) -> None:
        """Keep a plot; see :class:`Plot`."""
        self.plots.append(Plot(title, kind, x_label, y_label, series))


@dataclasses.dataclass(frozen=True)
class LevelResult:
    """What the checks of one level amount to.

    Attributes:
        level: The claim.
        checks: All that were collected, whether they ran or not.
        verdict: ``FAILED`` if one failed, ``PASSED`` only if all passed and the manifest names no other.
        reason: Why it is not ``PASSED``.
    """

    level: Level
    checks: list[Check]
    verdict: Verdict
    reason: str

    @property
    def seconds(self) -> float:
        return sum(check.seconds for check in self.checks)

    @property
    def numbers(self) -> dict[str, Any]:
        """All numbers; a name that several checks use stands behind the name of the check."""
        uses = collections.Counter(name for check in self.checks for name in check.numbers)
        return {
            name if uses[name] == 1 else f"{check.name}: {name}": value
            for check in self.checks
            for name, value in check.numbers.items()
        }

    @property
    def sees(self) -> list[str]:
        """The smallest deviations that its checks would have seen, each once."""
        return list(dict.fromkeys(check.sees for check in self.checks if check.sees))

    @property
    def headline(self) -> str:
        """The first three numbers, over all checks: a value, or from the least to the greatest."""
        values: dict[str, list[Any]] = {}
        for check in self.checks:
            for name, value in check.numbers.items():
                values.setdefault(name, []).append(value)
        return ", ".join(f"{name} {_span(found)}" for name, found in list(values.items())[:3])


def reasons_of(checks: list[Check], *verdicts: Verdict) -> str:
    """Why checks ended so, each reason once."""
    found: dict[str, list[str]] = {}
    for check in checks:
        if check.verdict in verdicts:
            found.setdefault(check.reason or str(check.verdict), []).append(check.name)
    if len(found) == 1 and len(next(iter(found.values()))) == len(checks):
        return next(iter(found))
    return "\n".join(
        f"{names[0]}: {reason}" if len(names) == 1 else f"{len(names)} of {len(checks)} checks: {reason}"
        for reason, names in found.items()
    )


def plain(value: Any) -> Any:
    """What JSON can say. A report is written at the end of hours, so what is not known becomes text, not an error."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and jax
        return plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return value.name
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _span(values: list[Any]) -> str:
    try:
        low, high = min(values), max(values)
    except (TypeError, ValueError):  # texts among numbers, or arrays
        low, high = values[0], values[-1]
    low, high = plain([low, high])
    return show(low) if low == high else f"{show(low)} to {show(high)}"
