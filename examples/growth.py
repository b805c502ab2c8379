"""How a decoding step grows with the context and with the batch: plain, and as a verification of six tokens.

Random weights of a named shape; attention reads a cache's whole capacity, so that is what "context" means here::

    python examples/growth.py --shape Llama-100M
"""

from __future__ import annotations

import argparse

import numpy as np

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.bench.random_models import random_pair
from eagle3_jax.bench.rounds import timed_rounds
from eagle3_jax.drafters import Plain
from eagle3_jax.load import precision_named

NODES = 6


def step_seconds(decoder: SpeculativeDecoder, *, batch: int, context: int, steps: int, repeats: int) -> list[float]:
    """Seconds of one round, in each repeat, with caches of this many slots."""
    prompts = [[1 + row] * 8 for row in range(batch)]
    # A limit that fills the context sizes the caches; only a few steps are run.
    longest = context - len(prompts[0]) - NODES
    paces = [timed_rounds(decoder, prompts, max_new_tokens=longest, tokens=steps) for _ in range(repeats + 1)]
    return [pace.seconds_per_round for pace in paces[1:]]  # the first one compiles


def main() -> None:
    """Print both curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="Llama-100M")
    parser.add_argument("--dtype", default="mixed")
    parser.add_argument("--contexts", default="128,512,2048,8192")
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    target, _ = random_pair(given.shape, precision=precision_named(given.dtype))
    plain = SpeculativeDecoder(target, Plain(), stop_tokens=())
    verify = SpeculativeDecoder(target, Plain(NODES), stop_tokens=())
    points = [(1, int(context)) for context in given.contexts.split(",")]
    points += [(int(batch), 256) for batch in given.batches.split(",")]
    print("batch  context  plain step ms  tokens/s  verify 6 ms  v")
    for batch, context in points:
        options = {"batch": batch, "context": context, "steps": given.steps, "repeats": given.repeats}
        one, six = (step_seconds(decoder, **options) for decoder in (plain, verify))
        ratio = np.median(np.array(six) / np.array(one))
        step = float(np.median(one))
        figures = f"{1e3 * step:13.1f}  {batch / step:8.1f}  {1e3 * np.median(six):11.1f}  {ratio:.2f}"
        print(f"{batch:5d}  {context:7d}  {figures}", flush=True)


if __name__ == "__main__":
    main()
