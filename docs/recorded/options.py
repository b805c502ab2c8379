"""Measures what options of a request cost.

    python docs/recorded/options.py docs/recorded/options.json        # five minutes

Every decoder decodes the same held-out code prompts in turn, in every repeat, on the shipped pair.
Times include the prefill and no compilation. ``write_tables.py`` writes the table.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from page_tables import Row, cores, spread, table, version

import eagle3_jax as e3
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import write_record
from eagle3_jax.prompts import benchmark

RECORD = Path(__file__).with_suffix(".json")
PROMPTS = 16
NEW_TOKENS = 64
REPEATS = 5


def requests(
    target: e3.LoadedTarget, head: e3.LoadedDrafter
) -> dict[str, tuple[e3.SpeculativeDecoder, Row]]:
    """Returns decoders and arguments of ``generate`` by the option's name, the baseline first."""
    decoder = partial(e3.SpeculativeDecoder, drafter=head, num_speculative_tokens=3, stop_tokens=())
    processors = {
        "`LogitBias` of one token": e3.LogitBias({7: 1.5}),
        "`MinP`": e3.MinP(0.02),
        "`Penalty`, repetition": e3.Penalty(repetition=1.1),
        "`TokenAutomaton` of one state": e3.TokenAutomaton(
            np.zeros((1, target.vocab_size), np.int32)
        ),
    }

    named: dict[str, Any] = {
        "none": (decoder(target), {}),
        "`logprobs=5`": (decoder(target), {"logprobs": 5}),
    }
    return named | {
        name: (decoder(e3.with_processors(target, part)), {}) for name, part in processors.items()
    }


def timed(runs: dict[str, Callable[[], Any]]) -> dict[str, Row]:
    """Returns the seconds of each in every repeat, in turn, after one run that compiles."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(REPEATS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: {"seconds": seconds[name]} for name in runs}


def measure() -> Row:
    """Returns the record."""
    target = e3.load_target()
    head = e3.load_drafter(target=target)
    texts = benchmark.shipped()[: 2 * PROMPTS : 2]  # the first 40 are code

    def all_texts(decoder: Any, **options: Any) -> Callable[[], list[Any]]:
        return lambda: [
            decoder.generate(text, max_new_tokens=NEW_TOKENS, **options) for text in texts
        ]

    return {
        "environment": environment(),
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "requests": timed(
            {
                name: all_texts(decoder, **options)
                for name, (decoder, options) in requests(target, head).items()
            }
        ),
    }


def ratios(rows: dict[str, Row]) -> Iterator[tuple[str, str]]:
    """Yields the name of a row, and how many times faster than the first row it is in a repeat."""
    base_seconds = next(iter(rows.values()))["seconds"]
    for name, row in rows.items():
        gains = [base / seconds for base, seconds in zip(base_seconds, row["seconds"], strict=True)]
        low, median, high = statistics.quantiles(gains, n=4, method="inclusive")
        yield name, spread({"low": low, "median": median, "high": high})


def origin(record: Row) -> str:
    """Names the run."""
    about = record["environment"]
    repeats = len(record["requests"]["none"]["seconds"])
    return (
        f"{version(about)}, {cores(about)}, float32,\n{record['prompts']} code prompts,"
        f" {record['new_tokens']} new tokens, {repeats} repeats. Median and quartiles."
    )


def cost(record: Row) -> str:
    """Writes the speed with options of a request."""
    rows = [[*row] for row in ratios(record["requests"])]
    return f"{table(['option', 'speed compared with none'], rows)}\n\n{origin(record)}"


if __name__ == "__main__":
    write_record(Path(sys.argv[1]), measure())
