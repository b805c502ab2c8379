"""From which batch on does speculation not pay? Chains beside plain decoding at several batch sizes, in turns.

    python examples/batches.py [--batches 1,2,4,8,16,32] [--chains 1,2,3,5] [--dtypes float32,mixed] [--repeats 7]

All rows write the same number of tokens and ignore stop tokens, so no row waits for another. Prints tokens/s of plain
decoding and the median ratio of each chain to it, taken within each repeat.
"""

from __future__ import annotations

import argparse
import statistics

import eagle3_jax as e3

PROMPTS = [
    "def read_config(path):\n", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n\ndef main(",
    "def fibonacci(n):\n", "for line in open(path):\n", "class Node:\n    def __init__(self, value",
    "def test_add():\n", "from typing import Any\n\n\ndef load(",
]  # fmt: skip
NEW_TOKENS = 96


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--chains", default="1,2,3,5")
    parser.add_argument("--dtypes", default="float32,mixed")
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    for dtype in options.dtypes.split(","):
        target = e3.load_target(dtype=dtype)
        head = e3.load_drafter(target=target)
        decoders = {"plain": e3.SpeculativeDecoder(target, stop_tokens=())}
        for length in map(int, options.chains.split(",")):
            chain = e3.SpeculativeDecoder(target, head, num_speculative_tokens=length, stop_tokens=())
            decoders[f"K={length}"] = chain
        for batch in map(int, options.batches.split(",")):
            prompts = [PROMPTS[row % len(PROMPTS)] for row in range(batch)]
            seconds: dict[str, list[float]] = {name: [] for name in decoders}
            for repeat in range(-1, options.repeats):  # the first compiles
                for name, decoder in decoders.items():
                    taken = decoder.generate(prompts, max_new_tokens=NEW_TOKENS).seconds
                    if repeat >= 0:
                        seconds[name].append(taken)
            speed = NEW_TOKENS * batch / statistics.median(seconds["plain"])
            ratios = {
                name: statistics.median(plain / own for plain, own in zip(seconds["plain"], taken, strict=True))
                for name, taken in seconds.items()
            }
            row = "  ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items() if name != "plain")
            print(f"{dtype}, {batch} rows: plain {speed:,.0f} tokens/s;  {row}", flush=True)


if __name__ == "__main__":
    main()
