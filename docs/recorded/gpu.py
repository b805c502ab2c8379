"""Tables of one H100, from one record in validation/results: rounds of Llama-3.1-8B's shape, and the chat model."""

from __future__ import annotations

from typing import Any

from methods import table
from speeds import record, tau

RECORD = record("nvidia-h100")
LINK = "[`nvidia-h100.json`](../validation/results/nvidia-h100.json)"
DRAFTS = {
    "plain": "plain step",
    "verify 6": "verification of 6 tokens",
    "draft step": "draft step of the head",
    "chain 3": "chain of 3",
    "chain": "chain of 5",
    "tree of 6": "tree of 6 nodes",
    "tree of 60": "tree of 60 nodes",
}


def parts() -> dict[str, dict[str, str]]:
    """The tables by page and mark."""
    return {
        "docs/gpu.md": {"rounds": rounds(), "chat model": chat_model()},
        "README.md": {"h100": headline()},
    }


def rounds() -> str:
    """Milliseconds of the parts of a round, in plain steps, and the speed at simulated acceptance."""
    lines = []
    for name, label in DRAFTS.items():
        figure = RECORD["rounds"]["figures"][name]
        drafts = name.startswith(("chain", "tree"))
        seconds = figure["seconds_per_round"]["median"]
        cost = figure["round_in_bases"]["median"]
        speed = f"{figure['speed_in_bases']['median']:.2f}" if drafts else ""
        lines.append([label, f"{1e3 * seconds:.2f}", f"{cost:.3f}", speed])
    share = plain_share_of_copy()
    return (
        f"{table(['what', 'ms', 'plain steps', 'speed-up, acceptance simulated'], lines)}\n\n"
        "Random weights, bfloat16, batch 1, at most 130 tokens in a cache of 1,024, attention by XLA. A plain step\n"
        f"reads {share:.0%} of what a copy moves in the same time. {origin()}"
    )


def plain_share_of_copy() -> float:
    """Bytes per second of a plain step, in those of a copy."""
    copy = next(fact["tb_per_second"] for fact in RECORD["facts"] if fact["name"] == "bandwidth, copy")
    figures = RECORD["rounds"]["figures"]
    return figures["step_bytes"] / figures["plain"]["seconds_per_round"]["median"] / (1e12 * copy)


def rows() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Every row of the benchmark of the chat model, with the report that it is of."""
    reports = [report for bench in RECORD["bench"] for report in bench["reports"]]
    return [(report, row) for report in reports for row in report["rows"]]


def chat_model() -> str:
    """Speed of SmolLM2 with its head."""
    lines = []
    for report, row in rows():
        speed = f"{row['decode_tokens_per_second']['median']:,.0f}"
        texts = f"{row['same_texts']} of {report['num_prompts']}" if row["name"] != report["baseline"] else ""
        lines.append([f"{report['batch_size']}", row["name"], tau(row), speed, spread(row), texts])
    columns = ["batch", "draft", "τ", "tokens/s", "speed-up", "same texts"]
    return (
        f"{table(columns, lines)}\n\nbfloat16, 12 prompts of MT-bench, HumanEval and GSM8K (at batch 8: 8), 96 greedy "
        f"tokens each. Median and quartiles of 3 repeats (at batch 8: 2). {origin()}"
    )


def spread(row: dict[str, Any]) -> str:
    """Median and quartiles of the speed-up; empty for plain decoding."""
    return "" if row["name"].startswith("plain") else "{median:.2f} ({low:.2f}–{high:.2f})".format(**row["ratio"])


def headline() -> str:
    """The sentence of README."""
    chain = next(row for report, row in rows() if report["batch_size"] == 1 and row["name"] == "chain K=5")
    figures = RECORD["rounds"]["figures"]
    speed = chain["decode_tokens_per_second"]["median"]
    round_cost = figures["chain"]["round_in_bases"]["median"]
    verify_cost = figures["verify 6"]["round_in_bases"]["median"]
    return (
        f"On one {RECORD['device']} in bfloat16, batch 1, the same pair with K=5 writes {speed:,.0f} tokens/s,\n"
        f"{chain['ratio']['median']:.2f} times plain decoding. At the shape of Llama-3.1-8B a round of K=5 takes "
        f"{round_cost:.2f} plain steps,\nand a verification of 6 tokens {verify_cost:.2f} (random weights). "
        "[All figures of the H100](docs/gpu.md#measured-on-one-h100)."
    )


def origin() -> str:
    """Version, commit and device."""
    commit = RECORD["commit"][:10]
    return f"Version {RECORD['version']}, commit `{commit}`, {RECORD['device']}, jax {RECORD['jax']}, {LINK}."
