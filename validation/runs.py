"""What a run found: verdicts, and the JSON that they are kept in.

In a notebook, with ``report = load(DIR)``: ``report["L8"].numbers``, ``report.table("L8", TITLE).column("K")``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from eagle3_jax.reporting.tables import Plot, Table
from validation.checks import Check, LevelResult, Verdict, plain, reasons_of
from validation.levels import BY_NAME, LEVELS, Level
from validation.required import missing_from

SCHEMA_VERSION = 1
_NO_PART = "deselected: no check of it was part of this run"
_ADDED_LATER = ("aot", "manifest", "parts")


@dataclasses.dataclass
class Report:
    """A run.

    Attributes:
        environment: Where it ran and what it ran on; see :func:`eagle3_jax.reporting.environment.environment`.
        checks: Every test that was collected.
        started: ISO 8601, UTC.
        seconds: Wall time of the run.
        command: The command line.
        gpu: A run with ``--gpu``.
        aot: Platforms that ``--aot`` named.
        rehearsal: A run with ``--rehearse``: the flow was tried; nothing it measured counts.
        errors: Modules that could not be collected. Nobody knows what their checks would have said.
        skipped: Modules that skipped themselves as a whole, and why.
        manifest: Level to check to the number of its cases: what the run should have contained. A report from before
            manifests has none, and its levels are judged by what was collected.
        parts: Command lines of the runs that it was merged from.
    """

    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    checks: list[Check] = dataclasses.field(default_factory=list)
    started: str = ""
    seconds: float = 0.0
    command: str = ""
    gpu: bool = False
    rehearsal: bool = False
    errors: list[str] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)
    manifest: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    parts: list[str] = dataclasses.field(default_factory=list)
    aot: list[str] = dataclasses.field(default_factory=list)

    @property
    def compared(self) -> str:
        """Which models these are verdicts about."""
        subject = self.environment.get("subject", {})
        name, reason = subject.get("name", "no models of their own"), subject.get("not the default")
        return f"{name} ({reason})" if reason else name

    @property
    def levels(self) -> dict[str, LevelResult]:
        """A verdict for every level there is, in their order."""
        return {level.name: self[level.name] for level in LEVELS}

    def asks_for(self, level: Level) -> bool:
        """Whether it is part of such a run: some are with an option only."""
        return not level.only_with or bool(getattr(self, level.only_with))

    def __getitem__(self, name: str) -> LevelResult:
        level = BY_NAME[name]
        checks = [check for check in self.checks if check.level == name]
        verdicts = {check.verdict for check in checks}
        if not checks:
            verdict = Verdict.NOT_RUN
            reason = f"only with --{level.only_with}" if not self.asks_for(level) else _NO_PART
        elif Verdict.FAILED in verdicts:
            verdict, reason = Verdict.FAILED, reasons_of(checks, Verdict.FAILED)
        elif len(verdicts) == 1:
            (verdict,) = verdicts
            reason = "" if verdict is Verdict.PASSED else reasons_of(checks, verdict)
        else:
            verdict, reason = Verdict.PARTLY, reasons_of(checks, Verdict.PARTLY, Verdict.NOT_RUN)
        missing = missing_from(checks, self.manifest.get(name, {}))
        if missing and verdict in (Verdict.PASSED, Verdict.PARTLY):
            verdict = Verdict.PARTLY
            reason = "\n".join(filter(None, [reason, f"not collected: {', '.join(missing)}"]))
        return LevelResult(level, checks, verdict, reason)

    def table(self, level: str, title: str) -> Table:
        """A table by its title.

        Raises:
            KeyError: The level has none of that title.
        """
        tables = [table for check in self[level].checks for table in check.tables]
        for table in tables:
            if table.title == title:
                return table
        raise KeyError(f"{level} has no table {title!r}, but {[table.title for table in tables]}")

    @property
    def verdict(self) -> Verdict:
        """Of the run as a whole. A rehearsal proves nothing, so it never passes."""
        verdicts = [result.verdict for result in self.levels.values()]
        if self.errors or Verdict.FAILED in verdicts:
            return Verdict.FAILED
        if all(verdict is Verdict.NOT_RUN for verdict in verdicts):
            return Verdict.NOT_RUN
        all_passed = all(verdict is Verdict.PASSED for verdict in verdicts) and not self.skipped
        return Verdict.PASSED if all_passed and not self.rehearsal else Verdict.PARTLY

    @property
    def summary(self) -> str:
        """The verdict in words, naming what failed and what is open."""
        names: dict[Verdict, list[str]] = {verdict: [] for verdict in Verdict}
        for name, result in self.levels.items():
            names[result.verdict].append(name)
        parts = ["Rehearsal: the flow was tried, nothing measured here counts."] if self.rehearsal else []
        if self.verdict is Verdict.PASSED:
            parts.append("Every level passed.")
        elif self.verdict is Verdict.NOT_RUN:
            parts.append("Nothing was validated.")
        else:
            words = {
                Verdict.FAILED: "Failed",
                Verdict.PASSED: "Passed",
                Verdict.PARTLY: "Ran in part",
                Verdict.NOT_RUN: "Not run, so not proven",
            }
            parts += [f"{word}: {', '.join(names[verdict])}." for verdict, word in words.items() if names[verdict]]
        if self.errors:
            parts.append(f"{len(self.errors)} modules could not be read." if len(self.errors) > 1 else
                         "A module could not be read.")  # fmt: skip
        if self.skipped:
            parts.append(f"Modules that skipped themselves: {len(self.skipped)}.")
        return " ".join(parts)

    def incomplete(self, levels: Collection[str] = ()) -> list[str]:
        """What ``--complete`` asks for and this run lacks, a line each; of these levels, where some are named."""
        wanted = [
            result
            for name, result in self.levels.items()
            if (name in levels if levels else self.asks_for(result.level))
        ]
        return [
            f"{result.level.name} {result.verdict}: {' '.join(result.reason.split())}"
            for result in wanted
            if result.verdict is not Verdict.PASSED
        ] + [f"not collected: {line}" for line in [*self.errors, *self.skipped]]

    def to_json(self) -> str:
        """Strict JSON: numpy's numbers become plain ones, and what JSON cannot say (NaN, infinity) ``null``."""
        verdicts = {
            name: {"verdict": result.verdict, "reason": result.reason, "seconds": result.seconds}
            for name, result in self.levels.items()
        }
        head = {"schema_version": SCHEMA_VERSION, "verdict": self.verdict, "summary": self.summary, "levels": verdicts}
        return json.dumps(plain(head | dataclasses.asdict(self)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what :meth:`to_json` wrote; the verdicts of the levels are drawn from the checks again.

        Raises:
            ValueError: It is no report, or one of another version.
        """
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"is not valid JSON: {error}") from None
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(f"has schema version {version}, and this program reads version {SCHEMA_VERSION}")
        try:
            names = [field.name for field in dataclasses.fields(cls)]
            report = cls(**{name: data[name] for name in names if name in data or name not in _ADDED_LATER})
            report.checks = [_check(**check) for check in data["checks"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"is not a validation report: {type(error).__name__}: {error}") from None
        return report


def load(path: str | Path) -> Report:
    """Read an earlier run.

    Args:
        path: Its directory, or its ``report.json``.

    Raises:
        ValueError: There is none, or it cannot be read; one line says why.
    """
    path = Path(path)
    file = path / "report.json" if path.is_dir() else path
    try:
        return Report.from_json(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(f"{file} cannot be read: {reason}") from None
    except ValueError as error:
        raise ValueError(f"{file} {error}") from None


def _check(verdict: str, tables: list[dict], plots: list[dict], **fields: Any) -> Check:
    check = Check(verdict=Verdict(verdict), **fields)
    if check.level not in BY_NAME:
        raise ValueError(f"unknown level {check.level!r}")
    check.tables = [Table(**table) for table in tables]
    for plot in plots:
        series = {name: (xs, ys) for name, (xs, ys) in plot.pop("series").items()}
        check.plots.append(Plot(**plot, series=series))
    return check


def verdict_lines(report: Report) -> Iterator[tuple[Verdict, str]]:
    """One line per level: verdict, title, and its numbers or the reason why there are none."""
    width = max(len(level.title) for level in LEVELS)
    for name, result in report.levels.items():
        reason = result.reason.splitlines()[0] if result.reason else ""
        detail = result.headline if result.verdict is Verdict.PASSED else reason or result.headline
        yield (
            result.verdict,
            f"{result.verdict.upper():<10}  {name:<3}  {result.level.title:<{width}}  {detail}".rstrip(),
        )
