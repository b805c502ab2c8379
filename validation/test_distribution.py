"""Runs tests of the library's core on the device that is validated: L0 to L2, and a part of L8.

They run in processes of their own. ``tests/conftest.py`` checks every shape at every call, forbids
promotion of dtypes and asks XLA for less optimization, for the whole process; speeds measured next
to that would be wrong. Here the programs are compiled as users compile them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from validation.runs import Check
from validation.subject import Setting

ROOT = Path(__file__).parent.parent
RunTests = Callable[..., None]


@pytest.fixture
def run_tests(check: Check, setting: Setting, tmp_path: Path) -> RunTests:
    """Runs files of tests and records their numbers. A skipped test counts as not run."""
    return functools.partial(_run, check, setting, tmp_path / "junit.xml")


def _run(check: Check, setting: Setting, junit: Path, *files: str, only: str = "") -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        *files,
        "-k",
        only,
        "-p",
        "no:cacheprovider",
        f"--junitxml={junit}",
    ]

    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = {"XLA_FLAGS": "", **os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if setting.gpu:
        environment["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"

    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    suite = ElementTree.parse(junit).getroot() if junit.exists() else ElementTree.Element("none")
    total = len(suite.findall(".//testcase"))
    failed = [
        case.get("name")
        for kind in ("failure", "error")
        for case in suite.iterfind(f".//testcase[{kind}]")
    ]
    skips = [element.get("message", "") for element in suite.iter("skipped")]

    check.number(tests=total, failed=len(failed), skipped=len(skips))
    # tests/conftest.py reports here that it could not check shapes.
    check.number(
        **{element.get("name", ""): element.get("value") for element in suite.iter("property")}
    )

    message = f"{', '.join(files)}: {len(failed)} of {total} tests failed: {failed}"
    assert done.returncode == 0, "\n".join(
        [message, *(done.stdout + done.stderr).splitlines()[-8:]]
    )
    if skips:
        pytest.skip(f"{len(skips)} of {total} tests skipped: {', '.join(sorted(set(skips)))}")


@pytest.mark.level("L0")
def test_every_case_has_exactly_the_autoregressive_distribution(run_tests: RunTests) -> None:
    run_tests("tests/test_exact_distribution.py")


@pytest.mark.level("L1")
def test_acceptance_and_correction_have_the_frequencies_of_the_rule(run_tests: RunTests) -> None:
    run_tests("tests/test_verify.py", only="not evaluation")


@pytest.mark.level("L1")
def test_verdicts_on_random_trees_are_those_of_the_official_evaluation(run_tests: RunTests) -> None:
    run_tests("tests/test_verify.py", only="evaluation")


@pytest.mark.level("L1")
@pytest.mark.parametrize("rule", ["every rule"])
def test_at_128256_tokens_every_threshold_is_that_of_the_formula_for(
    check: Check, run_tests: RunTests, rule: str
) -> None:
    run_tests("tests/test_thresholds.py")
    check.sees = "1e-06 of what is emitted, at 128,256 tokens"


@pytest.mark.level("L1")
def test_a_sampled_draft_is_sampled_from_the_very_distribution_that_it_declares(
    run_tests: RunTests,
) -> None:
    run_tests("tests/test_draw_distribution.py")


@pytest.mark.level("L2")
@pytest.mark.parametrize("draft", ["every draft"])
def test_sequences_follow_the_exact_distribution_with(
    check: Check, run_tests: RunTests, draft: str
) -> None:
    run_tests("tests/test_sampling_distribution.py")
    check.sees = "a tenth or more of the probabilities of whole sequences"


@pytest.mark.not_quick
@pytest.mark.level("L2")
@pytest.mark.parametrize("draft", ["every draft"])
def test_millions_of_tokens_follow_their_distribution_with(
    check: Check, run_tests: RunTests, draft: str
) -> None:
    run_tests("tests/nightly/test_long_distribution.py")
    check.sees = (
        "1.8 % rms of the probabilities of each context, 0.95 % if every context has the same"
        " deviation"
    )


@pytest.mark.level("L8")
def test_recorded_rounds_of_vllm(run_tests: RunTests) -> None:
    run_tests("tests/test_golden.py", only="vllm")


@pytest.mark.level("L8")
def test_recorded_trees_of_the_official_code(run_tests: RunTests) -> None:
    run_tests("tests/test_golden.py", only="official")


@pytest.mark.level("L8")
@pytest.mark.parametrize("method", ["every method"])
def test_recorded_rounds_of_other_methods(run_tests: RunTests, method: str) -> None:
    run_tests("tests/drafters/test_recorded_drafters.py")
