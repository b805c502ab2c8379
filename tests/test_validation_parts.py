"""Runs of a part of the validation: what they may say, and the one report that several of them make."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_jax.measure.timing import CompileClock
from eagle3_jax.rivals.memory import share_memory, share_of_engine
from validation.checks import Check, Verdict
from validation.device import Releases, environment_of_vllm, exact_options, products
from validation.manifest import to_toml
from validation.merging import merge
from validation.report import main, write
from validation.required import PATH, count, expected
from validation.runs import Report, load

pytest_plugins = ["pytester", "validation_runs"]
ROOT = Path(__file__).parent.parent
PASSED, FAILED, PARTLY, NOT_RUN = Verdict.PASSED, Verdict.FAILED, Verdict.PARTLY, Verdict.NOT_RUN

TWO_LEVELS = """
import jax
@level("L0")
@pytest.mark.parametrize("k", [1, 2, 3])
def test_law_of(check, k):
    check.number(k=k, precision=str(jax.config.jax_default_matmul_precision))

@level("L1")
def test_frequencies(): pass

@level("L9")
@pytest.mark.parametrize("k", [1, 2])
def test_speed(check, k):
    check.number(k=k, precision=str(jax.config.jax_default_matmul_precision))
"""
TABLE = """
[L0]
"law of" = [3, 3, 3]
"law of another file" = [0, 1, 0]
[L1]
"frequencies" = [1, 1, 1]
"verdicts" = [1, 1, 1]
[L9]
"speed" = [2, 5, 2]
"""


@pytest.fixture
def table(tmp_path: Path) -> str:
    (tmp_path / "table.toml").write_text(TABLE)
    return str(tmp_path / "table.toml")


# ---------------------------------------------------------------- the manifest


def test_the_manifest_names_what_pytest_collects() -> None:
    """On CPUs, with ``--gpu``, and in a rehearsal; else a level could lose a check and stay green."""
    for package in ("torch", "transformers", "scipy"):
        pytest.importorskip(package, reason="without it not every module is collected")
    done = subprocess.run(
        [sys.executable, "-m", "validation.manifest", "--print"],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == PATH.read_text(), "write it again: python -m validation.manifest"


def test_every_level_is_in_the_manifest_and_a_gpu_run_contains_no_less() -> None:
    on_cpus, on_gpus = expected("cpu"), expected("gpu")
    assert list(on_gpus) == list(expected("rehearsal")) == [*Report().levels]
    for level, checks in on_cpus.items():
        for name, cases in checks.items():
            assert on_gpus[level][name] >= cases, (level, name)


def test_a_table_that_is_written_is_read_back(tmp_path: Path) -> None:
    counts = {"L0": {'a "quoted" name': 2}, "L5": {"b": 1}}
    (tmp_path / "x.toml").write_text(to_toml({"cpu": {}, "gpu": counts, "rehearsal": {}}))
    assert expected("gpu", tmp_path / "x.toml") == {**{n: {} for n in Report().levels}, **counts}
    assert expected("cpu", tmp_path / "x.toml")["L0"] == {}


def test_cases_of_a_check_are_counted_whatever_module_they_are_in() -> None:
    checks = [Check("L0", name) for name in ("law[a]", "law[b[c]]", "law", "law[a] (test_other)")]
    assert count(checks) == {"L0": {"law": 3, "law (test_other)": 1}}


def test_a_level_without_one_of_its_checks_is_not_green() -> None:
    report = Report(checks=[Check("L5", "one[a]", PASSED), Check("L5", "one[b]", PASSED)])
    assert report["L5"].verdict == PASSED
    report.manifest = {"L5": {"one": 2}}
    assert report["L5"].verdict == PASSED
    report.manifest = {"L5": {"one": 4, "two": 1}}
    assert report["L5"].verdict == PARTLY
    assert report["L5"].reason == "not collected: one (2 of 4), two"
    assert Report.from_json(report.to_json())["L5"].verdict == PARTLY
    report.checks[0].verdict = FAILED
    assert report["L5"].verdict == FAILED


def test_a_run_of_one_module_leaves_its_levels_in_part(validate, table: str) -> None:
    _, report = validate(TWO_LEVELS, manifest=table)
    assert {name: report[name].verdict for name in ("L0", "L1", "L9")} == {"L0": PASSED, "L1": PARTLY, "L9": PASSED}
    assert report["L1"].reason == "not collected: verdicts"


def test_a_single_level_runs_alone(validate, table: str) -> None:
    result, report = validate(TWO_LEVELS, "--level", "L0", manifest=table)
    assert result.ret == 0
    assert report["L0"].verdict == PASSED and len(report["L0"].checks) == 3
    assert report["L1"].verdict == NOT_RUN and "--level" in report["L1"].reason
    result, report = validate(TWO_LEVELS, "--level", "L5X")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --level L5X is none of L0, *"])


def test_a_quick_run_has_one_case_of_every_check_and_is_not_green(validate, table: str) -> None:
    _, report = validate(TWO_LEVELS, "--quick", manifest=table)
    assert [check.verdict for check in report["L0"].checks] == [PASSED, NOT_RUN, NOT_RUN]
    assert report["L0"].verdict == PARTLY and "--quick" in report["L0"].reason
    assert [check.verdict for check in report["L9"].checks] == [PASSED, PASSED], "speeds have a plan of their own"


# ---------------------------------------------------------------- merging


def part(*checks: Check, started: str = "1", **changes: object) -> Report:
    environment = {"versions": {"jax": "0.12"}, "git": {"commit": "a", "dirty": False}, "date": started}
    environment |= changes.pop("environment", {})
    table = {"L0": {"law": 2}, "L1": {"frequencies": 1}}
    return Report(environment, list(checks), started, 10.0, f"pytest {started}", manifest=table, **changes)


def law(case: str, verdict: object = PASSED, reason: str = "", **fields: object) -> Check:
    return Check("L0", f"law[{case}]", verdict, reason, **fields)


def test_parts_make_a_whole() -> None:
    first = part(law("a"), law("b", NOT_RUN, "deselected"), Check("L1", "frequencies", PASSED))
    second = part(law("a", NOT_RUN, "deselected"), law("b"), started="2")
    assert first["L0"].verdict == PARTLY and second["L1"].verdict == NOT_RUN
    whole = merge({"one": first, "two": second})
    assert whole["L0"].verdict == whole["L1"].verdict == PASSED
    assert (whole.seconds, whole.started, whole.parts) == (20.0, "1", ["pytest 1", "pytest 2"])
    again = merge({"three": part(Check("L5", "x", PASSED), started="3"), "whole": whole})
    assert again.parts == ["pytest 1", "pytest 2", "pytest 3"] and again["L5"].verdict == PASSED


def test_what_no_part_ran_is_open_and_says_why() -> None:
    found = merge({"one": part(law("a"), law("b", NOT_RUN, "there is no vLLM")),
                   "two": part(law("a"), law("b", NOT_RUN, "deselected by --level"), started="2")})["L0"]  # fmt: skip
    assert found.verdict == PARTLY and found.reason == "law[b]: there is no vLLM"
    found = merge({"one": part(law("a"))})["L0"]
    assert found.verdict == PARTLY and found.reason == "not collected: law (1 of 2)", "the manifest judges the whole"


def test_the_latest_of_equal_verdicts_counts_whatever_the_order_of_the_parts() -> None:
    old, new = part(law("a", numbers={"n": 1})), part(law("a", numbers={"n": 2}), started="2")
    for parts in ({"old": old, "new": new}, {"new": new, "old": old}):
        assert merge(parts)["L0"].numbers == {"n": 2}


@pytest.mark.parametrize("order", [1, -1])
def test_a_check_that_ended_differently_is_a_contradiction_and_never_green(order: int) -> None:
    passed, failed = part(law("a"), law("b")), part(law("a", FAILED, "1 of 2 differ"), started="2")
    found = merge(dict([("good", passed), ("bad", failed)][::order]))["L0"]
    assert found.verdict == FAILED
    assert found.reason == ("law[a]: 2 runs of it contradict each other (passed in good; failed in bad): 1 of 2 differ")
    partly = merge({"good": passed, "half": part(law("a", PARTLY), started="0")})["L0"]
    assert partly.verdict == PARTLY and "contradict" in partly.reason


def test_another_kernel_or_other_memory_is_no_stranger() -> None:
    hosts = [{"platform": f"Linux-{n}", "cpu": {"model": "X", "cores": 2, "memory_gib": 100.0 + n}} for n in (1, 2)]
    one, two = (part(law(case), environment=host) for case, host in zip("ab", hosts, strict=True))
    assert merge({"one": one, "two": two})["L0"].verdict == PASSED
    two.environment["cpu"]["model"] = "Y"
    with pytest.raises(ValueError, match=r"differ in cpu\.model"):
        merge({"one": one, "two": two})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": {"versions": {"jax": "0.11"}}}, "differ in versions.jax (0.12, 0.11)"),
        ({"environment": {"git": {"commit": "b", "dirty": False}}}, "differ in git.commit (a, b)"),
        ({"environment": {"target": {"sha256": "77"}}}, "differ in target.sha256 (–, 77)"),
        ({"gpu": True}, "differ in --gpu (no, yes)"),
        ({"rehearsal": True}, "differ in --rehearse (no, yes)"),
    ],
)
def test_strangers_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict, said: str
) -> None:
    write(part(law("a")), tmp_path / "one")
    write(part(law("b"), started="2", **changes), tmp_path / "two")
    assert main(["merge", str(tmp_path / "one"), str(tmp_path / "two"), "-o", str(tmp_path / "out")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and said in printed.err
    assert not (tmp_path / "out").exists()


def test_another_manifest_is_another_suite() -> None:
    other = part(law("b"), started="2")
    other.manifest = {"L0": {"law": 3}}
    with pytest.raises(ValueError, match="differ in the manifest of L0"):
        merge({"one": part(law("a")), "two": other})


def test_what_only_some_parts_needed_is_taken_over_and_must_agree_where_it_is() -> None:
    pair = {"subject": {"name": "the shipped pair"}}
    dirty = {"git": {"commit": "a", "dirty": True}}  # files beside the code; the code has a hash of its own
    parts = {"one": part(law("a")), "two": part(law("b"), started="2", environment=pair | dirty)}
    assert merge(parts).compared == "the shipped pair"
    parts["three"] = part(started="3", environment={"subject": {"name": "mine"}})
    with pytest.raises(ValueError, match=r"two and three differ in subject\.name"):
        merge(copy.deepcopy(parts))


def test_runs_are_merged_from_the_command_line(validate, table: str, capsys: pytest.CaptureFixture[str]) -> None:
    for level in ("L0", "L9"):
        validate(TWO_LEVELS, "--gpu", "--rehearse", "--level", level, "--report-dir", f"parts/{level}", manifest=table)
    assert load("parts/L0")["L9"].verdict == NOT_RUN
    capsys.readouterr()
    assert main(["merge", "parts/L0", "parts/L9", "-o", "whole"]) == 0
    assert "PASSED      L0" in capsys.readouterr().out
    whole = load("whole")
    assert [whole[name].verdict for name in ("L0", "L1", "L9")] == [PASSED, NOT_RUN, PASSED]
    assert whole.rehearsal and len(whole.parts) == 2
    # Checks multiply in full float32, speeds as users have them.
    assert {check.numbers["precision"] for check in whole["L0"].checks} == {"highest"}
    assert {check.numbers["precision"] for check in whole["L9"].checks} == {"None"}
    assert main(["merge", "parts/L0", "nowhere", "-o", "whole"]) == 2
    assert "nowhere" in capsys.readouterr().err


# ---------------------------------------------------------------- what a GPU is asked for


@pytest.mark.parametrize("given", [False, True])
def test_with_a_gpu_jax_takes_its_share_as_it_needs_it(given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    if given:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")
    share_memory()
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    # JAX refuses to be told twice, by its old name and by its new one.
    assert os.environ.get("XLA_CLIENT_MEM_FRACTION") == (None if given else "0.4")


def test_engines_that_are_loaded_at_once_leave_room_for_jax_and_pytorch() -> None:
    assert [share_of_engine(count) for count in (1, 2, 4)] == [0.3, 0.2, 0.1]


def test_shares_and_caches_that_cannot_be_are_misuse(validate) -> None:
    for options, said in (
        (["--vllm-memory", "1.5"], "--vllm-memory must be a share between 0 and 1, not 1.5"),
        (["--compilation-cache", "/dev/null/x"], "--compilation-cache *cannot be written*"),
    ):
        result, report = validate(TWO_LEVELS, *options)
        assert result.ret == pytest.ExitCode.USAGE_ERROR and report is None
        result.stderr.fnmatch_lines([f"ERROR: {said}"])


FULL = """
class OutOfMemoryError(RuntimeError): pass

@pytest.fixture(scope="module")
def big():
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 32 GiB")

@level("L0")
def test_needs_much(big): pass

@level("L0")
def test_needs_much_too(big): pass

@level("L1")
def test_jax_is_full(): raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes")

@level("L3")
def test_goes_on(): pass

@level("L4")
def test_is_wrong(): assert False, "RESOURCE_EXHAUSTED is what the text says"
"""


def test_a_check_that_runs_out_of_memory_did_not_run_and_the_run_goes_on(validate) -> None:
    result, report = validate(FULL, "--gpu", "--rehearse")
    assert [report[name].verdict for name in ("L0", "L1", "L3", "L4")] == [NOT_RUN, NOT_RUN, PASSED, FAILED]
    assert report["L0"].reason.startswith("out of memory (OutOfMemoryError: CUDA out of memory. Tried to allocate")
    assert "--level" in report["L0"].reason and "XLA_CLIENT_MEM_FRACTION" in report["L1"].reason
    assert result.ret == 1, "for the check that is wrong"


def test_what_holds_memory_lets_go_between_modules() -> None:
    released = []
    releases = Releases()
    releases.add(lambda: released.append("pair"))
    releases.add(lambda: released.append("vLLM"))
    releases()
    releases()
    assert released == ["pair", "vLLM"] * 2


def test_the_compiler_knows_the_options_that_a_gpu_is_given() -> None:
    """A name that an XLA has dropped would end every run of L3 with an error; names are known to all its backends."""
    import jax

    from validation.device import DETERMINISTIC, ROUNDED_AS_WRITTEN

    assert exact_options() == DETERMINISTIC, "on CPUs, programs are those that users have"
    # Ahead of time, XLA of jax 0.11 and later has no Triton kernel for a product of deterministic operations.
    assert DETERMINISTIC == {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
    assert ROUNDED_AS_WRITTEN == {"xla_allow_excess_precision": False}
    double = jax.jit(lambda x: x * 2, compiler_options=DETERMINISTIC | ROUNDED_AS_WRITTEN)
    assert double(2.0) == 4.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        jax.jit(lambda x: x * 2, compiler_options={"xla_gpu_no_such_option": True})(2.0)


def test_vllm_is_told_not_to_round_float32() -> None:
    told = environment_of_vllm()
    assert told["TRITON_F32_DEFAULT"] == "ieee" and told["NVIDIA_TF32_OVERRIDE"] == "0"
    assert "ieee" in told["TRITON_CACHE_DIR"], "kernels that round must not be found there"


def test_speeds_are_measured_in_the_precision_that_users_have() -> None:
    import jax

    for level, precision in (("L9", None), ("L5", "highest")):
        with products(level):
            assert jax.config.jax_default_matmul_precision == precision


def test_the_counter_behind_nothing_was_compiled_hears_of_a_compilation() -> None:
    """JAX may rename the event that it listens to; then every bench would say "0 programs compiled"."""
    import jax

    double = jax.jit(lambda x: x * 2.0)
    with CompileClock() as first:
        double(1.5)
    with CompileClock() as second:
        double(2.5)
    assert first.programs == 1 and first.seconds > 0
    assert second.programs == 0
