"""``eagle3 bench`` as its users meet it: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from eagle3_jax.cli import run
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli.bench.field import Field
from eagle3_jax.cli.bench.report import Findings

GOLDEN = tiny.GOLDEN / "official"
QUICK = ("--dtype", "float32", "--max-new-tokens", "4", "--repeats", "1")
PAIR = ("--target", str(GOLDEN / "target"), "--drafter", str(GOLDEN / "eagle3"))


def table_rows(file: Path, name: str) -> list[dict[str, str]]:
    """Returns the rows of a contender in the tables of a report, by column."""
    rows = []
    header = None
    for line in file.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            header = None
        elif header is None:
            header = cells
        elif name in cells:
            rows.append(dict(zip(header, cells, strict=True)))
    return rows


def test_the_command_measures_every_method_and_writes_it_all(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 17, 5, 42]}\n{"prompt_ids": [1, 2], "kind": "other"}\n')
    # As if it were not installed.
    monkeypatch.setitem(sys.modules, "transformers", None)
    arguments = [
        "bench", *PAIR, *QUICK, "--chains", "none", "--tree", "num_nodes=4,max_depth=2,top_k=2",
        "--ngram", "2", "--prompts", str(prompts),
        "--max-prompts", "2", "--batch-size", "1,2", "--json", "--output", str(tmp_path / "out"),
    ]  # fmt: skip

    assert run(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    single, pairs = result["reports"]

    names = [row["name"] for row in single["rows"]]
    assert names == ["plain float32", "tree N=4 G=2", "n-gram K=2"]
    assert [row["name"] for row in pairs["rows"]] == names
    assert (single["batch_size"], pairs["batch_size"], single["num_prompts"]) == (1, 2, 2)
    assert all(row["same_texts"] == 2 and row["lossless"] for row in single["rows"])
    assert all(0 < row["bandwidth_share"] < 1 for row in single["rows"])
    assert single["rows"][1]["chunk"]["p50"] > 0
    assert [task["task"] for task in single["rows"][1]["tasks"]] == ["prompts", "other"]

    reasons = {absent["name"]: absent["reason"] for absent in result["not_measured"]}
    assert "pip install 'eagle3-jax[bench]'" in reasons["transformers"]
    assert len(result["about"]["prompts_measured"]["sha256"]) == 64
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == result

    row = single["rows"][1]
    speed, latency, parts, tasks = table_rows(tmp_path / "out" / "bench.md", "tree N=4 G=2")[:4]
    ratio = row["ratio"]
    tau = row["acceptance"]["mean_acceptance_length"]
    assert speed["ratio"] == f"{ratio['median']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
    assert (speed["τ"], speed["same"], speed["lossless"]) == (f"{tau:.2f}", "2", "yes")
    assert speed["roofline"] == f"{row['bandwidth_share']:.1%}"

    assert latency["TTFT p50 p90 p99"] == " ".join(
        f"{1e3 * value:.2f}" for value in row["first_token"].values()
    )
    assert parts["draft step"] == f"{1e3 * row['step_seconds']['draft_seconds']:.2f} ms"
    assert (tasks["task"], tasks["τ"]) == ("all", f"{tau:.2f}")


def test_random_weights_with_simulated_acceptance_above_the_roofline_end_with_one_and_a_report(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("eagle3_jax.bench.run.ceiling", lambda target, *, rows, context, large: 1.0)
    out = tmp_path / "out"
    arguments = [
        "bench", "--shape", "llama-tiny", *QUICK, "--chains", "1,2", "--tree", "none",
        "--ngram", "none", "--simulated-acceptance-length", "3",
        "--max-prompts", "1", "--prompt-tokens", "7", "--output", str(out),
    ]  # fmt: skip

    assert run(arguments) == 1
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith("error: batch 1: plain float32 reads memory at ")
    assert len(errors) == 2
    words = " ".join(captured.out.split())
    for word in ("chain K=2 (simulated, not lossless)", "Not measured", "random weights", "3.00"):
        assert word in words, word

    saved = json.loads((out / "bench.json").read_text())
    speed = table_rows(out / "bench.md", "chain K=2 (simulated, not lossless)")[0]
    assert speed["lossless"] == "no"
    assert f"**FAILED: {saved['failures'][0]}**" in (out / "bench.md").read_text()
    assert saved["failures"] == [line.removeprefix("error: ") for line in errors]
    assert saved["about"]["prompts_measured"]["tokens"] == [7]
    assert [row["simulated_rates"] for row in saved["reports"][0]["rows"]] == [None, [1.0, 1.0]]
    assert saved["about"]["simulated_acceptance"] == "τ of 3"
    assert "SIMULATED acceptance, share of rounds by depth: 1.00 1.00" in words

    progress = [line for line in captured.err.splitlines() if "tokens/s, repeat 1 of 1" in line]
    assert [line.split(": ")[1] for line in progress] == [
        "batch 1, plain float32", "batch 1, chain K=2 (simulated, not lossless)",
    ]  # fmt: skip

    assert saved["not_measured"][0]["name"] == "chain K=1 (simulated, not lossless)"
    assert "allow 1 to 2" in saved["not_measured"][0]["reason"]


def test_a_run_fails_when_something_was_compiled_late():
    report: Any = SimpleNamespace(batch_size=1, too_fast=[], programs_after_warm_up=3)
    findings = Findings(device="a machine", about={}, reports=[report], missing=[], interruption="")
    assert findings.failures == ["batch 1: 3 programs were compiled while times were taken"]


def test_a_shape_is_measured_in_few_ways_at_published_rates(monkeypatch: pytest.MonkeyPatch):
    fields: list[Field] = []

    def measured(field: Field, *_: object, **__: object) -> None:
        fields.append(field)
        raise Misuse("this is enough")

    monkeypatch.setattr("eagle3_jax.cli.bench._measure_batch", measured)
    for more in (
        (),
        ("--simulated-acceptance-rate", "0.5", "--chains", "2", "--tree", "none", "--ngram", "1"),
    ):
        assert run(["bench", "--shape", "llama-tiny", "--dtype", "float32", *more]) == 2
    # These rates give vLLM's lengths for Llama-3.1-8B: 2.36 at K=2, 3.54 at K=7.
    rates = [0.78, 0.58, 0.43, 0.29, 0.24, 0.14, 0.08]
    assert [1 + sum(rates[:depth]) for depth in (2, 7)] == pytest.approx([2.36, 3.54])
    mark = " (simulated, not lossless)"
    rows = [[(row.name, row.simulated_rates) for row in field.contenders] for field in fields]
    assert rows[0] == [
        ("plain float32", None), (f"chain K=3{mark}", rates[:3]), (f"chain K=5{mark}", rates[:5]),
        (f"tree N=60 G=7{mark}", rates),
    ]  # fmt: skip
    assert rows[1] == [
        ("plain float32", None),
        (f"chain K=2{mark}", [0.5, 0.25]),
        ("n-gram K=1", None),
    ]
