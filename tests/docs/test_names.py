"""Names that tests give each other exist: of slow tests, and of functions of injected bugs."""

from __future__ import annotations

from pathlib import Path

import injected_bugs
import pytest

TESTS = Path(__file__).parent.parent


def test_the_names_of_slow_tests_exist() -> None:
    lines = (TESTS / "slow.txt").read_text(encoding="utf-8").splitlines()
    for name in (line for line in lines if not line.startswith("#")):
        file, test = name.partition("[")[0].split("::")
        (path,) = TESTS.rglob(f"{file}.py")
        assert f"def {test}(" in path.read_text(encoding="utf-8"), name


@pytest.mark.torch
def test_every_injected_bug_finds_its_function() -> None:
    """`make nightly` runs their checks. This only shows that no rename has left a bug behind."""
    for mutant in injected_bugs.BUGS.values():
        with mutant.injected():
            pass
