"""How many tokens a round emits with the shipped pair: every kind of draft, on the held-out prompts, code and prose.

Counts, no times: a run repeats them exactly on the same machine. It takes some minutes::

    python examples/acceptance.py --output validation/results/acceptance-shipped-pair.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eagle3_jax as e3
from eagle3_jax.bench.environment import environment
from eagle3_jax.bench.records import write_record
from eagle3_jax.load import bundled

GREEDY = e3.DraftSampling.GREEDY
SAMPLED = e3.DraftSampling.PROBABILISTIC
TREE = e3.DynamicTree(num_nodes=60, max_depth=8, top_k=10)
# Name, drafter, options of the decoder, temperature, new tokens.
ROWS: Sequence[tuple[str, str, dict[str, Any], float, int]] = (
    ("chain K=5", "eagle3", {"num_speculative_tokens": 5}, 0.0, 128),
    ("tree of 60 nodes, 8 levels, top 10", "eagle3", {"tree": TREE}, 0.0, 128),
    ("n-gram K=5", "ngram", {"num_speculative_tokens": 5}, 0.0, 128),
    ("chain K=4, likeliest", "eagle3", {"num_speculative_tokens": 4, "draft_sampling": GREEDY}, 1.0, 64),
    ("chain K=4, drawn", "eagle3", {"num_speculative_tokens": 4, "draft_sampling": SAMPLED}, 1.0, 64),
)


def main() -> None:
    """Measures every row, prints it, and writes all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the record")
    parser.add_argument("--max-prompts", type=int, help="fewer prompts of each kind, to try it")
    arguments = parser.parse_args()

    prompts = [json.loads(line) for line in bundled("prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    target = e3.load_target(dtype="mixed")
    drafters = {"eagle3": e3.load_drafter(target=target), "ngram": e3.drafters.NGram()}
    rows = []
    for name, drafter, options, temperature, max_new_tokens in ROWS:
        decoder = e3.SpeculativeDecoder(target, drafters[drafter], **options)
        for kind in ("code", "prose"):
            texts = [prompt["prompt"] for prompt in prompts if prompt["kind"] == kind][: arguments.max_prompts]
            sampling = e3.SamplingParams(temperature=temperature)
            result = decoder.generate(texts, max_new_tokens=max_new_tokens, sampling=sampling)
            stats = result.stats
            rows.append(
                {
                    "draft": name,
                    "kind": kind,
                    "prompts": len(texts),
                    "temperature": temperature,
                    "max_new_tokens": max_new_tokens,
                    "new_tokens": sum(len(tokens) for tokens in result.tokens),
                    **stats.to_json(),
                    "acceptance_per_position": stats.acceptance_per_position,
                }
            )
            shares = " ".join(f"{share:.2f}" for share in stats.acceptance_per_position)
            print(f"{name}, T={temperature:g}, {kind}: τ {stats.mean_acceptance_length:.2f}; {shares}", flush=True)
    if arguments.output:
        record = {"dtype": "mixed", "seed": 0, "about": environment(), "rows": rows}
        write_record(arguments.output, record)


if __name__ == "__main__":
    main()
