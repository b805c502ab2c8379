"""``pytest validation``: what its report contains, and how a run ends that is interrupted, incomplete or misused."""

from __future__ import annotations

import ast
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import validated

# pytester forgets the modules that a run imports first, with their types, so this one is imported
# before it.
import validation.conftest
from validation import device
from validation.budget import rank
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


def test_validation_imports_nothing_of_tests() -> None:
    modules = {path.stem for path in (ROOT / "tests").rglob("*.py")} - {"conftest"}
    for file in (ROOT / "validation").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name for name in names if name in modules or name.startswith("tests")}, file


# ---------------------------------------------------------------- one run


@pytest.fixture
def validate(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Runs the given source as ``pytest validation`` would run its tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path))
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # a run with --gpu sets them; this restores them afterwards
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


SUITE = """
import jax
@level("L0")
@pytest.mark.parametrize("k", [1, 2])
def test_distribution_of(check, k):
    check.number(outcomes=k * 10, precision=str(jax.config.jax_default_matmul_precision))

@level("L1")
def test_fails(): assert 1 == 2, "one is not two"

@level("L2")
def test_skips(): pytest.skip("there is no vLLM")

@level("L3")
def test_half_passes(): pass

@level("L3")
def test_half_skips(): pytest.skip("no time")

@level("L4")
def test_is_full(): raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

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
        test_absent="import pytest; pytest.skip('no /opt/torch/lib here', allow_module_level=True)"
    )
    result, report = validate(SUITE, "--continue-on-collection-errors")
    assert result.ret == 1
    outcomes = {
        name: (level.verdict, level.reason) for name, level in report.levels.items() if level.checks
    }
    memory = outcomes.pop("L4")
    assert memory[0] == NOT_RUN and memory[1].startswith(
        "out of memory (RuntimeError: RESOURCE_EXHAUSTED"
    )
    assert outcomes == {
        "L0": (PASSED, ""),
        "L1": (FAILED, "one is not two\nassert 1 == 2"),
        "L2": (NOT_RUN, "there is no vLLM"),
        "L3": (PARTLY, "1 of 2 checks: no time"),
        "L5": (
            PARTLY,
            "vLLM, recorded: 2 of 2 checks passed; 1 of 3 checks: vLLM, run: not installed",
        ),
        "L6": (PASSED, ""),
        "L7": (NOT_RUN, "only with --gpu"),
        "L8": (FAILED, "setup: OSError: no such port"),
        "L9": (PASSED, ""),
        "AOT": (NOT_RUN, "only with --aot"),
    }
    assert [(check.name, check.numbers["outcomes"]) for check in report["L0"].checks] == [
        ("distribution of[1]", 10), ("distribution of[2]", 20),
    ]  # fmt: skip
    assert (
        report.environment["versions"]["jax"] and report.verdict == FAILED and not report.unfinished
    )
    (error,) = report.errors
    assert "test_broken.py" in error and report.skipped == ["test_absent.py: no lib here"], (
        "no directory is named"
    )
    result.stdout.fnmatch_lines(["PASSED *L0*", "FAILED *L1*one is not two", "Report: out*"])


def test_a_level_without_some_of_its_checks_is_not_green(
    validate, pytester: pytest.Pytester
) -> None:
    _, report = validate(SUITE, "--level", "L0", "--level", "L3")
    assert report["L0"].verdict == PASSED and report["L9"].reason == "deselected by --level"
    _, report = validate(SUITE, "--quick")
    counted = "quick: 1 of 2 checks, with fewer prompts\n1 of 2 checks: deselected by --quick"
    assert (report["L0"].verdict, report["L0"].reason) == (QUICK, counted)
    assert report["L9"].verdict == QUICK and report["L9"].reason.startswith("quick: 2 of 2 checks")
    assert (report["L6"].verdict, report["L6"].reason) == (NOT_RUN, "deselected by --quick")
    pytester.makepyfile(
        test_more="import pytest\n@pytest.mark.level('L0')\ndef test_left_out(): pass"
    )
    _, report = validate(SUITE, "--ignore", "test_more.py", "-k", "distribution")
    assert (report["L0"].verdict, report["L0"].reason) == (PARTLY, "not collected: left out")
    assert load("out")["L0"].verdict == PARTLY


def test_a_rehearsal_runs_gpu_levels_in_full_precision_and_never_passes(validate) -> None:
    _, report = validate(SUITE, "--gpu", "--rehearse", "--aot", "tpu:v6e:2x2")
    assert report["L7"].verdict == report["AOT"].verdict == PASSED and report.summary.startswith(
        "Rehearsal"
    )
    assert {check.numbers["precision"] for check in report["L0"].checks} == {"highest"}
    assert {check.numbers["precision"] for check in report["L9"].checks} == {"None"}, (
        "as users have it"
    )
    assert Report(checks=[Check(level.name, "all", PASSED) for level in LEVELS]).verdict == PASSED
    assert (
        Report(
            checks=[Check(level.name, "all", PASSED) for level in LEVELS], rehearsal=True
        ).verdict
        == PARTLY
    )


def test_complete_fails_on_a_skip_and_names_it(validate) -> None:
    every = "\n".join(f"@level({level.name!r})\ndef test_{level.name}(): pass" for level in LEVELS)
    assert validate(every, "--complete")[0].ret == 0
    result, _ = validate(
        every + "\n@level('L5')\ndef test_more(): pytest.skip('no vLLM')", "--complete"
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["--complete: *not complete", "  L5 partly run: 1 of 2 checks: no vLLM"]
    )


CUT = """
import os, signal, time
@level("L0")
def test_done(check): check.number(outcomes=3)
@level("L1")
def test_cut(): END
@level("L2")
def test_never(): pass
"""


@pytest.mark.parametrize(
    ("end", "code"), [("os.kill(os.getpid(), 9)", -9), ("raise KeyboardInterrupt", 2)]
)
def test_a_run_that_is_cut_off_has_written_the_checks_before(validate, end: str, code: int) -> None:
    result, report = validate(CUT.replace("END", end), subprocess=True)
    assert result.ret == code
    assert report["L0"].verdict == PASSED and report["L0"].checks[0].numbers == {"outcomes": 3}
    for level in ("L1", "L2"):
        assert report[level].verdict == NOT_RUN and report[level].reason.startswith(
            "not finished: the run was "
        )
    assert report.summary.startswith("The run was ")


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
def test_a_run_that_is_cut_off_before_its_first_check_says_so(validate, signal: str) -> None:
    """While modules are imported. After SIGTERM, which time limits send, the run also ends orderly, with its page."""
    source = (
        f"import os, signal, time\nos.kill(os.getpid(), signal.{signal})\ntime.sleep(60)\n" + CUT
    )
    result, report = validate(source, subprocess=True)
    assert result.ret == (2 if signal == "SIGTERM" else -9)
    assert report.verdict == NOT_RUN and report.summary.startswith("The run was ")
    assert report["L0"].verdict == NOT_RUN and report["L0"].reason.startswith("the run was ")
    assert "the run was" in Path("out/report.html").read_text().lower()


def test_sigterm_ends_a_check_and_what_it_started(validate) -> None:
    source = CUT.replace("test_cut()", "test_cut(server)").replace(
        "END", "os.kill(os.getpid(), 15); time.sleep(60)"
    )
    fixture = "@pytest.fixture\ndef server():\n    yield\n    open('stopped', 'w').close()\n"
    result, report = validate(fixture + source, subprocess=True)
    assert result.ret == 2 and Path("stopped").exists(), "vLLM's process would have been ended"
    assert report["L0"].verdict == PASSED and report.unfinished == "the run was interrupted"


@pytest.mark.parametrize(
    ("options", "source", "message"),
    [
        (["--gpu"], "", "--gpu: jax *; or add --rehearse to try the flow without a GPU"),
        (["--rehearse"], "", "--rehearse is for a run with --gpu*"),
        (["--level", "L5X"], "", "--level L5X is none of L0, *"),
        (
            ["--aot", "cuda:h2000"],
            "",
            "--aot: there is no platform 'cuda:h2000' to compile for; use one of *",
        ),
        (["--target", "."], "", "* holds no [*].json, [*].safetensors or [*].bin"),
        (["--prompts", "nowhere.jsonl"], "", "--prompts: there is no file nowhere.jsonl"),
        (["--minutes", "0"], "", "--minutes must be above zero, not 0"),
        (["--minutes", "nan"], "", "--minutes must be above zero, not nan"),
        (["--price-per-hour=-1.5"], "", "--price-per-hour must be above zero, not -1.5"),
        (["--vllm-memory", "1.5"], "", "--vllm-memory must be a share between 0 and 1, not 1.5"),
        (["--compilation-cache", "/dev/null/x"], "", "--compilation-cache *cannot be written*"),
        ([], "def test_it(): pass", "test_levels.py::test_it belongs to no level*"),
        (
            [],
            "@level('L99')\ndef test_it(): pass",
            "test_levels.py::test_it: level('L99') is none of L0, *",
        ),
    ],
)
def test_misuse_is_one_line(validate, options: list[str], source: str, message: str) -> None:
    result, _ = validate(source, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert len([line for line in result.errlines if line]) == 1


def test_tests_of_the_core_run_in_a_process_of_their_own(
    validate, tmp_path: Path, monkeypatch: Any
) -> None:
    """It has the compiler options of users, and packages on PYTHONPATH. A failure fails the check."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "carried.py").touch()
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], str(tmp_path / "packages")])
    )
    (tmp_path / "test_good.py").write_text(
        "import carried, os\ndef test_it(): assert os.environ['XLA_FLAGS'] == ''"
    )
    (tmp_path / "test_bad.py").write_text("def test_wrong(): assert 1 == 2\ndef test_right(): pass")
    (tmp_path / "test_some.py").write_text(
        "import pytest\ndef test_it(): pass\ndef test_no(): pytest.skip('no torch')"
    )
    lines = [
        "import os",
        "os.environ.pop('XLA_FLAGS', None)",
        "from validation.test_distribution import run_tests",
    ]
    for level, name in (("L0", "good"), ("L1", "bad"), ("L2", "some"), ("L3", "none")):
        lines += [
            f"@level({level!r})",
            f"def test_{name}(run_tests): run_tests({str(tmp_path / f'test_{name}.py')!r})",
        ]
    _, report = validate("\n".join(lines))
    assert [report[name].verdict for name in ("L0", "L1", "L2", "L3")] == [
        PASSED,
        FAILED,
        NOT_RUN,
        FAILED,
    ]
    assert report["L0"].checks[0].numbers == {"tests": 1, "failed": 0, "skipped": 0}
    assert "1 of 2 tests failed: ['test_wrong']" in report["L1"].reason
    assert report["L2"].reason == "1 of 2 tests skipped: no torch"


def test_checks_are_collected_where_optional_packages_are_missing() -> None:
    missing = ["uvicorn", "starlette", "prometheus_client", "outlines_core", "gguf"]
    collect = "import sys, pytest; sys.modules |= dict.fromkeys({}); sys.exit(pytest.main({}))"
    options = ["validation", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, "-c", collect.format(missing, options)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_without_beartype_shapes_are_not_checked_and_the_report_says_so(
    validate, tmp_path: Path
) -> None:
    """``sitecustomize`` refuses the package in every process that finds it on PYTHONPATH."""
    refuse = "import sys\nsys.modules['beartype'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(refuse)
    lines = ["import os", f"os.environ['PYTHONPATH'] += {os.pathsep + str(tmp_path)!r}"]
    lines += ["from validation.test_distribution import run_tests", "@level('L0')"]
    lines += ["def test_it(run_tests): run_tests('tests/test_tree.py', only='ancestors')"]
    _, report = validate("\n".join(lines))
    assert report["L0"].verdict == PASSED, report["L0"].reason
    assert (
        report["L0"].checks[0].numbers["shapes"] == "not checked, because beartype is not installed"
    )


def test_a_check_that_the_committed_record_lacks_is_found(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "validation").mkdir()
    (tmp_path / "validation" / "test_new.py").write_text(
        "pytestmark = level('L8')\ndef test_it(): pass"
    )
    monkeypatch.setattr(validated, "ROOT", tmp_path)
    assert validated.missing(load(validated.RECORD)) == {("L8", "it")}


# ---------------------------------------------------------------- a budget

TIMED = """
import time
clock = time.perf_counter
def wait(seconds): time.perf_counter = lambda: clock() + seconds
def done(name): open("done", "a").write(name + " ")

@level("L1")
def test_frequencies(): done("L1"); wait(50)
@level("L3")
@pytest.mark.parametrize("k", [1, 2])
def test_bits(k, check): done("L3"); check.number(k=k)
@level("HF")
def test_greedy_text(): done("text")
@level("HF")
def test_logits(): done("logits")
@level("L0")
def test_rule(): done("L0")
@level("L5")
def test_vllm(): pytest.skip("vLLM, run: not installed; build one")
"""
REHEARSED = ("--gpu", "--rehearse", "--quick")


@pytest.fixture
def timed(validate, monkeypatch: pytest.MonkeyPatch):
    """As ``validate``, with a clock that checks may advance, and with what ran, in order."""

    def run(source: str, *options: str) -> tuple[pytest.RunResult, Report, list[str]]:
        with monkeypatch.context() as clock:
            clock.setattr(time, "perf_counter", time.perf_counter)
            result, report = validate(source, *REHEARSED, *options)
        ran = Path("done").read_text().split() if Path("done").exists() else []
        Path("done").unlink(missing_ok=True)
        assert report is not None
        return result, report, ran

    return run


def test_a_quick_run_takes_checks_by_their_value_and_passes_as_one(timed) -> None:
    result, report, ran = timed(TIMED)
    assert ran == ["logits", "L3", "text", "L0", "L1"]
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["validation: 14 minutes", "PASSED (QUICK) *L3*quick: 1 of 2 checks, with fewer *"]
    )
    assert report["L3"].verdict == QUICK and report["L5"].verdict == NOT_RUN
    # Where there is no vLLM, a level passes by its other checks, and says how many were left out.
    both = TIMED + "\n@level('L5')\ndef test_recorded(): pass"
    level = timed(both)[1]["L5"]
    assert (
        level.verdict == QUICK
        and level.reason.startswith("quick: 1 of 2 checks")
        and "vLLM, run: not installed" in level.reason
    )
    # Any other reason not to run leaves the level yellow.
    assert (
        timed(both + "\n@level('L5')\ndef test_memory(): pytest.skip('no memory')")[1]["L5"].verdict
        == PARTLY
    )
    assert Report(checks=[Check("L0", "a", PASSED)], quick=True)["L0"].verdict == QUICK
    everything = Report(checks=[Check(level.name, "all", PASSED) for level in LEVELS], quick=True)
    assert everything.verdict == QUICK and everything.incomplete(["L0"]) != []


def test_every_level_has_a_place_in_the_order() -> None:
    ranks = [rank(Check(level.name, "some check")) for level in LEVELS]
    assert len(set(ranks)) == len(LEVELS)
    assert (
        rank(Check("HF", "logits and features"))
        < rank(Check("L3", "bits"))
        < rank(Check("HF", "greedy text"))
    )


def test_no_check_starts_that_is_not_expected_to_end_in_the_budget(timed) -> None:
    spent = "the budget of 0.5 minutes was spent"
    slow = TIMED.replace('done("L3")', 'done("L3"); wait(100); check.seconds = 100.0')
    result, report, ran = timed(slow, "--minutes", "0.5")
    assert ran == ["logits", "L3"], "seconds are unknown, so what has any time left is started"
    assert report["L0"].verdict == NOT_RUN and report["L0"].reason == spent
    assert (
        report["HF"].verdict == PARTLY
        and report["L3"].verdict == QUICK
        and report.verdict == PARTLY
    )
    assert (
        result.ret == 0
        and report.unfinished == spent
        and report.summary.split(". ")[1] == spent.capitalize()
    )
    # The next run, with another option, knows the seconds. What is not expected to end is left out.
    write(dataclasses.replace(report, options="other"), "out")
    result, report, ran = timed(slow, "--minutes", "0.5")
    assert ran == ["logits", "text", "L0", "L1"]
    result.stdout.fnmatch_lines(
        ["validation: the earlier run is not continued: it has another option"]
    )
    bits = report["L3"].checks[0]
    assert bits.verdict == report["L3"].verdict == NOT_RUN
    assert re.fullmatch(f"{spent}: it took 100 s before, and [123]. s were left", bits.reason)
    assert bits.expected > 99, "a run that leaves a check out keeps its seconds for the next one"


def test_a_second_run_continues_the_first(timed, pytester: pytest.Pytester) -> None:
    """What passed is not run again, what failed is, and where it is not, it remains a failure."""
    pytester.makepyfile(switch="BROKEN = True")
    source = TIMED.replace('done("text")', 'done("text"); assert not __import__("switch").BROKEN')
    source = source.replace('done("L0")', 'done("L0"); wait(100)')
    first = timed(source, "--minutes", "0.5")[1]
    assert first["HF"].verdict == FAILED and first["L1"].verdict == NOT_RUN
    result, second, ran = timed(source, "--minutes", "0.5", "--level", "L1")
    assert ran == ["L1"] and result.ret == 1, "a failure that was taken over is a failure"
    assert second["HF"].verdict == FAILED and "BROKEN" in second["HF"].reason
    assert (
        second["L3"].checks[0].numbers == {"k": 1}
        and second["L3"].checks[0].taken_over == first.started
    )
    assert f"Taken over from an earlier run, {first.started}: 4 checks." in second.summary
    pytester.makepyfile(switch="BROKEN = False")
    sys.modules.pop("switch", None)
    result, third, ran = timed(source, "--minutes", "0.5")
    assert ran == ["text"] and result.ret == 0
    assert third["HF"].verdict == QUICK and third["L3"].checks[0].taken_over == first.started
    result, _, ran = timed(source)
    assert ran == [] and result.ret == 0, "nothing is left"


def test_a_check_that_outlasts_the_budget_is_cut_off(timed, pytester: pytest.Pytester) -> None:
    """Its seconds were unknown. What catches errors does not catch the end, and an earlier failure remains one."""
    endless = """
@level("L3")
def test_endless():
    time.sleep(0 if __import__("os").path.exists("fails") else 60)
    assert 1 == 2
@level("L4")
def test_next(): done("next")
"""
    Path("fails").touch()
    assert timed(TIMED + endless, "-k", "endless")[1]["L3"].verdict == FAILED
    started = time.monotonic()
    Path("fails").unlink()
    _, report, ran = timed(TIMED + endless, "-k", "endless or next", "--minutes", "0.1")
    assert time.monotonic() - started < 30 and ran == []
    assert report["L3"].verdict == FAILED and report["L3"].checks[0].taken_over
    assert report.unfinished == report["L4"].reason == "the budget of 0.1 minutes was spent"
    Path("out/report.json").unlink()
    _, report, _ = timed(TIMED + endless, "-k", "endless", "--minutes", "0.1")
    (cut,) = [check for check in report["L3"].checks if check.name == "endless"]
    assert (
        cut.verdict == NOT_RUN and cut.reason == "the budget of 0.1 minutes was spent while it ran"
    )


@pytest.mark.parametrize("part", ["code", "versions", "jax"])
def test_a_run_of_other_code_or_on_another_device_is_not_continued(timed, part: str) -> None:
    _, report, ran = timed(TIMED)
    changed = (
        report.environment | {part: "another"}
        if part != "jax"
        else report.environment | {"jax": {"device": "x"}}
    )
    write(dataclasses.replace(report, environment=changed), "out")
    result, report, again = timed(TIMED)
    assert again == ran and not any(check.taken_over for check in report.checks)
    known = any(check.expected for check in report.checks)
    assert known == (part != "jax"), "seconds of another device tell nothing"
    name = {"jax": "device", "versions": "version"}.get(part, part)
    result.stdout.fnmatch_lines(
        [f"validation: the earlier run is not continued: it has another {name}"]
    )
    Path("out/report.json").write_text("{")
    timed(TIMED)[0].stdout.fnmatch_lines(
        ["validation: the earlier run is not continued: *not valid JSON*"]
    )


def test_without_a_budget_every_run_begins_anew(validate, pytester: pytest.Pytester) -> None:
    for _ in range(2):
        _, report = validate(TIMED)
        assert not any(check.taken_over for check in report.checks)
        assert Path("done").read_text().split() == ["L1", "L3", "L3", "text", "logits", "L0"]
        Path("done").unlink()


# ---------------------------------------------------------------- files


def test_the_file_is_strict_json_and_the_page_escapes_everything(tmp_path: Path) -> None:
    check = Check("L8", "<script>alert(1)</script>", PASSED, seconds=2.5, sees="0.5 % rms, in <L8>")
    check.number(
        tau=np.float32(3.25),
        rounds=np.int64(7),
        lost=float("nan"),
        bound=-math.inf,
        exact=np.bool_(True),
    )
    check.table("by <K>", ["K", "τ"], [[np.int32(3), np.float64("inf")], [5, None]])
    checks = [check, Check("L5", "against vLLM", NOT_RUN, "no <vLLM> here")]
    report = Report(
        environment={"path": Path("/home/user/model")},
        checks=checks,
        skipped=["test_y.py: no '<z>'"],
    )
    page = write(report, tmp_path)
    text = (tmp_path / "report.json").read_text()
    data = json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert list(data)[:3] == ["schema_version", "verdict", "summary"]
    assert data["checks"][0]["numbers"] == {
        "tau": 3.25,
        "rounds": 7,
        "lost": None,
        "bound": None,
        "exact": True,
    }
    assert data["levels"]["L5"] == {"verdict": "not run", "reason": "no <vLLM> here"}
    assert data["environment"]["path"] == "model", "directories are private"
    assert load(tmp_path).to_json() == text and load(tmp_path).table("L8", "by <K>").column(
        "K"
    ) == [3, 5]
    for hostile in ("<script", "<vLLM>", "<z>", "<K>", "<L8>"):
        assert hostile not in page.read_text(), hostile


def test_without_jinja2_there_is_no_page_rather_than_an_old_one(
    tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "report.html").write_text("of an earlier run")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert write(Report(), tmp_path) == tmp_path / "report.json"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not valid JSON"),
        ('{"schema_version": 2}', "schema version 2, and this program reads version 1"),
        ('{"schema_version": 1}', "not a validation report: KeyError"),
        (
            Report(checks=[Check("L5", "a", PASSED)]).to_json().replace('"passed"', '"excellent"'),
            "is not a valid",
        ),
    ],
)
def test_a_file_that_is_no_report_is_refused_in_one_line(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_compiler_knows_the_options_that_a_gpu_gets() -> None:
    """XLA refuses unknown options on every backend, so an option that it has dropped would fail here."""
    assert device.exact_options() == device.DETERMINISTIC, (
        "on CPUs, programs are those that users have"
    )
    double = jax.jit(
        lambda x: x * 2, compiler_options=device.DETERMINISTIC | device.ROUNDED_AS_WRITTEN
    )
    assert double(2.0) == 4.0
