"""The script for an hour on a GPU, rehearsed at tiny shapes: its parts, a broken one, one that hangs, a second run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
COMPILED = Path(tempfile.gettempdir()) / "eagle3-jax-tests-compiled"
PARTS = ["device", "round", "verify", "variants", "contexts", "attention"]
PLANTED = {
    "def verify(setting: Setting, record: Record) -> None:": "raise RuntimeError('planted')",
    "def contexts(setting: Setting, record: Record) -> None:": "record.add('kept', 1); __import__('time').sleep(600)",
}


def plant(text: str) -> str:
    for head, line in PLANTED.items():
        assert text.count(head) == 1
        text = text.replace(head, f"{head}\n    {line}")
    return text


def run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    surroundings = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    command = [sys.executable, str(script), "--rehearse", "--compilation-cache", str(COMPILED), *arguments]
    return subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory) -> tuple[dict[str, Any], str]:
    """A run in which two parts go wrong, and one that completes it."""
    directory = tmp_path_factory.mktemp("h200")
    for name in ("h200.py", "h200_parts.py", "verify_block_attention.py"):
        (directory / name).write_text((EXAMPLES / name).read_text())
    script, parts, output = directory / "h200.py", directory / "h200_parts.py", directory / "h200.json"
    good, whole = script.read_text(), parts.read_text()
    assert '"contexts": 120' in good
    script.write_text(good.replace('"contexts": 120', '"contexts": 20'))
    parts.write_text(plant(whole))
    done = run(script, "--output", str(output), "--only", *PARTS)
    assert done.returncode == 0, done.stderr
    first = json.loads(output.read_text())
    script.write_text(good)
    parts.write_text(whole)
    done = run(script, "--output", str(output), "--only", *PARTS)
    assert done.returncode == 0, done.stderr
    return {"first": first, "second": json.loads(output.read_text()), "path": output}, done.stdout


def test_a_part_that_fails_or_hangs_does_not_take_the_others_with_it(rehearsed):
    parts = rehearsed[0]["first"]["parts"]
    states = {name: part["status"] for name, part in parts.items()}
    assert states == dict.fromkeys(PARTS, "done") | {"verify": "failed", "contexts": "out of time"}
    assert parts["verify"]["reason"] == "RuntimeError: planted"
    assert parts["contexts"]["reason"] == "cut off after 20 s; run the command again"
    assert parts["contexts"]["figures"] == {"kept": 1}


def test_a_second_run_measures_what_is_missing_and_nothing_else(rehearsed):
    (runs, printed), missing = rehearsed, {"verify", "contexts"}
    first, second = runs["first"]["parts"], runs["second"]["parts"]
    assert {part["status"] for part in second.values()} == {"done"}
    assert {name for name in PARTS if first[name] != second[name]} == missing
    assert "a REHEARSAL: nothing counts" in printed
    for title in ("verify: ms a round", "contexts: ms a round", "variants: ms a round"):
        assert title in printed


def test_the_result_says_what_was_measured_and_where(rehearsed):
    result = rehearsed[0]["second"]
    assert (result["schema"], result["rehearsal"], result["shape"]) == (1, True, "Llama-tiny")
    figures = {name: part["figures"] for name, part in result["parts"].items()}
    assert figures["device"]["environment"]["jax"]["backend"] == "cpu"
    assert figures["device"]["bytes_per_second"].keys() == {"sum", "copy", "product"}
    whole = figures["round"]
    for name in ("plain step", "verify 6", "round", "target alone", "draft step"):
        assert whole[name]["seconds"]["low"] <= whole[name]["seconds"]["median"] <= whole[name]["seconds"]["high"]
        assert len(whole[name]["seconds"]["values"]) == 2
    shares = [
        1 - (alone + 5 * step) / round_
        for round_, alone, step in zip(
            *(whole[name]["seconds"]["values"] for name in ("round", "target alone", "draft step")), strict=True
        )
    ]
    assert whole["share outside target and head"]["values"] == pytest.approx(shares)
    variant = figures["variants"]["no excess precision"]
    assert variant["round_in_bases"].keys() == {"median", "low", "high", "above_1", "of", "p_of_sign_test"}
    assert figures["variants"]["as it is"]["speed_in_bases"]["median"] == 1
    assert figures["verify"]["verify 6"]["rounds"] == 6  # of a token each
    assert figures["variants"]["as it is"]["rounds"] < 6  # drafts are accepted by dice
    assert figures["verify"]["verify 1"]["compile_seconds"] > 0


def test_the_reading_follows_from_the_figures(rehearsed):
    result = rehearsed[0]["second"]
    whole = result["parts"]["round"]["figures"]
    plain, six = (whole[name]["seconds"]["median"] for name in ("plain step", "verify 6"))
    copy = result["parts"]["device"]["figures"]["bytes_per_second"]["copy"]
    share, cost, outside = result["reading"]
    assert math.isclose(share["found"], whole["step_bytes"] / plain / copy)
    assert share["met"] is (share["found"] >= 0.85)
    assert math.isclose(cost["found"], six / plain)
    assert cost["met"] is (cost["found"] <= 1.1)
    assert outside["found"] == whole["share outside target and head"]["median"]


def test_another_runs_file_is_refused_in_one_line(rehearsed):
    path = rehearsed[0]["path"]
    for text, said in (
        (json.dumps(rehearsed[0]["second"] | {"rehearsal": False, "code": "x"}), "a run of another rehearsal, code"),
        ("[]", "a run of another schema, rehearsal, shape, code"),
        ("text", "is no JSON"),
    ):
        path.write_text(text)
        done = run(EXAMPLES / "h200.py", "--output", str(path))
        assert done.returncode == 1
        assert said in done.stderr and done.stderr.count("\n") == 1


def test_when_the_budget_is_spent_the_rest_says_so(tmp_path):
    output = tmp_path / "h200.json"
    done = run(EXAMPLES / "h200.py", "--output", str(output), "--budget-seconds", "1", "--only", "device", "round")
    assert done.returncode == 0
    parts = json.loads(output.read_text())["parts"]
    assert {part["status"] for part in parts.values()} == {"not run"}
    assert "not measured" in done.stdout
