"""Continuous integration runs every test once, slow ones excepted; those run every night."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import injected_bugs
import pytest

ROOT = Path(__file__).parent.parent.parent


def test_the_lanes_partition_the_tests() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lanes = re.findall(r"MARKS='([^']+)'", text)
    assert len(lanes) == 3
    for torch, bits, slow in itertools.product((False, True), repeat=3):
        chosen = [eval(lane, {"torch": torch, "bits": bits, "slow": slow}) for lane in lanes]
        assert sum(chosen) == (not slow)  # `make nightly` runs the slow ones
    # The largest lane is in parts by folders.
    folders = [folder for names in re.findall(r"\$tests TESTS='?([^'\"]+)", text) for folder in names.split()]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    assert sorted(folders) == sorted(settings["testpaths"])


def test_the_names_of_slow_tests_exist() -> None:
    for name in (ROOT / "tests" / "slow.txt").read_text(encoding="utf-8").split():
        file, test = name.split("::")
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        assert f"def {test}(" in path.read_text(encoding="utf-8"), name


def test_no_file_is_skipped_in_the_only_lane_that_runs_it() -> None:
    """The lane without PyTorch skips a file that cannot import it, so that the other must run the file."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        skipped = re.search(r'^(torch = )?pytest\.importorskip\("torch"\)', text, re.MULTILINE)
        assert not skipped or "\npytestmark = pytest.mark.torch" in text, path


@pytest.mark.torch
def test_every_injected_bug_finds_its_function() -> None:
    """`make nightly` runs their checks. This only shows that no rename has left a bug behind."""
    for mutant in injected_bugs.BUGS.values():
        with mutant.injected():
            pass
