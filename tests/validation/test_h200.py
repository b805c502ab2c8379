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
    command = [
        "h200.py",
        "--rehearse",
        "--output",
        str(output),
        "--compilation-cache",
        str(COMPILED),
        *arguments,
    ]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    h200.main()
    return json.loads(output.read_text())


def test_a_rehearsal_measures_once_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    output = tmp_path / "h200.json"
    first = run(monkeypatch, output, "--only", *MEASURED)
    assert {name: part["status"] for name, part in first["parts"].items()} == dict.fromkeys(
        MEASURED, "done"
    )
    assert run(monkeypatch, output, "--only", *MEASURED[1:]) == first, (
        "the second run measured something again"
    )
    figures = {name: part["figures"] for name, part in first["parts"].items()}
    assert (
        figures["device"]["environment"]["jax"]["backend"] == "cpu"
        and figures["device"]["error of float32"] < 1e-5
    )
    assert figures["text"]["same text"] is True and figures["text"]["mean_acceptance_length"] > 1
    rounds = figures["round"]
    cells = ("plain", "verify 6", "chain", "target alone", "draft step", "tree of 6")
    for name in cells:
        spread = rounds[name]["seconds_per_round"]
        assert spread["low"] <= spread["median"] <= spread["high"]
        assert len(spread["values"]) == 3  # one at once, two in turns
    assert (
        rounds["plain"]["round_in_bases"]["median"] == 1
        and rounds["chain"]["rounds"] < rounds["plain"]["rounds"] == 63
    )
    seconds = {name: rounds[name]["seconds_per_round"]["median"] for name in cells}
    copied = figures["device"]["bytes_per_second"]["copy"]
    target_and_head = seconds["target alone"] + 5 * seconds["draft step"]
    assert first["ratios"] == pytest.approx(
        {
            "same text": 1,
            "plain share of copy": rounds["step_bytes"] / seconds["plain"] / copied,
            "verify in plain steps": seconds["verify 6"] / seconds["plain"],
            "share outside target and head": 1 - target_and_head / seconds["chain"],
        }
    )
    assert "a REHEARSAL: nothing counts" in capsys.readouterr().out
    for text, words in (
        (json.dumps(first | {"code": "x"}), "another code"),
        ("[]", "no record"),
        ("?", "no record"),
    ):
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
    figures = figures_in(record)
    assert (
        figures["b"]["seconds_per_round"]["median"] == 1.5
        and figures["b"]["tokens_per_second"]["median"] == 2.0
    )
    assert figures["b"]["round_in_bases"]["values"] == [3.0, 3.0]
    assert figures["bad"] == {"failed": "RuntimeError: injected"}


def test_a_cell_without_time_is_measured_the_next_time(
    record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert set(calls) == {"a", "c"}, (
        "the first again, for ratios of neighbors in time; the second is not measured again"
    )
    assert "seconds_per_round" in figures_in(record)["c"]


@pytest.mark.parametrize("setting", [h200.FULL, h200.REHEARSAL], ids=["full", "rehearsal"])
def test_caches_are_full_while_rounds_are_timed(setting: Any) -> None:
    """Attention reads the committed slots only, so the prompt must fill the cache, whatever is drafted."""
    for context in (setting.context, *setting.contexts):
        options = h200.sizes(setting, 2, context)
        (length,) = {len(prompt) for prompt in options["prompts"]}
        assert length + options["max_new_tokens"] + h200.LARGEST == context
        assert (
            length + setting.tokens < h200.mean_slots(setting, context) + setting.tokens <= context
        )
        assert options["max_new_tokens"] > setting.tokens, (
            "rounds would end at the limit and not after the tokens"
        )
    assert {2048, 8192} <= {h200.FULL.context, *h200.FULL.contexts}


def test_every_draft_has_a_cache_of_the_same_size() -> None:
    setting = h200.REHEARSAL
    for draft in ("plain", "verify 6", "chain", "tree of 60"):
        state = h200.decoder_of(setting, draft).prefill(**h200.sizes(setting))
        assert state.tokens.shape[1] == setting.context
        assert int(state.cache.length[0]) == setting.context - 128


def test_a_part_ends_at_its_limit_and_reports_how_it_ended(
    record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreter, imports and start of the device take many seconds; the clock of the figures starts after them."""
    options = argparse.Namespace(output=record.output, rehearse=False, compilation_cache=None)
    record.output.write_text(json.dumps({"parts": {"verify": {"figures": {}}}}))
    status = lambda seconds: h200.run_part("verify", options, h200.time.monotonic() + seconds)
    assert status(5) == "not run: the budget was spent; run the command again"

    def end(command: list[str], *, timeout: float, **_: Any) -> Any:
        seconds = float(command[command.index("--within") + 1])
        assert seconds == h200.PARTS["verify"].seconds
        assert timeout >= seconds + h200.START + h200.ROOM
        return subprocess.CompletedProcess(command, 0, stderr="")

    def fail(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(command, 1, stderr="Traceback\nRuntimeError: injected\n")

    def hang(*_: Any, timeout: float, **__: Any) -> None:
        raise subprocess.TimeoutExpired([], timeout)

    for run, expected in (
        (end, "done"),
        (fail, "failed: RuntimeError: injected"),
        (hang, "cut off after 115 s; run the command again"),
    ):
        monkeypatch.setattr(subprocess, "run", run)
        assert status(1000) == expected


def test_without_a_gpu_it_ends_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["h200.py", "--output", str(tmp_path / "h200.json")])
    with pytest.raises(SystemExit, match=r"error: jax .*--rehearse"):
        h200.main()


def test_the_first_five_parts_fit_into_one_command() -> None:
    seconds = [part.seconds for part in h200.PARTS.values()][:5]
    usual_start = 12
    assert (
        sum(seconds) + 4 * usual_start + h200.START + h200.ROOM <= h200.BUDGET < 600 - 2 * h200.ROOM
    )
