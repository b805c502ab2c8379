"""The records of a run of ``pytest validation``: checks, verdicts of levels, and the JSON file that keeps them.

In a notebook, with ``report = load(DIR)``: ``report["L8"].checks``, ``report.table("L8", TITLE).column("K")``.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from eagle3_jax.bench.tables import Table, show
from validation.levels import BY_NAME, LEVELS, Level

SCHEMA_VERSION = 1
# For each level its checks, and the number of cases of each on CPUs, with --gpu, and in a rehearsal.
MANIFEST = Path(__file__).with_name("manifest.toml")
MODES = {"cpu": [], "gpu": ["--gpu"], "rehearsal": ["--gpu", "--rehearse"]}
Counts = dict[str, dict[str, int]]  # level to check to number of cases


class Verdict(enum.StrEnum):
    """How a check or a level ended. A level that ran in part is never green."""

    PASSED = "passed"
    FAILED = "failed"
    PARTLY = "partly run"
    NOT_RUN = "not run"


@dataclasses.dataclass
class Check:
    """One test of a level, and the numbers behind its verdict."""

    level: str  #: Name of its level.
    name: str  #: Name of the check.
    #: ``NOT_RUN`` until the test ends. A check that passes on less than it should have seen sets ``PARTLY``.
    verdict: Verdict = Verdict.NOT_RUN
    reason: str = ""  #: Why it failed or did not run.
    seconds: float = 0.0  #: Wall time.
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)  #: Name to number or short text.
    tables: list[Table] = dataclasses.field(default_factory=list)  #: Tables, in order.
    #: The smallest deviation that the check detects with 90 % power, in words; empty for a check without chance.
    sees: str = ""

    @property
    def deselected(self) -> bool:
        """Whether the options of the run left it out."""
        return self.verdict is Verdict.NOT_RUN and self.reason.startswith("deselected")

    def number(self, **numbers: Any) -> None:
        """Keep numbers under their names."""
        self.numbers |= numbers

    def table(self, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Keep a table."""
        self.tables.append(Table(title, columns, rows))


@dataclasses.dataclass(frozen=True)
class LevelResult:
    """The verdict of one level."""

    level: Level  #: The claim.
    checks: list[Check]  #: All that were collected, whether they ran or not.
    verdict: Verdict  #: ``FAILED`` if one failed, ``PASSED`` only if all passed and the manifest names no other.
    reason: str  #: Why it is not ``PASSED``.

    @property
    def seconds(self) -> float:
        return sum(check.seconds for check in self.checks)

    @property
    def sees(self) -> list[str]:
        """The smallest deviations that its checks detect, without repetitions."""
        return list(dict.fromkeys(check.sees for check in self.checks if check.sees))

    @property
    def headline(self) -> str:
        """The first three numbers over all checks: a value, or the smallest and the largest."""
        values: dict[str, list[Any]] = {}
        for check in self.checks:
            for name, value in check.numbers.items():
                values.setdefault(name, []).append(value)
        return ", ".join(f"{name} {_span(found)}" for name, found in list(values.items())[:3])


@dataclasses.dataclass
class Report:
    """A run."""

    #: Machine, versions, models; see :func:`eagle3_jax.bench.environment.environment`.
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Every test that was collected. A check of a level that no longer exists is kept and judges nothing.
    checks: list[Check] = dataclasses.field(default_factory=list)
    started: str = ""  #: ISO 8601, UTC.
    seconds: float = 0.0  #: Wall time of the run.
    command: str = ""  #: The command line.
    gpu: bool = False  #: A run with ``--gpu``.
    rehearsal: bool = False  #: A run with ``--rehearse``: it tries the flow, and nothing it measured counts.
    errors: list[str] = dataclasses.field(default_factory=list)  #: Modules that could not be collected.
    skipped: list[str] = dataclasses.field(default_factory=list)  #: Modules that skipped themselves, and why.
    #: Level to check to number of cases: what the run should contain. Older reports have none; their levels are judged
    #: by what was collected.
    manifest: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    #: Command lines of the runs that this report was merged from.
    parts: list[str] = dataclasses.field(default_factory=list)
    aot: list[str] = dataclasses.field(default_factory=list)  #: Platforms of ``--aot``.

    @property
    def compared(self) -> str:
        """The models that the verdicts are about."""
        subject = self.environment.get("subject", {})
        name = subject.get("name", "no models of their own")
        reason = subject.get("not the default")
        return f"{name} ({reason})" if reason else name

    @property
    def levels(self) -> dict[str, LevelResult]:
        """A verdict for every level, in their order."""
        return {level.name: self[level.name] for level in LEVELS}

    def asks_for(self, level: Level) -> bool:
        """Whether the level is part of such a run: some need an option."""
        return not level.only_with or bool(getattr(self, level.only_with))

    def __getitem__(self, name: str) -> LevelResult:
        level = BY_NAME[name]
        checks = [check for check in self.checks if check.level == name]
        verdicts = {check.verdict for check in checks}
        if not checks:
            verdict = Verdict.NOT_RUN
            reason = "deselected: no check of it was part of this run"
            if not self.asks_for(level):
                reason = f"only with --{level.only_with}"
        elif Verdict.FAILED in verdicts:
            verdict = Verdict.FAILED
            reason = _reasons(checks, Verdict.FAILED)
        elif len(verdicts) == 1:
            (verdict,) = verdicts
            reason = "" if verdict is Verdict.PASSED else _reasons(checks, verdict)
        else:
            verdict = Verdict.PARTLY
            reason = _reasons(checks, Verdict.PARTLY, Verdict.NOT_RUN)
        missing = missing_from(checks, self.manifest.get(name, {}))
        if missing and verdict in (Verdict.PASSED, Verdict.PARTLY):
            verdict = Verdict.PARTLY
            reason = "\n".join(filter(None, [reason, f"not collected: {', '.join(missing)}"]))
        return LevelResult(level, checks, verdict, reason)

    def table(self, level: str, title: str) -> Table:
        """A table by its title.

        Raises:
            KeyError: The level has no table of that title.
        """
        tables = {table.title: table for check in self[level].checks for table in check.tables}
        if title not in tables:
            raise KeyError(f"{level} has no table {title!r}, but {list(tables)}")
        return tables[title]

    @property
    def verdict(self) -> Verdict:
        """Of the whole run. A rehearsal proves nothing, so it never passes."""
        verdicts = [result.verdict for result in self.levels.values()]
        if self.errors or Verdict.FAILED in verdicts:
            return Verdict.FAILED
        if all(verdict is Verdict.NOT_RUN for verdict in verdicts):
            return Verdict.NOT_RUN
        all_passed = all(verdict is Verdict.PASSED for verdict in verdicts) and not self.skipped
        return Verdict.PASSED if all_passed and not self.rehearsal else Verdict.PARTLY

    @property
    def summary(self) -> str:
        """The verdict in words. It names the levels that failed and those that are open."""
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
            parts.append(f"Modules that could not be read: {len(self.errors)}.")
        if self.skipped:
            parts.append(f"Modules that skipped themselves: {len(self.skipped)}.")
        return " ".join(parts)

    def incomplete(self, levels: Collection[str] = ()) -> list[str]:
        """What ``--complete`` asks for and the run lacks, one line each.

        Args:
            levels: Names of levels; all that such a run has if empty.
        """
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
        """Strict JSON: numpy's numbers become plain ones, NaN and infinity become ``null``."""
        verdicts = {
            name: {"verdict": result.verdict, "reason": result.reason, "seconds": result.seconds}
            for name, result in self.levels.items()
        }
        head = {"schema_version": SCHEMA_VERSION, "verdict": self.verdict, "summary": self.summary, "levels": verdicts}
        return json.dumps(plain(head | dataclasses.asdict(self)), indent=1, allow_nan=False, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what :meth:`to_json` wrote. The verdicts of levels are computed from the checks again.

        Raises:
            ValueError: It is no report, or a report of another version.
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
            report = cls(**{name: data[name] for name in names if name in data})
            report.checks = [_read_check(**check) for check in data["checks"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"is not a validation report: {type(error).__name__}: {error}") from None
        return report


def without_case(name: str) -> str:
    """The name of a check without the case in brackets."""
    return re.sub(r"\[.*\]", "", name)


def count(checks: Iterable[Check]) -> Counts:
    """The number of cases of each check."""
    found: Counts = {}
    for check in checks:
        cases = found.setdefault(check.level, {})
        cases[without_case(check.name)] = cases.get(without_case(check.name), 0) + 1
    return found


def missing_from(checks: Iterable[Check], wanted: Mapping[str, int]) -> list[str]:
    """The checks that a level lacks, in words; empty if it has all of them."""
    found = {name: cases for rows in count(checks).values() for name, cases in rows.items()}
    short = {name: (found.get(name, 0), cases) for name, cases in wanted.items() if found.get(name, 0) < cases}
    return [f"{name} ({there} of {cases})" if cases > 1 else name for name, (there, cases) in short.items()]


def expected(mode: str, path: Path = MANIFEST) -> Counts:
    """What a run of a mode must contain."""
    column = list(MODES).index(mode)
    table = tomllib.loads(path.read_text("utf-8"))
    return {
        level: {name: cases[column] for name, cases in rows.items() if cases[column]} for level, rows in table.items()
    }


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


def _read_check(verdict: str, tables: list[dict], plots: object = None, **fields: Any) -> Check:
    """A check of a record. Records of earlier versions have plots, which are not read."""
    return Check(verdict=Verdict(verdict), tables=[Table(**table) for table in tables], **fields)


def verdict_lines(report: Report) -> Iterator[tuple[Verdict, str]]:
    """One line for each level: verdict, title, and its numbers or the reason why it has none."""
    width = max(len(level.title) for level in LEVELS)
    for name, result in report.levels.items():
        reason = result.reason.splitlines()[0] if result.reason else ""
        detail = result.headline if result.verdict is Verdict.PASSED else reason or result.headline
        yield (
            result.verdict,
            f"{result.verdict.upper():<10}  {name:<3}  {result.level.title:<{width}}  {detail}".rstrip(),
        )


def plain(value: Any) -> Any:
    """Convert a value to JSON types. An unknown type becomes text, because a report is written after hours of work."""
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


def _reasons(checks: list[Check], *verdicts: Verdict) -> str:
    """The reasons of the checks with these verdicts, without repetitions."""
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


def _span(values: list[Any]) -> str:
    try:
        low = min(values)
        high = max(values)
    except (TypeError, ValueError):  # texts among numbers, or arrays
        low = values[0]
        high = values[-1]
    low, high = plain([low, high])
    return show(low) if low == high else f"{show(low)} to {show(high)}"
