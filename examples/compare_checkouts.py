"""Is this checkout slower than that one? Decoders of both, and of one of them twice, timed in turns in one run.

    python examples/compare_checkouts.py OLD NEW [--repeats 12] [--dtype mixed] [--output FILE]

OLD and NEW are directories of checkouts. Each gets a process of its own, OLD gets two: how far the second one is from
the first says what a difference means on this machine (an A/A control). All have compiled and run everything once
before the clock starts, and only one works at a time. Prints the median ratio of tokens/s to OLD, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

PROMPTS = ["def read_config(path):\n", "class Stack:\n    def __init__(self", "import os\nimport sys\n\n\ndef main("]
METHODS = ("plain", "chain K=3", "chain K=5", "tree N=12", "n-gram K=5", "chain K=3, sampled")
NEW_TOKENS = 96


def work(dtype: str) -> None:
    """A process of one checkout: reads the name of a method, runs it over all prompts, writes seconds and tokens."""
    import eagle3_jax as e3

    target = e3.load_target(dtype=dtype)
    head = e3.load_drafter(target=target)
    sampled = e3.SamplingParams(temperature=1.0)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "chain K=3": {"drafter": head, "num_speculative_tokens": 3},
        "chain K=5": {"drafter": head, "num_speculative_tokens": 5},
        "tree N=12": {"drafter": head, "tree": e3.DynamicTree(num_nodes=12, max_depth=4, top_k=4)},
        "n-gram K=5": {"drafter": e3.drafters.NGram(5)},
        "chain K=3, sampled": {"drafter": head, "num_speculative_tokens": 3},
    }
    decoders = {name: e3.SpeculativeDecoder(target, stop_tokens=(), **one) for name, one in options.items()}
    for line in sys.stdin:
        name = line.strip()
        sampling = sampled if "sampled" in name else None
        results = [
            decoders[name].generate(prompt, max_new_tokens=NEW_TOKENS, sampling=sampling, seed=1) for prompt in PROMPTS
        ]
        tokens = [result.tokens[0] for result in results]
        print(json.dumps([sum(result.seconds for result in results), tokens]), flush=True)


def start(checkout: Path, dtype: str) -> subprocess.Popen:
    """A worker whose imports come from that checkout."""
    environment = dict(os.environ, PYTHONPATH=str(checkout.absolute()))
    command = [sys.executable, __file__, "--work", dtype]
    return subprocess.Popen(
        command, env=environment, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(worker: subprocess.Popen, method: str) -> tuple[float, list[list[int]]]:
    """One pass of a method over all prompts."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(f"{method}\n")
    worker.stdin.flush()
    answer = worker.stdout.readline()
    if not answer:
        raise SystemExit(f"a worker ended with code {worker.wait()}")
    return tuple(json.loads(answer))


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--dtype", default="mixed")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    checkouts = {"old": options.old, "new": options.new, "old again": options.old}
    workers = {name: start(path, options.dtype) for name, path in checkouts.items()}
    found: dict[str, Any] = {"dtype": options.dtype, "new_tokens": NEW_TOKENS, "prompts": len(PROMPTS), "methods": {}}
    for method in METHODS:
        texts = {name: ask(worker, method)[1] for name, worker in workers.items()}  # the first one compiles
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for repeat in range(options.repeats):
            order = list(workers) if repeat % 2 else list(workers)[::-1]
            for name in order:
                seconds[name].append(ask(workers[name], method)[0])
        old = np.array(seconds["old"])
        ratios = {name: old / np.array(seconds[name]) for name in ("new", "old again")}
        same = texts["new"] == texts["old"]
        quartiles = {name: np.percentile(values, [25, 50, 75]).tolist() for name, values in ratios.items()}
        found["methods"][method] = {"seconds": seconds, "ratio_quartiles": quartiles, "same_texts": same}
        shown = ", ".join(f"{name} {q[1]:.3f} ({q[0]:.3f}-{q[2]:.3f})" for name, q in quartiles.items())
        print(f"{method:20} {shown}, {'the same texts' if same else 'OTHER TEXTS'}", flush=True)
    for worker in workers.values():
        worker.terminate()
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    else:
        main()
