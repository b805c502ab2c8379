"""Every figure that README and docs quote stands in a committed record, rounded as they round it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "validation" / "results"


def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def page(name: str) -> str:
    """A page as one line, so that a quotation may be broken anywhere."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


BENCH = record("bench-cpu-amd-epyc-2-cores")["reports"][0]
NAMES = {
    "plain mixed": "plain, `mixed`",
    "plain float32": "plain, `float32`",
    "chain K=1": "EAGLE-3 chain K=1",
    "chain K=2": "EAGLE-3 chain K=2",
    "chain K=3": "EAGLE-3 chain K=3",
    "chain K=5": "EAGLE-3 chain K=5",
    "tree N=8 G=5": "EAGLE-3 tree, 8 nodes, 5 levels",
    "tree N=60 G=8": "EAGLE-3 tree, 60 nodes, 8 levels",
    "n-gram K=5": "n-gram K=5",
    "transformers generate": "transformers `generate`, `float32`",
    "transformers prompt lookup": "transformers prompt lookup, `float32`",
    "vLLM plain": "vLLM 0.32.0 plain, `float32`",
    "vLLM eagle3 K=3": "vLLM 0.32.0 with the same head, K=3, `float32`",
}


def test_the_table_of_speed_has_a_line_for_every_row_of_its_record() -> None:
    assert [row["name"] for row in BENCH["rows"]] == list(NAMES)


@pytest.mark.parametrize("row", BENCH["rows"], ids=lambda row: row["name"])
def test_the_table_of_speed_is_its_record(row: dict[str, Any]) -> None:
    ratio, drafts = row["ratio"], row["name"].startswith(("chain", "tree", "n-gram"))
    spread = "baseline" if row["name"] == BENCH["baseline"] else "{median:.2f} ({low:.2f}–{high:.2f})".format(**ratio)
    acceptance = row["acceptance"] or {}
    cells = [
        NAMES[row["name"]],
        f"{row['decode_tokens_per_second']['median']:.0f}",
        spread,
        f"{row['predicted_ratio']:.2f}" if drafts else "",
        f"{acceptance['mean_acceptance_length']:.2f}" if acceptance.get("mean_acceptance_length", 1) > 1 else "",
        f"{row['verify_cost']:.2f}" if drafts else "",
        f"{row['draft_cost']:.3f}" if drafts else "",
        "" if spread == "baseline" else f"{row['same_texts']}",
    ]
    line = "| " + " | ".join(cells) + " |"
    assert " ".join(line.split()) in page("README.md")


@pytest.mark.parametrize(
    "row", record("acceptance-shipped-pair")["rows"], ids=lambda row: f"{row['draft']}, {row['kind']}"
)
def test_acceptance_of_the_shipped_pair_is_its_record(row: dict[str, Any]) -> None:
    shares = [f"{share:.2f}".removeprefix("0") for share in row["acceptance_per_position"]]
    cells = [row["draft"], row["kind"], f"{row['mean_acceptance_length']:.2f}", *shares, *[""] * (8 - len(shares))]
    assert " ".join(f"| {' | '.join(cells)} |".split()) in page("docs/shipped_pair.md")


CHECKS = record("cpu-amd-epyc-2-cores")["checks"]


def numbers(level: str, words: str) -> list[dict[str, Any]]:
    """The numbers of the checks of a level whose name holds these words."""
    found = [check["numbers"] for check in CHECKS if check["level"] == level and words in check["name"]]
    assert found, f"{level} has no check of {words!r}"
    return found


def total(level: str, words: str, name: str) -> int:
    return sum(one[name] for one in numbers(level, words))


def quotations() -> dict[str, str]:
    """What README says, from the record of the validation."""
    sampled = [one for one in numbers("L6", "follow the targets distribution") if one["τ at T=1"] > 1]
    (eight,) = numbers("L9", "pair-batch-8")
    float32 = ("agrees with vllm token for token", "odd shape")
    (scored,) = numbers("L5", "in bfloat16 but for ties")
    apart = max(one["draft_logits_apart"] for one in numbers("L8", "every variation"))
    return {
        "positions scored both ways": (
            f"{sum(total('L5', words, 'distinct_positions') for words in float32):,} distinct positions in float32 "
            f"({sum(total('L5', words, 'tokens_scored') for words in float32):,} scorings)"
        ),
        "disagreements in bfloat16": (
            f"{scored['distinct_positions']:,} ({scored['tokens_scored']:,}): {scored['ties']} ties"
        ),
        "rounds as in vLLM": f"each of {total('L8', 'every round', 'rounds'):,} rounds",
        "rounds of twelve heads": f"twelve kinds of head ({total('L8', 'every variation', 'rounds'):,} rounds)",
        "logits inside vLLM": f"agree to {apart * 1e5:.1f}·10⁻⁵",
        "sampled tokens": f"{sum(one['tokens'] for one in sampled):,} tokens of chains, drawn chains and trees",
        "largest z": f"largest |z| {max(one['largest_z'] for one in sampled):.1f}",
        "planted bugs": f"**Planted bugs.** {numbers('MU', 'no bug survives')[0]['planted']},",
        "batch 8": (
            f"{eight['tokens/s plain mixed, batch 8']:,.0f} tokens/s, the chain of three "
            f"{eight['tokens/s chain K=3, batch 8']:,.0f}"
        ),
    }


@pytest.mark.parametrize("claim", quotations())
def test_the_readme_quotes_its_record_on(claim: str) -> None:
    assert quotations()[claim] in page("README.md")
