"""The script for an hour on a GPU, rehearsed at tiny shapes: its parts, a broken one, one that hangs, a second run."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
COMPILED = Path(tempfile.gettempdir()) / "eagle3-jax-tests-compiled"
PARTS = ["device", "text", "round", "floor", "verify", "variants", "profile", "contexts", "attention"]
PLANTED = {
    "def verify(setting: Setting, record: Record) -> None:": "raise RuntimeError('planted')",
    "def contexts(setting: Setting, record: Record) -> None:": "record.add('kept', 1); __import__('time').sleep(600)",
}
SHORT = '"contexts": (80, ', '"contexts": (5, '


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
    for file in EXAMPLES.glob("h200*.py"):
        (directory / file.name).write_text(file.read_text())
    script, output = directory / "h200.py", directory / "h200.json"
    parts = directory / "h200_parts.py"
    good = parts.read_text()
    assert SHORT[0] in good
    parts.write_text(plant(good.replace(*SHORT)))
    done = run(script, "--output", str(output), "--only", *PARTS)
    assert done.returncode == 0, done.stderr
    first = json.loads(output.read_text())
    parts.write_text(good)
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
    assert (result["schema"], result["rehearsal"], result["shape"]) == (2, True, "Llama-tiny")
    figures = {name: part["figures"] for name, part in result["parts"].items()}
    assert figures["device"]["environment"]["jax"]["backend"] == "cpu"
    assert figures["device"]["bytes_per_second"].keys() == {"sum", "copy", "product"}
    assert figures["device"]["float32"]["highest"] < 1e-5
    assert figures["device"]["launch, as it is"]["median"] > 0
    assert figures["text"]["same text"] is True and figures["text"]["mean_acceptance_length"] > 1
    assert figures["profile"]["chain"]["seconds_per_round"] > 0
    whole = figures["round"]
    names = ("plain step", "verify 6", "round", "target alone", "draft step", "tree of 6")
    times = {name: whole[name]["seconds_per_round"] for name in names}
    for one in times.values():
        assert one["low"] <= one["median"] <= one["high"]
        assert len(one["values"]) == 3  # one at once, two in turns
    shares = [
        1 - (alone + 5 * step) / round_
        for round_, alone, step in zip(
            *(times[name]["values"][1:] for name in ("round", "target alone", "draft step")), strict=True
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
    plain, six = (whole[name]["seconds_per_round"]["median"] for name in ("plain step", "verify 6"))
    copy = result["parts"]["device"]["figures"]["bytes_per_second"]["copy"]
    same, share, cost, outside = result["reading"]
    assert (same["found"], same["met"]) == (1.0, True)
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


def module(name: str) -> Any:
    """A file of the examples, which import each other."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


def test_the_limits_fit_into_two_commands() -> None:
    parts, script = module("h200_parts"), module("h200")
    for group in (parts.FIRST, parts.SECOND):
        assert sum(limit for limit, _ in group.values()) <= script.BUDGET < 600 - 2 * script.ROOM
        assert min(limit for limit, _ in group.values()) >= script.LEAST + script.ROOM


@pytest.fixture
def record(tmp_path: Path) -> Any:
    output = tmp_path / "h200.json"
    output.write_text(json.dumps({"parts": {"some": {"figures": {}}}}))
    return module("h200_parts").Record(output, "some")


def figures_in(record: Any) -> dict[str, Any]:
    return json.loads(record.output.read_text())["parts"]["some"]["figures"]


def test_every_cell_is_in_the_file_before_the_next_one_starts(record: Any) -> None:
    parts = module("h200_parts")
    seen: list[set[str]] = []

    def cell(seconds: float) -> Any:
        def measured() -> Any:
            seen.append(set(figures_in(record)))
            return parts.Pace(seconds, 2, 6)

        return measured

    def broken() -> Any:
        raise RuntimeError("planted")

    parts.paces(parts.REHEARSAL, record, {"a": cell(1.0), "bad": broken, "b": cell(3.0)}, "a")
    # Compiled, warmed up and timed once each; then two turns.
    assert seen == [set()] * 3 + [{"a", "bad"}] * 3 + [{"a", "bad", "b"}] * 4
    found = figures_in(record)
    assert found["b"]["seconds_per_round"]["median"] == 1.5 and found["b"]["tokens_per_second"]["median"] == 2.0
    assert found["b"]["round_in_bases"]["median"] == 3.0 and found["b"]["round_in_bases"]["of"] == 2
    assert found["bad"] == {"failed": "RuntimeError: planted"}


def test_what_no_time_was_left_for_is_measured_the_next_time(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = module("h200_parts")
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    calls: list[str] = []

    def cell(name: str) -> Any:
        def measured() -> Any:
            clock[0] += 10.0
            calls.append(name)
            return parts.Pace(1.0, 1, 1)

        return measured

    cells = {name: cell(name) for name in "abc"}
    record.end = 70.0  # a cell takes 30: compiled, warmed up, timed
    parts.paces(parts.REHEARSAL, record, cells, "a")
    assert "skipped" in figures_in(record)["c"] and "seconds_per_round" in figures_in(record)["b"]
    calls.clear()
    record.end = 1e6
    parts.paces(parts.REHEARSAL, record, cells, "a")
    assert set(calls) == {"a", "c"}, "the base again, for ratios of neighbours; what was measured is left"
    assert "seconds_per_round" in figures_in(record)["c"]


def test_without_a_gpu_it_ends_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "h200.py"), "--output", str(tmp_path / "h200.json")]
    surroundings = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: jax ") and "--rehearse" in done.stderr and done.stderr.count("\n") == 1
