"""The tables of ``docs/rollouts.md``, from the record of ``examples/rollouts.py``."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from page_tables import cores, record, spread, table, version

from eagle3_jax.theory.speedup import speedup

RECORD = "rollouts-shipped-pair"
DRAFTERS = ("refreshed head", "frozen head", "n-grams", "siblings")
# Steps at the beginning and at the end that a cell averages.
WINDOW = 20


def acceptance() -> str:
    """Tokens per round and acceptance by depth, at the beginning and at the end."""
    runs = record(RECORD)["train"]["runs"]
    drafted = [lines for name, lines in runs.items() if name.startswith("drafted-")]
    rows = []
    for drafter in DRAFTERS:
        cells = []
        for part in (slice(WINDOW), slice(-WINDOW, None)):
            measured = [[line for line in lines[part] if drafter in line] for lines in drafted]
            tokens = [mean(line[drafter]["tokens_per_round"] for line in seed) for seed in measured]
            depths = zip(
                *(line[drafter]["by_depth"] for seed in measured for line in seed), strict=True
            )
            cells += [with_range(tokens), " · ".join(f"{mean(depth):.2f}" for depth in depths)]
        rows.append([drafter, *cells])
    columns = (
        "drafter, K=3",
        f"tokens per round, first {WINDOW} steps",
        "accepted by depth",
        f"last {WINDOW} steps",
        "accepted by depth",
    )
    return table(columns, rows)


def seconds() -> str:
    """The speed of rollouts against plain ones, for every policy and batch."""
    batches = by_batch(timed())
    ways = [way for way in timed()[0]["ways"] if way != "plain"]
    rows = []
    for step, way in itertools.product(policies(), ways):
        lines = [lines[step] for lines in batches.values()]
        cells = [
            spread(line["ways"][way]["speedup"]) if way in line["ways"] else "" for line in lines
        ]
        rows.append([str(step), way, *cells])
    return table(["policy", "rollouts", *batches], rows)


def predictions() -> str:
    """The speed that ``eagle3 plan speedup`` computes from the costs of a round."""
    batches = by_batch(line for line in timed() if line["costs"])
    ways = timed()[0]["costs"]
    rows = []
    for step, way in itertools.product(policies(), ways):
        cells = [predicted(lines[step], way) for lines in batches.values()]
        rows.append([str(step), way, *cells])
    return table(["policy", "rollouts", *batches], rows)


def timed() -> list[dict[str, Any]]:
    """Returns the lines with seconds."""
    return [line for line in record(RECORD)["time"]["lines"] if "ways" in line]


def policies() -> list[int]:
    """Returns the steps whose policies were timed."""
    return sorted({line["step"] for line in timed()})


def by_batch(lines: Iterable[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Returns the lines of each batch, by the step of the policy."""
    batches: dict[str, dict[int, dict[str, Any]]] = {}
    for line in lines:
        answers = f"{line['rows']} answers" if line["rows"] > 1 else "1 answer"
        name = f"{answers}, mixed" if line["lengths"] == "mixed" else answers
        batches.setdefault(name, {})[line["step"]] = line
    return batches


def predicted(line: Mapping[str, Any], way: str) -> str:
    """Returns ``τ / (v + K·c)`` in numbers."""
    cost = line["costs"][way]
    tokens = line["ways"][way]["tokens_per_round"]
    ratio = speedup(tokens, num_draft_tokens=cost["K"], verify_cost=cost["v"], draft_cost=cost["c"])
    return f"{tokens:.2f} / ({cost['v']:.2f} + {cost['K'] * cost['c']:.2f}) = {ratio:.2f}"


def drift() -> str:
    """How far log-probabilities of rollouts are from those of the trainer."""
    rows = []
    for line in record(RECORD)["time"]["lines"]:
        for dtype, values in line.get("drift", {}).items():
            tokens = [f"{values[name]:.1e}" for name in ("mean", "largest")]
            bounds = f"{values['ratio_min']:.3f}–{values['ratio_max']:.3f}"
            ratios = f"{values['ratio_std']:.2g} ({bounds})"
            rows.append([str(line["step"]), dtype, *tokens, ratios])
    columns = ("policy", "rollouts in", "mean", "largest", "standard deviation of ratios, range")
    return table(columns, rows)


def measured_on() -> str:
    """What the record is of, and what a step of the head costs."""
    parts = record(RECORD)
    facts = parts["train"]["environment"]
    seeds = sum(name.startswith("drafted-") for name in parts["train"]["runs"])
    steps = min(len(lines) for lines in parts["train"]["runs"].values())
    answers = parts["train"]["groups"] * parts["train"]["samples"]
    return (
        f"{version(facts)}, {cores(facts)}. {steps} steps, {seeds} seeds, {answers} answers of"
        f" {parts['train']['new_tokens']} tokens a step, temperature 1. A step of the head's"
        f" objective took as long as {refresh_steps(parts['train']):.0f} plain steps of {answers}"
        " rows."
    )


def refresh_steps(parts: Mapping[str, Any]) -> float:
    """Returns the cost of a step of the head's objective, in plain steps of the whole batch."""

    def median(kind: str, name: str) -> float:
        return statistics.median(
            line[name]
            for run, lines in parts["runs"].items()
            if run.startswith(kind)
            for line in lines
        )

    # A batch of plain rollouts is a prefill and a step for each other token.
    plain_step = median("plain-", "seconds") / parts["new_tokens"]
    return median("drafted-", "refresh_seconds") / plain_step


def mean(values: Iterable[float]) -> float:
    """Returns the mean."""
    return statistics.fmean(values)


def with_range(values: Sequence[float]) -> str:
    """Returns the mean of the seeds, and the lowest and the highest."""
    return f"{mean(values):.2f} ({min(values):.2f}–{max(values):.2f})"
