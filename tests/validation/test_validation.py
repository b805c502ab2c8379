"""``pytest validation``: what its report says of each test, how runs end, and how reports are read and merged."""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

# pytester forgets the modules that a run imports first, with their types, so this one is imported before it.
import validation.conftest
from validation import device
from validation.levels import LEVELS
from validation.report import main, merge, write
from validation.runs import MANIFEST, Check, Report, Verdict, expected, load

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parent.parent.parent
PASSED = Verdict.PASSED
FAILED = Verdict.FAILED
PARTLY = Verdict.PARTLY
NOT_RUN = Verdict.NOT_RUN


def test_validation_imports_nothing_of_tests() -> None:
    ours = {path.stem for path in (ROOT / "tests").rglob("*.py")} - {"conftest"}
    for file in (ROOT / "validation").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name for name in names if name in ours or name.startswith("tests")}, file


# ---------------------------------------------------------------- one run


@pytest.fixture
def validate(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch):
    """Run tests that are written for the occasion as ``pytest validation`` would."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(pytester.path))
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # which a run with --gpu sets, and which are put back
        monkeypatch.delenv(name)

    def run(
        source: str, *options: str, subprocess: bool = False, manifest: str = "none"
    ) -> tuple[pytest.RunResult, Report | None]:
        pytester.makepyfile(test_levels="import pytest\nlevel = pytest.mark.level\n" + source)
        launch = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        given = ["-p", validation.conftest.__name__, "--report-dir", "out", "-o", f"validation_manifest={manifest}"]
        result = launch(*given, "-p", "no:cacheprovider", *options)
        return result, load("out") if Path("out").exists() else None

    return run


SUITE = """
import jax
@level("L0")
@pytest.mark.parametrize("k", [1, 2])
def test_law_of(check, k):
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

@level("L5")
def test_quotes_an_error(): assert False, "RESOURCE_EXHAUSTED is what the text says"

@level("L6")
@pytest.mark.not_quick
def test_nearly_the_same(): pass

@level("L7")
def test_on_a_gpu(): pass

@level("AOT")
def test_compiled(): pass

@pytest.fixture
def broken(): raise OSError("no such port\\nand more")

@level("L8")
def test_cannot_start(broken): pass

@level("L9")
@pytest.mark.parametrize("k", [1, 2])
def test_speed(check, k):
    check.number(precision=str(jax.config.jax_default_matmul_precision))
"""


def test_a_run_writes_what_each_test_had_to_say(validate, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_broken="import nothing_of_that_name")
    pytester.makepyfile(test_absent="import pytest; pytest.skip('no /opt/torch/lib here', allow_module_level=True)")
    result, report = validate(SUITE, "--continue-on-collection-errors")
    assert result.ret == 1
    found = {name: (level.verdict, level.reason) for name, level in report.levels.items() if level.checks}
    memory = found.pop("L4")
    assert memory[0] == NOT_RUN and memory[1].startswith("out of memory (RuntimeError: RESOURCE_EXHAUSTED")
    assert found == {
        "L0": (PASSED, ""),
        "L1": (FAILED, "one is not two\nassert 1 == 2"),
        "L2": (NOT_RUN, "there is no vLLM"),
        "L3": (PARTLY, "half skips: no time"),
        "L5": (FAILED, "RESOURCE_EXHAUSTED is what the text says\nassert False"),
        "L6": (PASSED, ""),
        "L7": (NOT_RUN, "only with --gpu"),
        "L8": (FAILED, "setup: OSError: no such port"),
        "L9": (PASSED, ""),
        "AOT": (NOT_RUN, "only with --aot"),
    }
    assert [(check.name, check.numbers["outcomes"]) for check in report["L0"].checks] == [
        ("law of[1]", 10), ("law of[2]", 20),
    ]  # fmt: skip
    assert report.environment["versions"]["jax"] and report.verdict == FAILED
    (error,) = report.errors
    assert "test_broken.py" in error and report.skipped == ["test_absent.py: no lib here"], "no directory is named"
    result.stdout.fnmatch_lines(["PASSED *L0*outcomes 10 to 20*", "FAILED *L1*one is not two", "Report: out*"])


def test_options_leave_out_checks_and_the_level_says_so(validate, tmp_path: Path) -> None:
    table = tmp_path / "table.toml"
    table.write_text('[L0]\n"law of" = [2, 3, 2]\n[L3]\n"half passes" = [1, 1, 1]\n[L9]\n"speed" = [2, 2, 2]\n')
    _, report = validate(SUITE, "--level", "L0", "--level", "L3", manifest=str(table))
    assert report["L0"].verdict == PASSED and report["L9"].reason == "deselected by --level"
    _, report = validate(SUITE, "--quick", manifest=str(table))
    assert (report["L0"].verdict, report["L0"].reason) == (PARTLY, "law of[2]: deselected by --quick")
    assert report["L9"].verdict == PASSED, "speeds have a plan of their own"
    assert (report["L6"].verdict, report["L6"].reason) == (NOT_RUN, "deselected by --quick")
    _, report = validate('@level("L0")\ndef test_law_of(): pass', manifest=str(table))
    assert (report["L0"].verdict, report["L0"].reason) == (PARTLY, "not collected: law of (1 of 2)")


def test_a_rehearsal_runs_gpu_levels_in_full_precision(validate) -> None:
    _, report = validate(SUITE, "--gpu", "--rehearse", "--aot", "tpu:v6e:2x2")
    assert report["L7"].verdict == report["AOT"].verdict == PASSED and report.summary.startswith("Rehearsal")
    assert {check.numbers["precision"] for check in report["L0"].checks} == {"highest"}
    assert {check.numbers["precision"] for check in report["L9"].checks} == {"None"}, "speeds are those of users"


def test_complete_fails_on_a_skip_and_names_it(validate) -> None:
    every = "\n".join(f"@level({level.name!r})\ndef test_{level.name}(): pass" for level in LEVELS)
    assert validate(every, "--complete")[0].ret == 0
    assert validate(every, "--gpu", "--rehearse", "--complete")[1].verdict == PARTLY, "a rehearsal"
    source = every + "\n@level('L5')\ndef test_more(): pytest.skip('no vLLM')"
    assert validate(source)[0].ret == 0
    result, _ = validate(source, "--complete")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["--complete: *not complete", "  L5 partly run: more: no vLLM"])


@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), 9)", -9), ("raise KeyboardInterrupt", 2)])
def test_a_run_that_is_cut_off_has_written_what_it_knew_and_the_rest_is_merged(validate, end: str, code: int) -> None:
    source = f"""
import os
@level("L0")
def test_done(check): check.number(outcomes=3)
@level("L1")
def test_cut(): {end}
@level("L2")
def test_never(): pass
"""
    result, cut = validate(source, subprocess=True)
    assert result.ret == code
    assert cut["L0"].verdict == PASSED and cut["L0"].checks[0].numbers == {"outcomes": 3}
    for level in ("L1", "L2"):
        assert cut[level].verdict == NOT_RUN and cut[level].reason.startswith("not finished: the run was ")
    _, rest = validate(source.replace(end, "pass"), "-k", "not done")
    assert [merge({"a": cut, "b": rest})[level].verdict for level in ("L0", "L1", "L2")] == [PASSED] * 3


@pytest.mark.parametrize(
    ("options", "source", "message"),
    [
        (["--gpu"], "", "--gpu: jax *; or add --rehearse to try the flow without a GPU"),
        (["--rehearse"], "", "--rehearse is for a run with --gpu*"),
        (["--level", "L5X"], "", "--level L5X is none of L0, *"),
        (["--aot", "cuda:h2000"], "", "--aot: there is no platform 'cuda:h2000' to compile for; use one of *"),
        (["--target", "."], "", "* holds no [*].json, [*].safetensors or [*].bin"),
        (["--prompts", "nowhere.jsonl"], "", "--prompts: there is no file nowhere.jsonl"),
        (["--price-per-hour=-1.5"], "", "--price-per-hour must be above zero, not -1.5"),
        (["--vllm-memory", "1.5"], "", "--vllm-memory must be a share between 0 and 1, not 1.5"),
        (["--compilation-cache", "/dev/null/x"], "", "--compilation-cache *cannot be written*"),
        ([], "def test_it(): pass", "test_levels.py::test_it belongs to no level*"),
        ([], "@level('L99')\ndef test_it(): pass", "test_levels.py::test_it: level('L99') is none of L0, *"),
    ],
)
def test_misuse_is_one_line_and_no_run(validate, options: list[str], source: str, message: str) -> None:
    result, report = validate(source, *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR and report is None
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert len([line for line in result.errlines if line]) == 1


def test_tests_of_the_core_run_in_a_process_of_their_own(validate, tmp_path: Path) -> None:
    """With the compiler's options that users have; a failure fails the check, and a skip leaves it partly run."""
    (tmp_path / "test_good.py").write_text("import os\ndef test_it(): assert os.environ['XLA_FLAGS'] == ''")
    (tmp_path / "test_bad.py").write_text("def test_wrong(): assert 1 == 2\ndef test_right(): pass")
    (tmp_path / "test_some.py").write_text("import pytest\ndef test_it(): pass\ndef test_no(): pytest.skip('no torch')")
    lines = ["import os", "os.environ.pop('XLA_FLAGS', None)", "from validation.test_law import run_tests"]
    for level, name in (("L0", "good"), ("L1", "bad"), ("L2", "some"), ("L3", "none")):
        lines += [f"@level({level!r})", f"def test_{name}(run_tests): run_tests({str(tmp_path / f'test_{name}.py')!r})"]
    _, report = validate("\n".join(lines))
    assert [report[name].verdict for name in ("L0", "L1", "L2", "L3")] == [PASSED, FAILED, PARTLY, FAILED]
    assert report["L0"].checks[0].numbers == {"tests": 1, "failed": 0, "skipped": 0}
    assert "1 of 2 tests failed: ['test_wrong']" in report["L1"].reason
    assert "1 of 2 tests skipped" in report["L2"].reason and "no torch" in report["L2"].reason


@pytest.mark.torch
def test_the_manifest_names_what_pytest_collects() -> None:
    """On CPUs, with ``--gpu``, and in a rehearsal; otherwise a level could lose a check and stay green."""
    command = [sys.executable, "-m", "validation.manifest", "--print"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == MANIFEST.read_text(), "write it again: python -m validation.manifest"
    for level, checks in expected("cpu").items():
        assert all(expected("gpu")[level][name] >= cases for name, cases in checks.items()), "a GPU run has no less"


# ---------------------------------------------------------------- verdicts and files


def run_of(*verdicts: Verdict, level: str = "L5", **fields: Any) -> Report:
    checks = [Check(level, f"check {i}", verdict, f"reason {i}") for i, verdict in enumerate(verdicts)]
    return Report(checks=checks, **fields)


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        ([PASSED, PASSED], PASSED),
        ([NOT_RUN, FAILED, PASSED], FAILED),
        ([PASSED, NOT_RUN], PARTLY),
        ([PASSED, PARTLY], PARTLY),
        ([NOT_RUN, NOT_RUN], NOT_RUN),
        ([], NOT_RUN),
    ],
)
def test_a_level_is_green_only_if_everything_ran_and_passed(verdicts: list[Verdict], verdict: Verdict) -> None:
    assert run_of(*verdicts).levels["L5"].verdict == verdict


def test_a_run_passes_only_as_a_whole() -> None:
    full = lambda **fields: Report(checks=[Check(level.name, "all", PASSED) for level in LEVELS], **fields)
    assert full().verdict == PASSED and full().summary == "Every level passed."
    assert run_of(PASSED).verdict == PARTLY and "L4" in run_of(PASSED).summary.partition("not proven: ")[2]
    assert full(skipped=["test_x.py: no torch"]).verdict == full(gpu=True, rehearsal=True).verdict == PARTLY
    assert full(errors=["test_x.py: SyntaxError"]).verdict == FAILED
    retired = Report(checks=[Check("MU", "a level of an older version", PASSED)])
    assert Report.from_json(retired.to_json()) == retired and retired.verdict == NOT_RUN


@pytest.mark.torch
def test_the_file_is_strict_json_and_the_page_escapes_everything(tmp_path: Path) -> None:
    check = Check("L8", "<script>alert(1)</script>", PASSED, seconds=2.5, sees="0.5 % rms, in <L8>")
    check.number(tau=np.float32(3.25), rounds=np.int64(7), lost=float("nan"), bound=-math.inf, exact=np.bool_(True))
    check.table("by <K>", ["K", "τ"], [[np.int32(3), np.float64("inf")], [5, None]])
    checks = [check, Check("L5", "against vLLM", NOT_RUN, "no <vLLM> here")]
    report = Report(environment={"path": Path("/home/user/model")}, checks=checks, skipped=["test_y.py: no '<z>'"])
    page = write(report, tmp_path)
    text = (tmp_path / "report.json").read_text()
    data = json.loads(text, parse_constant=lambda constant: pytest.fail(constant))
    assert data["checks"][0]["numbers"] == {"tau": 3.25, "rounds": 7, "lost": None, "bound": None, "exact": True}
    assert data["levels"]["L5"] == {"verdict": "not run", "reason": "no <vLLM> here", "seconds": 0}
    assert data["environment"]["path"] == "model", "directories are private"
    assert load(tmp_path).to_json() == text and load(tmp_path).table("L8", "by <K>").column("K") == [3, 5]
    for hostile in ("<script", "<vLLM>", "<z>", "<K>", "<L8>"):
        assert hostile not in page.read_text(), hostile


@pytest.mark.torch
def test_without_jinja2_there_is_no_page_rather_than_an_old_one(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "report.html").write_text("of an earlier run")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert write(run_of(PASSED), tmp_path) == tmp_path / "report.json"
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "not valid JSON"),
        ('{"schema_version": 2}', "schema version 2, and this program reads version 1"),
        ('{"schema_version": 1}', "not a validation report: KeyError"),
        (run_of(PASSED).to_json().replace('"passed"', '"excellent"'), "'excellent' is not a valid Verdict"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path, capsys: Any, text: Any, message: str) -> None:
    if text is not None:
        (tmp_path / "report.json").write_text(text)
    assert main(["show", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and message in printed.err


@pytest.mark.torch
def test_two_runs_are_compared(tmp_path: Path, capsys: Any) -> None:
    old = run_of(PASSED, environment={"date": "1", "versions": {"jax": "0.9"}})
    new = run_of(FAILED, environment={"date": "2", "versions": {"jax": "0.10"}})
    old.checks[0].number(tau=2.0, gone=1, flag=True)
    new.checks[0].number(tau=np.float32(3.0), come=float("nan"))
    write(old, tmp_path / "a")
    write(new, tmp_path / "b")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b" / "report.json")]) == 0
    text = capsys.readouterr().out
    lines = [
        "| L5 | passed | failed | changed |",
        "| L5 | check 0 | tau | 2 | 3 | 1.5 |",
        "| versions.jax | 0.9 | 0.10 |",
    ]
    assert all(line in text for line in lines) and "date" not in text and "flag" not in text


# ---------------------------------------------------------------- merging


def part(*checks: Check, started: str = "1", **changes: Any) -> Report:
    environment = {"versions": {"jax": "0.12"}, "git": {"commit": "a", "dirty": False}, "date": started}
    environment |= changes.pop("environment", {})
    table = {"L0": {"law": 2}, "L1": {"frequencies": 1}}
    return Report(environment, list(checks), started, 10.0, f"pytest {started}", **{"manifest": table, **changes})


def law(case: str, verdict: Verdict = PASSED, reason: str = "") -> Check:
    return Check("L0", f"law[{case}]", verdict, reason)


def test_parts_make_a_whole() -> None:
    dirty = {"git": {"commit": "a", "dirty": True}, "subject": {"name": "the shipped pair"}, "platform": "Linux-2"}
    first = part(law("a"), law("b", NOT_RUN, "deselected"), Check("L1", "frequencies", PASSED))
    second = part(law("a", NOT_RUN, "deselected"), law("b"), started="2", environment=dirty)
    whole = merge({"one": first, "two": second})
    assert whole["L0"].verdict == whole["L1"].verdict == PASSED and whole.compared == "the shipped pair"
    assert (whole.seconds, whole.started, whole.parts) == (20.0, "1", ["pytest 1", "pytest 2"])
    open_ = merge({"one": part(law("a"), law("b", NOT_RUN, "no vLLM")), "two": part(law("b", NOT_RUN, "deselected"))})
    assert (open_["L0"].verdict, open_["L0"].reason) == (PARTLY, "law[b]: no vLLM")


@pytest.mark.parametrize("order", [1, -1])
def test_a_check_that_ended_differently_is_a_contradiction_and_never_green(order: int) -> None:
    passed = part(law("a"), law("b"))
    failed = part(law("a", FAILED, "1 of 2 differ"), started="2")
    found = merge(dict([("good", passed), ("bad", failed)][::order]))["L0"]
    assert found.verdict == FAILED
    assert found.reason == "law[a]: 2 runs of it contradict each other (passed in good; failed in bad): 1 of 2 differ"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": {"versions": {"jax": "0.11"}}}, "differ in versions.jax (0.12, 0.11)"),
        ({"environment": {"target": {"sha256": "77"}}}, "differ in target.sha256 (–, 77)"),
        ({"manifest": {"L0": {"law": 3}}}, "differ in the manifest of L0"),
        ({"rehearsal": True}, "differ in --rehearse (no, yes)"),
    ],
)
def test_strangers_are_refused_in_one_line(tmp_path: Path, capsys: Any, changes: dict, said: str) -> None:
    write(part(law("a")), tmp_path / "one")
    write(part(law("b"), started="2", **changes), tmp_path / "two")
    assert main(["merge", str(tmp_path / "one"), str(tmp_path / "two"), "-o", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and said in printed.err
    assert not (tmp_path / "out").exists()


def test_the_compiler_knows_the_options_that_a_gpu_is_given() -> None:
    """A name that an XLA has dropped would end every run of L3 with an error; all its backends know the names."""
    assert device.exact_options() == device.DETERMINISTIC, "on CPUs, programs are those that users have"
    double = jax.jit(lambda x: x * 2, compiler_options=device.DETERMINISTIC | device.ROUNDED_AS_WRITTEN)
    assert double(2.0) == 4.0
