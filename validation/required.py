"""Which checks each level must contain, so that a run without some of them is never green.

The table is ``manifest.toml``: of every level its checks, and how many cases each has on CPUs, with ``--gpu``, and in a
rehearsal of that.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from validation.checks import Check

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
