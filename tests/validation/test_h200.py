"""The script for ten minutes on a GPU, at tiny shapes: it records every cell at once, and it resumes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import h200
import pytest

COMPILED = Path(tempfile.gettempdir()) / "eagle3-jax-tests-compiled"
MEASURED = ["text", "device", "round", "contexts"]


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str) -> dict[str, Any]:
    command = ["h200.py", "--rehearse", "--output", str(output), "--compilation-cache", str(COMPILED), *arguments]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    h200.main()
    return json.loads(output.read_text())


def test_a_rehearsal_measures_once_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    output = tmp_path / "h200.json"
    first = run(monkeypatch, output, "--only", *MEASURED)
    assert {name: part["status"] for name, part in first["parts"].items()} == dict.fromkeys(MEASURED, "done")
    assert run(monkeypatch, output, "--only", *MEASURED[1:]) == first, "the second run measured something again"
    figures = {name: part["figures"] for name, part in first["parts"].items()}
    assert figures["device"]["environment"]["jax"]["backend"] == "cpu" and figures["device"]["error of float32"] < 1e-5
    assert figures["text"]["same text"] is True and figures["text"]["mean_acceptance_length"] > 1
    whole = figures["round"]
    cells = ("plain", "verify 6", "chain", "target alone", "draft step", "tree of 6")
    for one in (whole[name]["seconds_per_round"] for name in cells):
        assert one["low"] <= one["median"] <= one["high"] and len(one["values"]) == 3  # one at once, two in turns
    assert whole["plain"]["round_in_bases"]["median"] == 1 and whole["chain"]["rounds"] < whole["plain"]["rounds"] == 6
    seconds = {name: whole[name]["seconds_per_round"]["median"] for name in cells}
    copied = figures["device"]["bytes_per_second"]["copy"]
    alone = seconds["target alone"] + 5 * seconds["draft step"]
    assert first["ratios"] == pytest.approx(
        {
            "same text": 1,
            "plain share of copy": whole["step_bytes"] / seconds["plain"] / copied,
            "verify in plain steps": seconds["verify 6"] / seconds["plain"],
            "share outside target and head": 1 - alone / seconds["chain"],
        }
    )
    assert "a REHEARSAL: nothing counts" in capsys.readouterr().out
    for text, words in ((json.dumps(first | {"code": "x"}), "another code"), ("[]", "another kind"), ("?", "kind")):
        output.write_text(text)
        with pytest.raises(SystemExit, match=words):
            run(monkeypatch, output)


@pytest.fixture
def record(tmp_path: Path) -> Any:
    output = tmp_path / "h200.json"
    output.write_text(json.dumps({"parts": {"some": {"figures": {}}}}))
    return h200.Record(output, "some")


def figures_in(record: Any) -> dict[str, Any]:
    return json.loads(record.output.read_text())["parts"]["some"]["figures"]


def test_every_cell_is_in_the_file_before_the_next_one_starts(record: Any) -> None:
    seen: list[set[str]] = []

    def cell(seconds: float) -> Any:
        def measured() -> Any:
            seen.append(set(figures_in(record)))
            return h200.Pace(seconds, 2, 6)

        return measured

    def broken() -> Any:
        raise RuntimeError("injected")

    h200.measure(h200.REHEARSAL, record, {"a": cell(1.0), "bad": broken, "b": cell(3.0)})
    # Compiled, warmed up and timed once each; then two turns of both.
    assert seen == [set()] * 3 + [{"a", "bad"}] * 3 + [{"a", "bad", "b"}] * 4
    found = figures_in(record)
    assert found["b"]["seconds_per_round"]["median"] == 1.5 and found["b"]["tokens_per_second"]["median"] == 2.0
    assert found["b"]["round_in_bases"]["values"] == [3.0, 3.0]
    assert found["bad"] == {"failed": "RuntimeError: injected"}


def test_a_cell_without_time_is_measured_the_next_time(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    calls = []
    monkeypatch.setattr("time.monotonic", lambda: clock[0])

    def cell(name: str) -> Any:
        def measured() -> Any:
            clock[0] += 10.0
            calls.append(name)
            return h200.Pace(1.0, 1, 1)

        return measured

    cells = {name: cell(name) for name in "abc"}
    record.end = 70.0  # a cell takes 30
    h200.measure(h200.REHEARSAL, record, cells)
    assert "skipped" in figures_in(record)["c"] and "seconds_per_round" in figures_in(record)["b"]
    calls.clear()
    record.end = 1e6
    h200.measure(h200.REHEARSAL, record, cells)
    assert set(calls) == {"a", "c"}, "the first again, for ratios of neighbors in time; the other is kept"
    assert "seconds_per_round" in figures_in(record)["c"]


def test_a_part_that_fails_or_hangs_says_so(record: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = argparse.Namespace(output=record.output, rehearse=False, compilation_cache=None)
    ended = lambda end: h200.run_part("verify", given, h200.time.monotonic() + end)["status"]
    assert ended(5) == "not run: the budget was spent; run the command again"
    failed = subprocess.CompletedProcess([], 1, stderr="Traceback\nRuntimeError: injected\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert ended(1000) == "failed: RuntimeError: injected"

    def hang(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired([], timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert ended(1000) == "cut off after 90 s; run the command again"


def test_without_a_gpu_it_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["h200.py", "--output", str(tmp_path / "h200.json")])
    with pytest.raises(SystemExit, match=r"error: jax .*--rehearse"):
        h200.main()
    first = list(h200.PARTS.values())[:5]
    assert sum(part[0] for part in first) <= h200.BUDGET < 600 - 2 * h200.ROOM
