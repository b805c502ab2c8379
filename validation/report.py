"""What a run found, as JSON for machines and as one page for people.

    python -m validation.report show DIR          # the verdicts of an earlier run
    python -m validation.report compare OLD NEW   # what changed between two of them, as Markdown
    python -m validation.report page DIR          # write the page again, such as where matplotlib is installed

In a notebook, with ``report = load(DIR)``: ``report["L8"].numbers``, ``report.table("L8", TITLE).column("K")``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.reporting.tables import Plot, Table, flat, show, to_markdown, write_text
from validation.levels import BY_NAME, LEVELS, Level

SCHEMA_VERSION = 1


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
        verdict: ``FAILED`` if one failed, ``PASSED`` only if all of at least one passed.
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
    def headline(self) -> str:
        """The first three numbers, over all checks: a value, or from the least to the greatest."""
        values: dict[str, list[Any]] = {}
        for check in self.checks:
            for name, value in check.numbers.items():
                values.setdefault(name, []).append(value)
        return ", ".join(f"{name} {_span(found)}" for name, found in list(values.items())[:3])


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
        rehearsal: A run with ``--rehearse``: the flow was tried; nothing it measured counts.
        errors: Modules that could not be collected. Nobody knows what their checks would have said.
        skipped: Modules that skipped themselves as a whole, and why.
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

    @property
    def levels(self) -> dict[str, LevelResult]:
        """A verdict for every level there is, in their order."""
        return {level.name: self[level.name] for level in LEVELS}

    def __getitem__(self, name: str) -> LevelResult:
        level = BY_NAME[name]
        checks = [check for check in self.checks if check.level == name]
        verdicts = {check.verdict for check in checks}
        if not checks:
            verdict = Verdict.NOT_RUN
            only_gpu = level.gpu_only and not self.gpu
            reason = "only with --gpu" if only_gpu else "deselected: no check of it was part of this run"
        elif Verdict.FAILED in verdicts:
            verdict, reason = Verdict.FAILED, _reasons(checks, Verdict.FAILED)
        elif len(verdicts) == 1:
            (verdict,) = verdicts
            reason = "" if verdict is Verdict.PASSED else _reasons(checks, verdict)
        else:
            verdict, reason = Verdict.PARTLY, _reasons(checks, Verdict.PARTLY, Verdict.NOT_RUN)
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

    def incomplete(self) -> list[str]:
        """What ``--complete`` asks for and this run lacks, a line each; GPU levels count in a run with ``--gpu``."""
        wanted = [result for result in self.levels.values() if self.gpu or not result.level.gpu_only]
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
        return json.dumps(_plain(head | dataclasses.asdict(self)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"

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
            report = cls(**{field.name: data[field.name] for field in dataclasses.fields(cls)})
            report.checks = [_check(**check) for check in data["checks"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"is not a validation report: {type(error).__name__}: {error}") from None
        return report

    def write(self, directory: str | Path) -> Path:
        """Write ``report.json`` and ``report.html``, each whole or not at all, and say where the best of them is.

        Without jinja2 there is no page, and an earlier one is removed: it would be another run's.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        data, page = directory / "report.json", directory / "report.html"
        write_text(data, self.to_json())
        # Numbers are read as a notebook would read them, so that page and JSON never differ.
        text = _page(Report.from_json(data.read_text("utf-8")))
        if text is None:
            page.unlink(missing_ok=True)
            return data
        write_text(page, text)
        return page


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
    """

    verdicts: list[Change]
    rows: list[Change]
    facts: list[Change]

    def to_markdown(self) -> str:
        """Three tables, for an issue or a pull request."""
        verdicts = [[c.level, c.old, c.new, "" if c.old == c.new else "changed"] for c in self.verdicts]
        numbers = [[c.level, c.check, c.name, *map(show, (c.old, c.new, c.ratio))] for c in self.rows]
        parts = [to_markdown(["level", "old", "new", ""], verdicts)]
        if self.rows:
            parts.append(to_markdown(["level", "check", "number", "old", "new", "ratio"], numbers))
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
            for name, value in _plain(check.numbers).items()
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
    return Comparison(verdicts, rows, facts)


def _span(values: list[Any]) -> str:
    try:
        low, high = min(values), max(values)
    except (TypeError, ValueError):  # texts among numbers, or arrays
        low, high = values[0], values[-1]
    low, high = _plain([low, high])
    return show(low) if low == high else f"{show(low)} to {show(high)}"


def _reasons(checks: list[Check], *verdicts: Verdict) -> str:
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


def _plain(value: Any) -> Any:
    """What JSON can say. A report is written at the end of hours, so what is not known becomes text, not an error."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and jax
        return _plain(value.tolist())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Path):
        return value.name
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _check(verdict: str, tables: list[dict], plots: list[dict], **fields: Any) -> Check:
    check = Check(verdict=Verdict(verdict), **fields)
    if check.level not in BY_NAME:
        raise ValueError(f"unknown level {check.level!r}")
    check.tables = [Table(**table) for table in tables]
    for plot in plots:
        series = {name: (xs, ys) for name, (xs, ys) in plot.pop("series").items()}
        check.plots.append(Plot(**plot, series=series))
    return check


def _page(report: Report) -> str | None:
    try:
        from validation.page import render
    except ModuleNotFoundError as error:
        if error.name != "jinja2":
            raise
        return None
    return render(report)


def verdict_lines(report: Report) -> Iterator[tuple[Verdict, str]]:
    """One line per level: verdict, title, and its numbers or the reason why there are none."""
    width = max(len(level.title) for level in LEVELS)
    for name, result in report.levels.items():
        reason = result.reason.splitlines()[0] if result.reason else ""
        detail = result.headline if result.verdict is Verdict.PASSED else reason or result.headline
        yield result.verdict, f"{result.verdict.upper():<10}  {name}  {result.level.title:<{width}}  {detail}".rstrip()


def main(arguments: list[str] | None = None) -> int:
    """``python -m validation.report``."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.report", description="Earlier runs of pytest validation."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{show,compare,page}")
    for name, text in (("show", "print the verdicts of a run"), ("page", "write the page of a run again")):
        commands.add_parser(name, help=text).add_argument("run", help="directory or report.json")
    comparing = commands.add_parser("compare", help="print what changed between two runs, as Markdown")
    comparing.add_argument("old", help="directory or report.json")
    comparing.add_argument("new", help="directory or report.json")
    options = parser.parse_args(arguments)
    try:
        if options.command == "compare":
            print(compare(load(options.old), load(options.new)).to_markdown(), end="")
            return 0
        report = load(options.run)
        if options.command == "page":
            directory = Path(options.run)
            written = report.write(directory if directory.is_dir() else directory.parent)
            if written.suffix != ".html":
                raise ValueError("the page needs jinja2: pip install 'eagle3-jax[validation]'")
            print(written)
            return 0
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(report.summary)
    for _, line in verdict_lines(report):
        print(line)
    return 0


if __name__ == "__main__":
    # Not this module but its importable twin: the page's module imports that one, and there must be one Report.
    from validation.report import main as _main

    sys.exit(_main())
