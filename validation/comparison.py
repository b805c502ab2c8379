"""Two runs side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle3_jax.reporting.tables import flat, show, to_markdown
from validation.checks import plain
from validation.levels import BY_NAME
from validation.runs import Report


@dataclasses.dataclass(frozen=True)
class Change:
    """One thing in two runs.

    Attributes:
        level: Where; empty for a fact of the environment.
        check: Where; empty for a level's verdict.
        name: Of the number, fact or level.
        old: ``None`` where the first run lacks it.
        new: ``None`` where the second run lacks it.
    """

    level: str
    check: str
    name: str
    old: Any
    new: Any

    @property
    def ratio(self) -> float | None:
        """New over old; ``None`` where there is none."""
        return self.new / self.old if self.old and self.new is not None else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two runs side by side.

    Attributes:
        verdicts: Every level, changed or not.
        rows: Every number that either run has.
        facts: What differs in the environment: numbers of different machines say little about the code.
        sees: Level, check and the smallest deviation that it would have seen, in the second run.
    """

    verdicts: list[Change]
    rows: list[Change]
    facts: list[Change]
    sees: list[tuple[str, str, str]]

    def to_markdown(self) -> str:
        """Three tables, for an issue or a pull request."""
        verdicts = [[c.level, c.old, c.new, "" if c.old == c.new else "changed"] for c in self.verdicts]
        numbers = [[c.level, c.check, c.name, *map(show, (c.old, c.new, c.ratio))] for c in self.rows]
        parts = [to_markdown(["level", "old", "new", ""], verdicts)]
        if self.rows:
            parts.append(to_markdown(["level", "check", "number", "old", "new", "ratio"], numbers))
        if self.sees:
            parts.append(to_markdown(["level", "check", "would have seen, with 90 % power"], self.sees))
        if self.facts:
            parts.append(
                to_markdown(["environment", "old", "new"], [[c.name, show(c.old), show(c.new)] for c in self.facts])
            )
        return "\n\n".join(parts) + "\n"


def compare(old: Report, new: Report) -> Comparison:
    """What changed from one run to another: verdicts, numbers, environment."""
    before, after = old.levels, new.levels
    verdicts = [Change(name, "", name, before[name].verdict, after[name].verdict) for name in before]

    def numbers(report: Report) -> dict[tuple[str, str, str], float]:
        return {
            (check.level, check.name, name): value
            for check in report.checks
            for name, value in plain(check.numbers).items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }

    first, second = numbers(old), numbers(new)
    rows = [Change(*key, first.get(key), second.get(key)) for key in {**first, **second}]
    rows.sort(key=lambda change: list(BY_NAME).index(change.level))  # stable: within a level as they came
    here, there = dict(flat(old.environment)), dict(flat(new.environment))
    facts = [
        Change("", "", key, here.get(key), there.get(key))
        for key in {**here, **there}
        if key != "date" and here.get(key) != there.get(key)
    ]
    sees = [(check.level, check.name, check.sees) for check in new.checks if check.sees]
    return Comparison(verdicts, rows, facts, sees)
