"""Long commands print their step, and report the measurements until an interruption."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import tiny

from eagle3_jax.bench import run as bench_run
from eagle3_jax.bench import tune as tuning
from eagle3_jax.cli import _progress
from eagle3_jax.cli._progress import Activity, counted

GOLDEN = tiny.GOLDEN / "official"
PAIR = ("--target", GOLDEN / "target", "--drafter", GOLDEN / "eagle3", "--dtype", "float32")
PLACE = re.compile(r"(\d+) of (\d+)(?:, about \d+ (?:s|min) left)?: (.*)")


def interrupting(monkeypatch: pytest.MonkeyPatch, where: object, name: str, calls: int) -> None:
    """Replaces a function by one that a Ctrl-C meets in this call."""
    original = getattr(where, name)
    count = iter(range(1, 10**6))

    def stopped(*arguments: object, **options: object) -> object:
        if next(count) == calls:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    monkeypatch.setattr(where, name, stopped)


def test_a_step_is_counted_when_it_begins_and_the_rest_is_estimated_from_the_mean(monkeypatch):
    # At the start, and at each line after the first.
    seconds: Iterator[float] = iter([0.0, 60.0, 60.0, 90.0, 150.0])
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    lines: list[str] = []
    now = counted(Activity(lines.append, lines.append), 4)

    now.say("one")
    now.tell("one is done")
    now.say("two")
    now.tell("two is done")
    now.say("three")

    assert lines == [
        "1 of 4: one",
        "1 of 4, about 3 min left: one is done",
        "2 of 4, about 3 min left: two",
        "2 of 4, about 2 min left: two is done",
        "3 of 4, about 2 min left: three",
    ]


def test_an_interrupted_benchmark_reports_the_completed_repeats(cli, monkeypatch, tmp_path):
    out = tmp_path / "out"
    options = (
        "--prompts random --max-prompts 1 --prompt-tokens 5 --max-new-tokens 3 --chains 1"
        " --tree none --ngram none"
    )
    quick = ("bench", *PAIR, *options.split(), "--rivals", "none", "--repeats", 3, "--output", out)
    # In the second repeat, when the second contender has decoded and its costs are being measured.
    interrupting(monkeypatch, bench_run, "step_costs", calls=6)

    code, _, err = cli(*quick)
    assert code == 130
    assert "interrupted: measured repeats 1 of 3 at batch 1" in err
    (report,) = json.loads((out / "bench.json").read_text())["reports"]
    assert report["repeats"] == 1
    assert [row["name"] for row in report["rows"]] == ["plain float32", "chain K=1"]

    steps = [PLACE.fullmatch(line) for line in err.splitlines() if PLACE.fullmatch(line)]
    assert [(step[1], step[2]) for step in steps if step] == [
        (str(number), "8") for number in range(1, 6)
    ]


def test_an_interrupted_tuning_reports_the_batch_sizes_that_it_has(cli, monkeypatch, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_ids": [1, 17, 5, 42]}\n')
    options = ("--prompts", prompts, "--max-new-tokens", 4, "--chains", 1, "--repeats", 1, "--json")
    # The fifth call is the first of the second batch size.
    interrupting(monkeypatch, tuning, "step_costs", calls=5)
    code, out, err = cli("tune", *PAIR, *options, "--batch-sizes", "1,2")
    assert code == 130
    assert [tuned["batch"] for tuned in json.loads(out)["batches"]] == [1]
    assert "interrupted: measured batch sizes 1 of 1,2" in err

    first, second = (PLACE.fullmatch(line) for line in err.splitlines()[:2])
    assert first and first[3].startswith("K=1: τ ")
    assert second and second[3].startswith("batch 1: K=1 ")
    # Before it come acceptance, and two shapes twice at the first batch size.
    assert second[1] == "5"
