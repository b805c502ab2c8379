"""Which checks each level must contain, so that a run without some of them is never green.

    python -m validation.manifest     # collect all checks, and write the table again

The table is ``manifest.toml``: of every level its checks, and how many cases each has on CPUs, with ``--gpu``, and in a
rehearsal of that. A test holds it equal to what pytest collects.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from validation.checks import Check
from validation.levels import LEVELS

PATH = Path(__file__).with_name("manifest.toml")
MODES = {"cpu": [], "gpu": ["--gpu"], "rehearsal": ["--gpu", "--rehearse"]}

Counts = dict[str, dict[str, int]]  # level to check to number of cases


def without_case(name: str) -> str:
    """The name of a check without the case in brackets."""
    return re.sub(r"\[.*\]", "", name)


def count(checks: Iterable[Check]) -> Counts:
    """How many cases of each check there are."""
    found: Counts = {}
    for check in checks:
        cases = found.setdefault(check.level, {})
        cases[without_case(check.name)] = cases.get(without_case(check.name), 0) + 1
    return found


def missing_from(checks: Iterable[Check], wanted: Mapping[str, int]) -> list[str]:
    """Which checks a level lacks, in words; none where it has all of them."""
    found: dict[str, int] = {}
    for cases in count(checks).values():
        found |= cases
    short = {name: (found.get(name, 0), cases) for name, cases in wanted.items() if found.get(name, 0) < cases}
    return [f"{name} ({cases - there} of {cases})" if cases > 1 else name for name, (there, cases) in short.items()]


def expected(mode: str, path: Path = PATH) -> Counts:
    """What a run of that mode must contain.

    Args:
        mode: One of :data:`MODES`.
        path: Of the table.
    """
    column = list(MODES).index(mode)
    table = tomllib.loads(path.read_text("utf-8"))
    counts = {level: {name: cases[column] for name, cases in rows.items()} for level, rows in table.items()}
    return {level: {name: cases for name, cases in rows.items() if cases} for level, rows in counts.items()}


def to_toml(modes: Mapping[str, Counts]) -> str:
    """The table of what was collected in each mode."""
    lines = [
        "# The checks of every level and how many cases each has: on CPUs, with --gpu, in a rehearsal of that.",
        "# Written by `python -m validation.manifest`.",
    ]
    for level in LEVELS:
        rows = {name: None for counts in modes.values() for name in counts.get(level.name, {})}
        lines += ["", f"[{level.name}]"]
        for name in sorted(rows):
            cases = [counts.get(level.name, {}).get(name, 0) for counts in modes.values()]
            lines.append(f"{json.dumps(name)} = {cases}")
    return "\n".join(lines) + "\n"


def collected() -> str:
    """What pytest collects in each mode, as the table.

    Raises:
        RuntimeError: Something could not be collected.
    """
    import pytest

    from validation.conftest import REPORT

    class Keep:
        checks: list[Check]

        def pytest_collection_finish(self, session: pytest.Session) -> None:
            report = session.config.stash[REPORT]
            if report.errors or report.skipped:
                raise RuntimeError(f"not everything can be collected here: {[*report.errors, *report.skipped]}")
            self.checks = report.checks

    modes: dict[str, Counts] = {}
    for mode, options in MODES.items():
        keep, said = Keep(), io.StringIO()
        arguments = [str(PATH.parent), "--collect-only", "-q", "-p", "no:cacheprovider", *options]
        with contextlib.redirect_stdout(said):
            ended = pytest.main(arguments, plugins=[keep])
        if ended != pytest.ExitCode.OK:
            raise RuntimeError(f"pytest {' '.join(arguments)} ended with {ended!r}: {said.getvalue()[-500:]}")
        modes[mode] = count(keep.checks)
    return to_toml(modes)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(collected(), end="")
    else:
        PATH.write_text(collected(), encoding="utf-8")
