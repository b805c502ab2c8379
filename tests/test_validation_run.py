"""A run of ``pytest validation``: what its report says of each test, and how it ends."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from validation.checks import Verdict
from validation.levels import LEVELS
from validation.merging import merge

pytest_plugins = ["pytester", "validation_runs"]
ROOT = Path(__file__).parent.parent
PASSED, FAILED, PARTLY, NOT_RUN = Verdict.PASSED, Verdict.FAILED, Verdict.PARTLY, Verdict.NOT_RUN


TESTS = """
@level("L0")
@pytest.mark.parametrize("k", [1, 2])
def test_law_of(check, k):
    check.number(outcomes=k * 10)

@level("L1")
def test_fails():
    assert 1 == 2, "one is not two"

@level("L2")
def test_skips():
    pytest.skip("there is no vLLM")

@level("L3")
def test_half_passes():
    pass

@level("L3")
def test_half_skips():
    pytest.skip("no time")

@level("L7")
def test_on_a_gpu():
    raise AssertionError("must not run")

@pytest.fixture
def broken():
    raise OSError("no such port\\nand more")

@level("L8")
def test_cannot_start(broken):
    pass

@pytest.fixture
def untidy():
    yield
    raise OSError("left over")

@level("L9")
def test_cannot_stop(untidy):
    pass
"""


def test_a_failing_run_writes_what_each_test_had_to_say(validate) -> None:
    result, report = validate(TESTS)
    assert result.ret == 1
    found = {name: (level.verdict, level.reason) for name, level in report.levels.items() if level.checks}
    assert found == {
        "L0": (PASSED, ""),
        "L1": (FAILED, "one is not two\nassert 1 == 2"),
        "L2": (NOT_RUN, "there is no vLLM"),
        "L3": (PARTLY, "half skips: no time"),
        "L7": (NOT_RUN, "only with --gpu"),
        "L8": (FAILED, "setup: OSError: no such port"),
        "L9": (FAILED, "teardown: OSError: left over"),
    }
    assert [check.name for check in report["L0"].checks] == ["law of[1]", "law of[2]"]
    assert report["L0"].numbers == {"law of[1]: outcomes": 10, "law of[2]: outcomes": 20}
    assert report.command.endswith("no:cacheprovider") and report.environment["versions"]["jax"]
    lines = ["PASSED *L0*outcomes 10 to 20", "FAILED *L1*one is not two", "NOT RUN *L2*no vLLM", "Report: out*"]
    result.stdout.fnmatch_lines(lines)


def test_what_was_deselected_leaves_its_level_in_part(validate) -> None:
    _, report = validate(TESTS, "-k", "law_of and 1")
    assert report["L0"].verdict == PARTLY and report["L1"].reason == "deselected"


def test_an_interrupted_run_writes_what_it_has(validate) -> None:
    source = """
@level("L0")
def test_done(): pass
@level("L1")
def test_interrupted(): raise KeyboardInterrupt
@level("L2")
def test_never(): pass
"""
    result, report = validate(source, subprocess=True)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert report["L0"].verdict == PASSED
    for name in ("L1", "L2"):
        assert report[name].verdict == NOT_RUN and "interrupted" in report[name].reason
    result.stdout.fnmatch_lines(["NOT RUN *L2*interrupted*"])


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL"])
def test_a_run_that_is_cut_off_has_written_what_it_knew(validate, name: str) -> None:
    source = f"""
import os, signal
@level("L0")
def test_done(check): check.number(outcomes=3)
@level("L1")
def test_cut(): os.kill(os.getpid(), signal.{name})
@level("L2")
def test_never(): pass
"""
    result, cut = validate(source, subprocess=True)
    assert result.ret < 0
    assert cut["L0"].verdict == PASSED and cut["L0"].numbers == {"outcomes": 3}
    for level in ("L1", "L2"):
        assert cut[level].verdict == NOT_RUN and cut[level].reason == "not finished: the run was cut off"
    _, rest = validate(source.replace(f"os.kill(os.getpid(), signal.{name})", "pass"), "-k", "not done")
    together = merge({"first": cut, "second": rest})
    assert [together[level].verdict for level in ("L0", "L1", "L2")] == [PASSED] * 3


def test_modules_that_nobody_could_read_are_part_of_the_verdict(validate, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_broken="import nothing_of_that_name")
    pytester.makepyfile(test_absent="import pytest; pytest.skip('no /opt/torch/lib here', allow_module_level=True)")
    _, report = validate("@level('L0')\ndef test_it(): pass", "--continue-on-collection-errors")
    assert report["L0"].verdict == PASSED and report.verdict == FAILED
    assert (
        len(report.errors) == 1 and "test_broken.py" in report.errors[0] and "nothing_of_that_name" in report.errors[0]
    )
    assert report.skipped == ["test_absent.py: no lib here"]


EVERY_LEVEL = "\n".join(f"@level({level.name!r})\ndef test_{level.name}(): pass" for level in LEVELS)


def test_complete_is_content_with_all_levels(validate) -> None:
    result, report = validate(EVERY_LEVEL, "--complete")
    assert result.ret == 0
    assert {name for name, one in report.levels.items() if one.verdict != PASSED} == {"L7", "AOT"}, "by option only"


def test_complete_fails_on_a_skip_and_names_it(validate) -> None:
    source = EVERY_LEVEL + "\n@level('L5')\ndef test_more(): pytest.skip('no vLLM')"
    assert validate(source)[0].ret == 0
    result, _ = validate(source, "--complete")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["--complete: *not complete", "  L5 partly run: more: no vLLM"])


def test_gpu_without_cuda_is_one_line(validate) -> None:
    result, report = validate("@level('L0')\ndef test_it(): pass", "--gpu", subprocess=True)
    assert result.ret == 4 and report is None
    (line,) = [line for line in result.outlines + result.errlines if line]
    assert line.startswith("ERROR: --gpu: jax ") and line.endswith("; or add --rehearse to try the flow without a GPU")
    assert "sees only cpu, for JAX_PLATFORMS is cpu; unset it" in line


def test_a_rehearsal_runs_gpu_levels_and_never_passes(validate) -> None:
    result, report = validate(EVERY_LEVEL, "--gpu", "--rehearse", "--complete")
    assert result.ret == 0 and report["L7"].verdict == PASSED
    assert report.rehearsal and report.verdict == PARTLY and report.summary.startswith("Rehearsal")


@pytest.mark.parametrize(
    ("options", "source", "message"),
    [
        (["--rehearse"], "", "--rehearse is for a run with --gpu*"),
        (["--target", "."], "", "* holds no [*].json, [*].safetensors or [*].bin"),
        (["--prompts", "nowhere.jsonl"], "", "--prompts: there is no file nowhere.jsonl"),
        (["--price-per-hour", "0"], "", "--price-per-hour must be above zero, not 0"),
        (["--price-per-hour=-1.5"], "", "--price-per-hour must be above zero, not -1.5"),
        ([], "def test_it(): pass", "test_levels.py::test_it belongs to no level*"),
        ([], "@level('L99')\ndef test_it(): pass", "test_levels.py::test_it: level('L99') is none of L0, *"),
        ([], "@level()\ndef test_it(): pass", "test_levels.py::test_it: level(nothing) is none of L0, *"),
    ],
)
def test_misuse_is_one_line_and_no_run(validate, options: list[str], source: str, message: str) -> None:
    result, report = validate(source, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR and report is None
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert len([line for line in result.errlines if line]) == 1


def test_the_marker_of_the_levels_is_known_to_strict_pytest(validate) -> None:
    strictness = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    result, report = validate("@level('L0')\ndef test_it(): pass", *strictness.split())
    assert result.ret == 0 and report["L0"].verdict == PASSED
