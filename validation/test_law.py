"""L0 to L2 and a part of L8: the tests of the library's core, run on the device that is validated.

They run in processes of their own. ``tests/conftest.py`` checks every shape at every call, forbids promotion of dtypes
and asks XLA for less optimization, for the whole process; speeds measured next to that would be wrong. Here the
programs are compiled as users compile them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from validation.runs import Check, Verdict
from validation.subject import Setting

ROOT = Path(__file__).parent.parent
RunTests = Callable[..., None]


@pytest.fixture
def run_tests(check: Check, setting: Setting, tmp_path: Path) -> RunTests:
    """Run files of tests, and keep how many passed; a skipped test makes the check "partly run"."""

    def run(*files: str, only: str = "") -> None:
        junit = tmp_path / "junit.xml"
        command = [sys.executable, "-m", "pytest", *files, "-k", only, "-p", "no:cacheprovider", f"--junitxml={junit}"]
        environment = {"XLA_FLAGS": "", **os.environ, "PYTHONPATH": str(ROOT)}
        if setting.gpu:
            environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        cases = list(ElementTree.parse(junit).iter("testcase")) if junit.exists() else []
        failed = [one for one in cases if one.find("failure") is not None or one.find("error") is not None]
        skipped = [one for one in cases if one.find("skipped") is not None]
        check.number(tests=len(cases), failed=len(failed), skipped=len(skipped))
        told = f"{', '.join(files)}: {len(failed)} of {len(cases)} tests failed: {[one.get('name') for one in failed]}"
        assert done.returncode == 0, "\n".join([told, *(done.stdout + done.stderr).splitlines()[-8:]])
        if skipped:
            reasons = {one.find("skipped").get("message", "") for one in skipped}  # type: ignore[union-attr]
            check.verdict = Verdict.PARTLY
            check.reason = f"{len(skipped)} of {len(cases)} tests skipped: {reasons}"

    return run


@pytest.mark.level("L0")
def test_every_case_has_exactly_the_autoregressive_distribution(run_tests: RunTests) -> None:
    run_tests("tests/core/test_exact_distribution.py")


@pytest.mark.level("L1")
def test_acceptance_and_correction_have_the_frequencies_of_the_rule(run_tests: RunTests) -> None:
    run_tests("tests/core/test_verify.py", only="not evaluation")


@pytest.mark.level("L1")
def test_verdicts_on_random_trees_are_those_of_the_official_evaluation(run_tests: RunTests) -> None:
    run_tests("tests/core/test_verify.py", only="evaluation")


@pytest.mark.level("L1")
@pytest.mark.parametrize("rule", ["every rule"])
def test_at_128256_tokens_every_threshold_is_that_of_the_formula_for(
    check: Check, run_tests: RunTests, rule: str
) -> None:
    run_tests("tests/core/test_thresholds.py")
    check.sees = "1e-06 of what is emitted, at 128,256 tokens"


@pytest.mark.level("L1")
def test_a_drawn_draft_is_drawn_from_the_very_distribution_that_it_declares(run_tests: RunTests) -> None:
    run_tests("tests/core/test_draw_distribution.py")


@pytest.mark.level("L2")
@pytest.mark.parametrize("draft", ["every draft"])
def test_sequences_follow_the_exact_law_with(check: Check, run_tests: RunTests, draft: str) -> None:
    run_tests("tests/core/test_sampling_distribution.py")
    check.sees = "a tenth or more of the probabilities of whole sequences"


@pytest.mark.not_quick
@pytest.mark.level("L2")
@pytest.mark.parametrize("draft", ["every draft"])
def test_millions_of_tokens_follow_their_law_with(check: Check, run_tests: RunTests, draft: str) -> None:
    run_tests("tests/nightly/test_long_law.py")
    check.sees = "1.8 % rms of the probabilities of each context, 0.95 % where all contexts are off alike"


@pytest.mark.level("L8")
def test_recorded_rounds_of_vllm(run_tests: RunTests) -> None:
    run_tests("tests/core/test_golden.py", only="vllm")


@pytest.mark.level("L8")
def test_recorded_trees_of_the_official_code(run_tests: RunTests) -> None:
    run_tests("tests/core/test_golden.py", only="official")


@pytest.mark.level("L8")
@pytest.mark.parametrize("method", ["every method"])
def test_recorded_rounds_of_other_methods(run_tests: RunTests, method: str) -> None:
    run_tests("tests/core/test_recorded_drafters.py")
