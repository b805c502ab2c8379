"""How many tokens a round emits: with the shipped pair on its held-out prompts, or with another pair on yours.

Counts, no times: a run repeats them exactly on the same machine. The shipped pair takes some
minutes, 240 prompts of the chat model half an hour::

    python examples/acceptance.py --output validation/results/acceptance-shipped-pair.json
    python examples/acceptance.py --pair smollm2 --prompts mt_bench.jsonl humaneval.jsonl gsm8k.jsonl
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import eagle3_jax as e3
from eagle3_jax.engine.engine import Engine
from eagle3_jax.files.sources import bundled
from eagle3_jax.measure.environment import environment
from eagle3_jax.measure.records import write_record
from eagle3_jax.prompts.benchmark import Prompt, read_prompts
from eagle3_jax.prompts.request import Request
from eagle3_jax.types import SamplingMode

GREEDY = e3.DraftSampling.GREEDY
SAMPLED = e3.DraftSampling.PROBABILISTIC
TREE = e3.DynamicTree(num_nodes=60, max_depth=8, top_k=10)
# Name, drafter, options of the decoder, temperature, new tokens.
Row = tuple[str, str, dict[str, Any], float, int]
SHIPPED: Sequence[Row] = (
    ("chain K=5", "eagle3", {"num_speculative_tokens": 5}, 0.0, 128),
    ("tree of 60 nodes, 8 levels, top 10", "eagle3", {"tree": TREE}, 0.0, 128),
    ("n-gram K=5", "ngram", {"num_speculative_tokens": 5}, 0.0, 128),
    (
        "chain K=4, likeliest",
        "eagle3",
        {"num_speculative_tokens": 4, "draft_sampling": GREEDY},
        1.0,
        64,
    ),
    (
        "chain K=4, drawn",
        "eagle3",
        {"num_speculative_tokens": 4, "draft_sampling": SAMPLED},
        1.0,
        64,
    ),
)
PUBLISHED: Sequence[Row] = (SHIPPED[0], SHIPPED[2])
SLOTS = 8


def main() -> None:
    """Measures every row, prints it, and writes all of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pair", help="a target with a head of its own, such as smollm2; default: the shipped pair"
    )
    parser.add_argument(
        "--prompts", type=Path, nargs="+", help="JSONL files of the prompts for --pair"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    parser.add_argument("--max-prompts", type=int, help="fewer prompts of each kind, to try it")
    options = parser.parse_args()
    if (options.pair is None) != (options.prompts is None):
        parser.error("--pair and --prompts go together")

    dtype = "mixed" if options.pair is None else "float32"
    target = e3.load_target(options.pair, dtype=dtype)
    drafters = {
        "eagle3": e3.load_drafter(options.pair, target=target),
        "ngram": e3.drafters.NGram(),
    }
    kinds = collections.defaultdict(list)
    for file in options.prompts or [bundled("prompts.jsonl")]:
        for prompt in read_prompts(file, target, max_new_tokens=1):
            kinds[prompt.category if options.pair is None else file.stem].append(prompt)
    rows = []
    for row in SHIPPED if options.pair is None else PUBLISHED:
        for kind, prompts in kinds.items():
            rows.append(measured(target, drafters, row, kind, prompts[: options.max_prompts]))
            if options.output:  # after every row, so that nothing is lost
                write_record(
                    options.output,
                    {"dtype": dtype, "seed": 0, "about": environment(), "rows": rows},
                )


def measured(
    target: e3.LoadedTarget,
    drafters: Mapping[str, Any],
    row: Row,
    kind: str,
    prompts: Sequence[Prompt],
) -> dict[str, Any]:
    """Decodes prompts with one draft, and prints and returns the counters."""
    name, drafter, options, temperature, max_new_tokens = row
    decoder = e3.SpeculativeDecoder(target, drafters[drafter], **options)
    longest = max(len(prompt.tokens) for prompt in prompts)
    capacity = longest + max_new_tokens + decoder.loop.drafter.num_nodes
    mode = SamplingMode.TEMPERATURE if temperature else SamplingMode.GREEDY
    engine = Engine(decoder, slots=SLOTS, capacity=capacity, sampling_mode=mode)
    for number, prompt in enumerate(prompts):
        engine.submit(Request(prompt.tokens, max_new_tokens, temperature, seed=number))
    counters = []
    new_tokens = 0
    rounds = -len(prompts)  # the first token of each comes from the prefill
    while not engine.idle:
        for event in engine.tick():
            rounds += bool(event.tokens)
            if event.output is not None:
                counters.append(event.stats)
                new_tokens += len(event.output)
    stats = e3.SpeculationStats.merge(counters)
    shares = " ".join(f"{share:.2f}" for share in stats.acceptance_per_position)
    per_round = (new_tokens - len(prompts)) / rounds
    print(
        f"{name}, T={temperature:g}, {kind}: {per_round:.2f} tokens a round; {shares}", flush=True
    )
    return {
        "draft": name,
        "kind": kind,
        "prompts": len(prompts),
        "temperature": temperature,
        "max_new_tokens": max_new_tokens,
        "new_tokens": new_tokens,
        "rounds": rounds,
        "tokens_per_round": per_round,
        **stats.to_json(),
        "acceptance_per_position": stats.acceptance_per_position,
    }


if __name__ == "__main__":
    main()
