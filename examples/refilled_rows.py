"""Rounds and seconds of a list of prompts: in batches that wait for their last row, and in rows that are refilled.

64 prompts of the shipped pair with limits of 16 to 256 tokens, chosen at random, in 8 rows; both
ways take turns::

    python examples/refilled_rows.py --output validation/results/refilled-rows.json
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import eagle3_jax as e3
from eagle3_jax.engine.engine import Engine
from eagle3_jax.files.sources import bundled
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import spread_of, write_record
from eagle3_jax.prompts.benchmark import read_prompts
from eagle3_jax.prompts.request import Request
from eagle3_jax.types import SamplingMode

ROWS = 8
COUNT = 64
LIMITS = {"16 to 256": (16, 257), "136": (136, 137)}
METHODS: dict[str, dict[str, Any]] = {"plain": {}, "chain K=3": {"num_speculative_tokens": 3}}


def in_batches(
    decoder: e3.SpeculativeDecoder, requests: Sequence[Request]
) -> tuple[list[list[int]], int]:
    """Returns the texts, and the rounds of all batches; a batch ends with its last row."""
    outputs = []
    rounds = 0
    for start in range(0, len(requests), ROWS):
        batch = requests[start : start + ROWS]
        state = decoder.prefill(
            [request.tokens for request in batch],
            max_new_tokens=[request.max_new_tokens for request in batch],
            capacity=512,
        )
        while bool(state.running.any()):
            state = decoder.step(state).state
            rounds += 1
        result = decoder.result(state, [request.tokens for request in batch], seconds=0.0)
        outputs += result.tokens
    return outputs, rounds


def refilled(engine: Engine, requests: Sequence[Request]) -> tuple[list[list[int]], int]:
    """Returns the texts, and the rounds of the engine."""
    ids = [engine.submit(request) for request in requests]
    outputs = {}
    rounds = 0
    while not engine.idle:
        for event in engine.tick():
            if event.output is not None:
                outputs[event.request_id] = event.output
        rounds += 1
    return [outputs[request_id] for request_id in ids], rounds


def main() -> None:
    """Measures both ways with and without drafts, prints each and writes all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    target = e3.load_target()
    prompts = itertools.cycle(
        read_prompts(Path(bundled("prompts.jsonl")), target, max_new_tokens=256)
    )
    texts = [prompt.tokens for prompt in itertools.islice(prompts, COUNT)]
    rows = []
    for method, shape in METHODS.items():
        drafter = e3.load_drafter(target=target) if shape else None
        decoder = e3.SpeculativeDecoder(target, drafter, stop_tokens=(), **shape)
        engine = Engine(
            decoder, slots=ROWS, capacity=512, sampling_mode=SamplingMode.GREEDY, prefill_rows=ROWS
        )
        for name, (low, high) in LIMITS.items():
            limits = np.random.default_rng(0).integers(low, high, COUNT).tolist()
            requests = [Request(text, limit) for text, limit in zip(texts, limits, strict=True)]
            expected, rounds = in_batches(decoder, requests)  # these two compile
            outputs, rounds_refilled = refilled(engine, requests)
            assert outputs == expected
            ratios = []
            for _ in range(options.repeats):
                start = time.perf_counter()
                in_batches(decoder, requests)
                middle = time.perf_counter()
                refilled(engine, requests)
                ratios.append((middle - start) / (time.perf_counter() - middle))
            row = {
                "method": method,
                "limits": name,
                "rounds": rounds,
                "rounds_refilled": rounds_refilled,
            }
            rows.append(row | {"speedup": spread_of(ratios)})
            saved = 1 - rounds_refilled / rounds
            print(
                f"{method}, limits {name}: {rounds} rounds, {rounds_refilled} refilled ({saved:.0%}"
                f" fewer), {ratios}"
            )
    if options.output:
        record = {"prompts": COUNT, "rows_of_batch": ROWS, "repeats": options.repeats}
        write_record(options.output, record | {"about": environment(), "rows": rows})


if __name__ == "__main__":
    main()
