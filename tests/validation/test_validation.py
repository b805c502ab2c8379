"""``pytest validation``: when a check, a level or a run has passed, and when it has not."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest

# pytester forgets the modules that a run imports first, with their types, so this one is imported
# before it.
import validation.conftest
from validation.levels import LEVELS
from validation.report import write
from validation.runs import Check, Report, Verdict, load

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent.parent
PASSED = Verdict.PASSED
FAILED = Verdict.FAILED
QUICK = Verdict.QUICK
PARTLY = Verdict.PARTLY
NOT_RUN = Verdict.NOT_RUN


@pytest.fixture
def validate(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs the given source as ``pytest validation`` would run its tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path))
    # A run with --gpu sets these variables; monkeypatch restores them afterwards.
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def run(
        source: str, *options: str, subprocess: bool = False
    ) -> tuple[pytest.RunResult, Report | None]:
        pytester.makepyfile(test_levels="import pytest\nlevel = pytest.mark.level\n" + source)
        launch = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        plugins = ["-p", validation.conftest.__name__, "-p", "no:cacheprovider"]
        result = launch(*plugins, "--report-dir", "out", *options)
        return result, load("out") if Path("out").exists() else None

    return run


# ---------------------------------------------------------------- one run

SUITE = """
import jax
@level("L0")
@pytest.mark.parametrize("k", [1, 2])
def test_distribution_of(check, k):
    check.number(precision=str(jax.config.jax_default_matmul_precision))

@level("L1")
def test_fails(): assert 1 == 2, "one is not two"

@level("L2")
def test_skips(): pytest.skip("there is no vLLM")

@level("L3")
def test_half_passes(): pass

@level("L3")
def test_half_skips(): pytest.skip("no time")

@level("L4")
def test_is_full(): raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to")

@level("L6")
@pytest.mark.not_quick
def test_nearly_the_same(): pass

@level("L7")
def test_on_a_gpu(): pass

@level("AOT")
def test_compiled(): pass

@pytest.fixture
def broken(): raise OSError("no such port")

@level("L8")
def test_cannot_start(broken): pass

@level("L9")
@pytest.mark.parametrize("k", [1, 2])
def test_speed(check, k):
    check.number(precision=str(jax.config.jax_default_matmul_precision))

@level("L5")
@pytest.mark.parametrize("pair", ["vLLM, recorded: a", "vLLM, recorded: b"])
def test_recorded(pair): pass

@level("L5")
def test_running(): pytest.skip("vLLM, run: not installed")
"""


def test_the_report_has_the_outcome_of_every_test(validate, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_broken="import nothing_of_that_name")
    pytester.makepyfile(
        test_absent="import pytest; pytest.skip('no torch here', allow_module_level=True)"
    )
    result, report = validate(SUITE, "--continue-on-collection-errors")

    outcomes = {
        name: (level.verdict, level.reason) for name, level in report.levels.items() if level.checks
    }
    memory, reason = outcomes.pop("L4")
    assert memory == NOT_RUN and reason.startswith("out of memory (RuntimeError: RESOURCE_EXH")
    recorded = "vLLM, recorded: 2 of 2 checks passed; 1 of 3 checks: vLLM, run: not installed"
    assert outcomes == {
        "L0": (PASSED, ""),
        "L1": (FAILED, "one is not two\nassert 1 == 2"),
        "L2": (NOT_RUN, "there is no vLLM"),
        "L3": (PARTLY, "1 of 2 checks: no time"),
        "L5": (PARTLY, recorded),
        "L6": (PASSED, ""),
        "L7": (NOT_RUN, "only with --gpu"),
        "L8": (FAILED, "setup: OSError: no such port"),
        "L9": (PASSED, ""),
        "AOT": (NOT_RUN, "only with --aot"),
    }
    assert result.ret == 1 and report.verdict == FAILED
    assert len(report.errors) == 1 and report.skipped == ["test_absent.py: no torch here"]


def test_a_level_without_some_of_its_checks_is_not_green(
    validate, pytester: pytest.Pytester
) -> None:
    _, report = validate(SUITE, "--level", "L0", "--level", "L3")
    assert report["L0"].verdict == PASSED and report["L9"].reason == "deselected by --level"

    _, report = validate(SUITE, "--quick")
    counted = "quick: 1 of 2 checks, with fewer prompts\n1 of 2 checks: deselected by --quick"
    assert (report["L0"].verdict, report["L0"].reason) == (QUICK, counted)
    assert (report["L6"].verdict, report["L6"].reason) == (NOT_RUN, "deselected by --quick")

    # A file that was left out counts too.
    pytester.makepyfile(
        test_more="import pytest\n@pytest.mark.level('L0')\ndef test_left_out(): pass"
    )
    _, report = validate(SUITE, "--ignore", "test_more.py", "-k", "distribution")
    assert (report["L0"].verdict, report["L0"].reason) == (PARTLY, "not collected: left out")
    assert load("out")["L0"].verdict == PARTLY


def test_a_rehearsal_runs_gpu_levels_in_full_precision_and_never_passes(validate) -> None:
    _, report = validate(SUITE, "--gpu", "--rehearse", "--aot", "tpu:v6e:2x2")
    assert report["L7"].verdict == report["AOT"].verdict == PASSED
    assert {check.numbers["precision"] for check in report["L0"].checks} == {"highest"}
    # Speeds are measured as users have them.
    assert {check.numbers["precision"] for check in report["L9"].checks} == {"None"}

    everything = [Check(level.name, "all", PASSED) for level in LEVELS]
    assert Report(checks=everything).verdict == PASSED
    assert Report(checks=everything, rehearsal=True).verdict == PARTLY


def test_complete_fails_on_a_skip_and_names_it(validate) -> None:
    every = "\n".join(f"@level({level.name!r})\ndef test_{level.name}(): pass" for level in LEVELS)
    assert validate(every, "--complete")[0].ret == 0
    skipped = "\n@level('L5')\ndef test_more(): pytest.skip('no vLLM')"
    result, _ = validate(every + skipped, "--complete")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["  L5 partly run: 1 of 2 checks: no vLLM"])


KILLED = """
import os
@level("L0")
def test_done(): pass
@level("L1")
def test_killed(): os.kill(os.getpid(), 9)
@level("L2")
def test_never(): pass
"""


def test_a_run_that_is_killed_proves_what_it_finished(validate) -> None:
    _, report = validate(KILLED, subprocess=True)
    verdicts = [report[level].verdict for level in ("L0", "L1", "L2")]
    assert verdicts == [PASSED, NOT_RUN, NOT_RUN]
    assert report.verdict == PARTLY and report.summary.startswith("The run was ")


def test_a_run_without_its_gpu_is_refused(validate) -> None:
    assert validate("", "--gpu")[0].ret == pytest.ExitCode.USAGE_ERROR


def test_tests_of_the_core_run_in_a_process_of_their_own(validate, tmp_path: Path) -> None:
    """With the options of users. A check with a failed, a skipped or no test has not passed."""
    suites = {
        "L0": "import os\ndef test_it(): assert os.environ['XLA_FLAGS'] == ''",
        "L1": "def test_wrong(): assert 1 == 2\ndef test_right(): pass",
        "L2": "import pytest\ndef test_it(): pass\ndef test_no(): pytest.skip('no torch')",
    }
    for level, source in suites.items():
        (tmp_path / f"test_{level}.py").write_text(source)
    lines = ["import os", "os.environ.pop('XLA_FLAGS', None)"]
    lines.append("from validation.test_distribution import run_tests")
    for level in (*suites, "L3"):
        path = str(tmp_path / f"test_{level}.py")
        lines += [f"@level({level!r})", f"def test_{level}(run_tests): run_tests({path!r})"]

    _, report = validate("\n".join(lines))
    verdicts = [report[level].verdict for level in ("L0", "L1", "L2", "L3")]
    assert verdicts == [PASSED, FAILED, NOT_RUN, FAILED]
    assert "1 of 2 tests failed: ['test_wrong']" in report["L1"].reason


# ---------------------------------------------------------------- a budget

# A check of L3 may advance the clock by more than the budget of a run.
TIMED = """
import os, time
clock = time.perf_counter
def ran(name): open("ran", "a").write(name + " ")

@level("L3")
@pytest.mark.parametrize("k", [1, 2])
def test_bits(k):
    ran("L3")
    if os.path.exists("slow"): time.perf_counter = lambda: clock() + 100
@level("HF")
def test_greedy_text(): ran("HF"); assert not os.path.exists("broken")
@level("L0")
def test_rule(): ran("L0")
@level("L5")
def test_vllm(): pytest.skip("vLLM, run: not installed; build one")
"""


@pytest.fixture
def timed(validate, monkeypatch: pytest.MonkeyPatch):
    """Runs a source with a budget. Returns the exit code, the report, and what ran, in order."""

    def run(source: str, *options: str) -> tuple[int, Report, list[str]]:
        with monkeypatch.context() as clock:
            clock.setattr(time, "perf_counter", time.perf_counter)
            options = ("--gpu", "--rehearse", "--quick", "--minutes", "0.5", *options)
            result, report = validate(source, *options)
        ran = Path("ran").read_text().split() if Path("ran").exists() else []
        Path("ran").unlink(missing_ok=True)
        assert report is not None
        return result.ret, report, ran

    return run


def test_a_quick_run_passes_as_one(timed) -> None:
    code, report, ran = timed(TIMED)
    assert code == 0 and ran == ["L3", "HF", "L0"]
    assert report["L3"].verdict == QUICK and report["L5"].verdict == NOT_RUN

    # Where there is no vLLM, a level passes by its other checks, and says how many were left out.
    both = TIMED + "\n@level('L5')\ndef test_recorded(): pass"
    level = timed(both)[1]["L5"]
    assert level.verdict == QUICK and "vLLM, run: not installed" in level.reason

    # Any other reason not to run leaves the level yellow.
    full = both + "\n@level('L5')\ndef test_memory(): pytest.skip('no memory')"
    assert timed(full)[1]["L5"].verdict == PARTLY

    everything = Report(checks=[Check(level.name, "all", PASSED) for level in LEVELS], quick=True)
    assert everything.verdict == QUICK and everything.incomplete(["L0"]) != []


def test_what_a_budget_leaves_out_is_run_next_and_a_failure_remains_one(timed) -> None:
    Path("slow").touch()
    code, first, ran = timed(TIMED)
    assert code == 0 and ran == ["L3"] and first.verdict == PARTLY
    spent = (NOT_RUN, "the budget of 0.5 minutes was spent")
    assert (first["HF"].verdict, first["HF"].reason) == spent

    Path("slow").unlink()
    Path("broken").touch()
    code, second, ran = timed(TIMED)
    assert code == 1 and ran == ["HF", "L0"] and second["HF"].verdict == FAILED
    assert second["L3"].verdict == QUICK and second["L3"].checks[0].taken_over == first.started

    # What failed is a failure until it passes.
    code, third, ran = timed(TIMED, "--level", "L0")
    assert code == 1 and ran == [] and third["HF"].verdict == FAILED
    Path("broken").unlink()
    code, fourth, ran = timed(TIMED)
    assert code == 0 and ran == ["HF"] and fourth["HF"].verdict == QUICK


@pytest.mark.parametrize("part", ["code", "versions", "jax"])
def test_a_run_of_other_code_or_on_another_device_is_not_continued(timed, part: str) -> None:
    _, report, ran = timed(TIMED)
    changed = report.environment | {part: {"device": "x"} if part == "jax" else "another"}
    write(dataclasses.replace(report, environment=changed), "out")
    _, report, again = timed(TIMED)
    assert again == ran and not any(check.taken_over for check in report.checks)
