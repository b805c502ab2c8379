"""The records of runs of ``pytest validation``: checks, verdicts, and their JSON file.

One run writes one record, of one commit. In a notebook, with ``report = load(DIR)``:
``report["L8"].checks``, ``report.table("L8", TITLE).column("K")``.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eagle3_jax.measure.tables import Table
from validation.levels import BY_NAME, LEVELS, Level

SCHEMA_VERSION = 1
# measures the shape of a large model, so it is collected with --gpu only
GPU_ONLY = "test_speed_simulated.py"
# Words in the names of checks that records of earlier versions have, and the words that replaced
# them.
RENAMED = {
    "law": "distribution",
    "drawn draft is drawn": "sampled draft is sampled",
    "drawn drafts": "sampled drafts",
    "beside": "next to",
}
# The two sources of what vLLM writes, in the names of checks and in reasons.
RECORDED = "vLLM, recorded"
RUN = "vLLM, run"
DESELECTED = "deselected by --quick"
NO_VLLM = f"{RUN}: not installed"
# How the reasons of checks begin that a level passes a quick run without.
NOT_IN_QUICK = (DESELECTED, NO_VLLM)
_LEVEL_MARK = re.compile(r"level\(['\"](\w+)['\"]\)")


class Verdict(enum.StrEnum):
    """How a check, a level or a run ended."""

    PASSED = "passed"
    #: A level or a run with ``--quick``: every check that such a run has passed, with fewer prompts
    #: and fewer cases.
    QUICK = "passed (quick)"
    FAILED = "failed"
    PARTLY = "partly run"  #: Some checks of a level passed, and others did not run.
    NOT_RUN = "not run"

    @classmethod
    def join(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """Returns the verdict of a level from its checks', or of a run from its levels'."""
        present = set(verdicts)
        if cls.FAILED in present:
            return cls.FAILED
        if present == {cls.PASSED}:
            return cls.PASSED
        if present and present <= {cls.PASSED, cls.QUICK}:
            return cls.QUICK
        return cls.PARTLY if present & {cls.PASSED, cls.QUICK, cls.PARTLY} else cls.NOT_RUN


@dataclasses.dataclass
class Check:
    """One test of a level, and the numbers that its verdict depends on."""

    level: str  #: Name of its level.
    name: str  #: Name of the check.
    verdict: Verdict = Verdict.NOT_RUN  #: ``NOT_RUN`` until the test ends.
    reason: str = ""  #: Why it failed or did not run.
    seconds: float = 0.0  #: Wall time.
    expected: float = 0.0  #: Seconds that it took in an earlier run on such a device; 0 if unknown.
    taken_over: str = ""  #: When the earlier run began that ran it; empty for a check of this run.
    numbers: dict[str, Any] = dataclasses.field(
        default_factory=dict
    )  #: Name to number or short text.
    tables: list[Table] = dataclasses.field(default_factory=list)  #: Tables, in order.
    #: The smallest deviation that the check detects with 90 % power, in words; empty for a
    #: deterministic check.
    sees: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Level and name."""
        return self.level, self.name

    @property
    def kind(self) -> tuple[str, str]:
        """Level and name without the case in brackets."""
        return self.level, re.sub(r"\[.*\]", "", self.name)

    def number(self, **numbers: Any) -> None:
        """Stores numbers under their names."""
        self.numbers |= numbers

    def table(self, title: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Stores a table."""
        self.tables.append(Table(title, columns, rows))


@dataclasses.dataclass(frozen=True)
class LevelResult:
    """The verdict of one level."""

    level: Level  #: The claim.
    checks: list[Check]  #: Every collected check, also those that did not run.
    #: ``FAILED`` if a check failed, ``PASSED`` only if every check of the level ran and passed,
    #: ``QUICK`` only if every check of a quick run did; those that need vLLM are none where there
    #: is no vLLM.
    verdict: Verdict
    reason: str  #: Why it is not ``PASSED``.

    @property
    def sees(self) -> list[str]:
        """The smallest deviations that its checks detect, without repetitions."""
        return list(dict.fromkeys(check.sees for check in self.checks if check.sees))


@dataclasses.dataclass
class Report:
    """A run."""

    #: Machine, versions, models; see :func:`eagle3_jax.measure.environment.environment`.
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Every test that was collected. Checks of a level that no longer exists are ignored.
    checks: list[Check] = dataclasses.field(default_factory=list)
    started: str = ""  #: ISO 8601, UTC.
    seconds: float = 0.0  #: Wall time of the run.
    command: str = ""  #: The command line.
    gpu: bool = False  #: A run with ``--gpu``.
    rehearsal: bool = (
        False  #: A run with ``--rehearse``: its figures are not measurements, so it never passes.
    )
    quick: bool = False  #: A run with ``--quick``: its levels pass as :attr:`Verdict.QUICK`.
    options: str = ""  #: Hash of the options that a check depends on.
    aot: list[str] = dataclasses.field(default_factory=list)  #: Platforms of ``--aot``.
    errors: list[str] = dataclasses.field(
        default_factory=list
    )  #: Modules that could not be collected.
    skipped: list[str] = dataclasses.field(
        default_factory=list
    )  #: Modules that skipped themselves, and why.
    #: Level to the names of its checks that the run did not collect, because their file was left
    #: out.
    missing: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    unfinished: str = ""  #: Why the run ended early; empty if it reached its end.

    @property
    def compared(self) -> str:
        """The models that the verdicts are about."""
        subject = self.environment.get("subject", {})
        name = subject.get("name", "no models were loaded")
        reason = subject.get("not the default")
        return f"{name} ({reason})" if reason else name

    @property
    def levels(self) -> dict[str, LevelResult]:
        """A verdict for every level, in their order."""
        return {level.name: self[level.name] for level in LEVELS}

    def includes(self, level: Level) -> bool:
        """Whether the level is part of such a run: some need an option."""
        return not level.only_with or bool(getattr(self, level.only_with))

    def __getitem__(self, name: str) -> LevelResult:
        level = BY_NAME[name]
        checks = [check for check in self.checks if check.level == name]
        chosen = [
            check for check in checks if not (self.quick and check.reason.startswith(NOT_IN_QUICK))
        ]
        verdict = Verdict.join(check.verdict for check in chosen)
        if self.quick and verdict is Verdict.PASSED:
            verdict = Verdict.QUICK

        # A check that failed is the reason of a failed level; otherwise the checks that did not run
        # are.
        reasons = [
            check.reason or check.verdict
            for check in checks
            if check.verdict is not Verdict.PASSED
            and (verdict is not Verdict.FAILED or check.verdict is verdict)
        ]
        lines = [
            reason if count == len(checks) else f"{count} of {len(checks)} checks: {reason}"
            for reason, count in collections.Counter(reasons).items()
        ]

        recorded = [check.verdict for check in checks if RECORDED in check.name]
        if recorded and lines and verdict is not Verdict.FAILED:
            num_passed = recorded.count(Verdict.PASSED)
            lines[0] = f"{RECORDED}: {num_passed} of {len(recorded)} checks passed; {lines[0]}"

        missing = self.missing.get(name)
        if missing and checks:
            lines.append(f"not collected: {', '.join(missing)}")
            verdict = Verdict.PARTLY if verdict in (Verdict.PASSED, Verdict.QUICK) else verdict
        if verdict is Verdict.QUICK:
            lines.insert(0, f"quick: {len(chosen)} of {len(checks)} checks, with fewer prompts")

        if not checks:
            lines = [self.unfinished or "no check of it was part of this run"]
        return LevelResult(level, checks, verdict, "\n".join(lines))

    def table(self, level: str, title: str) -> Table:
        """Returns a table by its title.

        Raises:
            KeyError: The level has no table of that title.
        """
        tables = {table.title: table for check in self[level].checks for table in check.tables}
        if title not in tables:
            raise KeyError(f"{level} has no table {title!r}, but {list(tables)}")
        return tables[title]

    @property
    def verdict(self) -> Verdict:
        """The verdict of the run."""
        if self.errors:
            return Verdict.FAILED
        verdict = Verdict.join(result.verdict for result in self.levels.values())
        proves_all = not (self.rehearsal or self.skipped or self.unfinished)
        return (
            Verdict.PARTLY
            if verdict in (Verdict.PASSED, Verdict.QUICK) and not proves_all
            else verdict
        )

    @property
    def summary(self) -> str:
        """The verdict in words, with the names of the levels."""
        parts = ["Rehearsal: no figure of this run is a measurement."] if self.rehearsal else []
        parts += [f"{self.unfinished.capitalize()}."] if self.unfinished else []
        for verdict in Verdict:
            names = [name for name, result in self.levels.items() if result.verdict is verdict]
            parts += [f"{verdict.capitalize()}: {', '.join(names)}."] if names else []

        dates = collections.Counter(check.taken_over for check in self.checks if check.taken_over)
        parts += [
            f"Taken over from an earlier run, {date}: {count} checks."
            for date, count in sorted(dates.items())
        ]
        for modules, problem in (
            (self.errors, "could not be read"),
            (self.skipped, "skipped themselves"),
        ):
            parts += [f"Modules that {problem}: {len(modules)}."] if modules else []
        return " ".join(parts)

    def incomplete(self, names: Iterable[str] = ()) -> list[str]:
        """Returns one line for everything that ``--complete`` requires and the run lacks.

        Args:
            names: Names of the required levels; all levels that such a run includes if empty.
        """
        required = set(names) or {level.name for level in LEVELS if self.includes(level)}
        lines = [
            f"{name} {result.verdict}: {' '.join(result.reason.split())}"
            for name, result in self.levels.items()
            if name in required and result.verdict is not Verdict.PASSED
        ]
        return lines + [f"not collected: {line}" for line in [*self.errors, *self.skipped]]

    def to_json(self) -> str:
        """Returns strict JSON, the verdict first; NaN and infinity become ``null``."""
        levels = {
            name: {"verdict": result.verdict, "reason": result.reason}
            for name, result in self.levels.items()
        }
        head = {
            "schema_version": SCHEMA_VERSION,
            "verdict": self.verdict,
            "summary": self.summary,
            "levels": levels,
        }

        text = json.dumps(head | dataclasses.asdict(self), default=_plain)
        finite = json.loads(text, parse_constant=lambda constant: None)
        return json.dumps(finite, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def _read_check(
    name: str, verdict: str, tables: list[dict], plots: object = None, **fields: Any
) -> Check:
    """Makes a check of a record. Earlier ones have plots, which are ignored, and other names."""
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return Check(
        name=name, verdict=Verdict(verdict), tables=[Table(**table) for table in tables], **fields
    )


def load(path: str | Path) -> Report:
    """Reads an earlier run. The verdicts of levels are computed from the checks again.

    Args:
        path: Its directory, or its ``report.json``.

    Raises:
        ValueError: There is no such file, or it is not a report of this schema version; the message
            is one line.
    """
    path = Path(path)
    file = path / "report.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None

    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{file} has schema version {version}, and this program reads version {SCHEMA_VERSION}"
        )
    try:
        names = [field.name for field in dataclasses.fields(Report)]
        report = Report(**{name: data[name] for name in names if name in data})
        report.checks = [_read_check(**check) for check in data["checks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is not a validation report: {type(error).__name__}: {error}"
        ) from None
    return report


def check_name(test: str) -> str:
    """Returns the name of a check, with its case, from the name of its test function."""
    return test.replace("::", ": ").replace("test_", "").replace("_", " ")


def checks_in(folder: Path, *, gpu: bool) -> set[tuple[str, str]]:
    """Returns level and name of every check in the test files of a folder.

    The files are read and not imported, so a file that cannot be imported or that a run leaves out
    counts too.
    """
    checks = set()
    for path in sorted(folder.glob("test_*.py")):
        if path.name == GPU_ONLY and not gpu:
            continue
        of_module = ""
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                of_module = ast.unparse(node.value)
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                marks = " ".join(map(ast.unparse, node.decorator_list))
                level = _LEVEL_MARK.search(marks) or _LEVEL_MARK.search(of_module)
                checks |= {(level[1], check_name(node.name))} if level else set()
    return checks


def verdict_lines(report: Report) -> Iterator[tuple[Verdict, str]]:
    """Yields a line for each level: verdict, title, number of checks, why it did not pass."""
    width = max(len(level.title) for level in LEVELS)
    for name, result in report.levels.items():
        detail = result.reason.partition("\n")[0] or f"checks: {len(result.checks)}"
        yield (
            result.verdict,
            f"{result.verdict.upper():<14}  {name:<3}  {result.level.title:<{width}}  {detail}",
        )


def _plain(value: Any) -> Any:
    """Converts what JSON does not have.

    An unknown type becomes text, because a report is written after hours.
    """
    if hasattr(value, "tolist"):  # arrays and scalars of numpy and jax
        return value.tolist()
    return value.name if isinstance(value, Path) else str(value)  # directories are private
