"""Every figure that the pages quote stands in a committed record, rounded as they round it."""

from __future__ import annotations

import json
import re
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
    assert " ".join(line.split()) in page("docs/numbers.md")


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
    """What the pages say, from the record of the validation."""
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
def test_the_pages_quote_their_record_on(claim: str) -> None:
    assert quotations()[claim] in page("docs/numbers.md" if claim == "batch 8" else "docs/validation.md")


LEVELS = record("cpu-amd-epyc-2-cores")["levels"]


@pytest.mark.parametrize("level", LEVELS)
def test_the_table_of_levels_has_the_verdict_of_the_record(level: str) -> None:
    verdict = LEVELS[level]["verdict"] + (f" ({LEVELS[level]['reason']})" if LEVELS[level]["reason"] else "")
    checks = sum(check["level"] == level for check in CHECKS)
    assert f"| {level} | {verdict} | {checks} |" in page("docs/validation.md")


def test_what_the_levels_would_have_seen_is_what_they_say() -> None:
    said = page("docs/validation.md")
    seen = {level: " ".join(c["sees"] for c in CHECKS if c["level"] == level) for level in ("L2", "L6")}
    assert "0.49 % rms" in said and "0.49 % rms of the probabilities of 384 free cells" in seen["L2"]
    assert "2.2 % on a Flax decoder" in said and "2.23 % rms" in seen["L2"]
    strata = [int(share) for share in re.findall(r"by (\d+) % in the smallest stratum", seen["L6"])]
    assert f"5.4 % rms of the probabilities along a score, {min(strata)} to {max(strata)} % in the smallest" in said
    assert "5.4 % rms over all tokens" in seen["L6"]
    apart = max(one["logits_apart"] for one in numbers("HF", "logits and features"))
    assert f"seen: {apart * 1e5:.1f}·10⁻⁵ at most" in said


def acceptance(draft: str, kind: str = "code") -> dict[str, Any]:
    (row,) = (one for one in record("acceptance-shipped-pair")["rows"] if (one["draft"], one["kind"]) == (draft, kind))
    return row


def test_what_drawing_gains_is_its_record() -> None:
    likeliest, drawn = (acceptance(f"chain K=4, {how}")["mean_acceptance_length"] for how in ("likeliest", "drawn"))
    assert f"from {likeliest:.2f} to {drawn:.2f}" in page("docs/command_line.md")
    assert f"from {likeliest:.2f} to {drawn:.2f}" in page("docs/choosing.md")


def test_choosing_quotes_its_records() -> None:
    rows = {row["name"]: row for row in BENCH["rows"]}
    said = page("docs/choosing.md")
    for k in (1, 2, 3, 5):
        row = rows[f"chain K={k}"]
        costs = f"{row['verify_cost']:.2f}, {row['draft_cost']:.3f}"
        assert f"{k}: ({row['acceptance']['mean_acceptance_length']:.2f}, {costs})" in said
    measured = [f"{rows[f'chain K={k}']['ratio']['median']:.2f}" for k in (1, 2, 3, 5)]
    assert f"*measured* {', '.join(measured[:3])} and {measured[3]}" in said
    large, small, ngram = (rows[name] for name in ("tree N=60 G=8", "tree N=8 G=5", "n-gram K=5"))
    tau = lambda row: f"{row['acceptance']['mean_acceptance_length']:.2f}"
    assert f"60 nodes reach {tau(large)} and cost {large['verify_cost']:.2f} plain steps: " in said
    assert f"{large['ratio']['median']:.2f} of plain decoding. Eight nodes: τ {tau(small)}" in said
    assert f"{small['ratio']['median']:.2f} of plain, less than a chain of three" in said
    assert f"prompt lookup's {tau(ngram)}" in said and f"{ngram['ratio']['median']:.2f} of plain decoding at" in said
    shares = [f"{share:.2f}"[1:] for share in acceptance("chain K=5")["acceptance_per_position"]]
    assert f"{shares[0]} keep the first token, {shares[2]} the third, {shares[4]} the fifth" in said
    ratios = re.findall(r"\| `mixed` \| (?:1|2|4|8) \| \S+ \| \S+ \| \S+ \| (\S+) \|", page("docs/speed.md"))
    assert f"| ratio | {' | '.join(ratio.strip('*') for ratio in ratios)} |" in said


def test_the_idea_quotes_the_run_that_drew_its_pictures() -> None:
    run = json.loads((ROOT / "docs" / "pictures" / "real_run.json").read_text(encoding="utf-8"))
    said = page("docs/idea.md")
    assert run["same_as_plain"]
    tau = run["mean_acceptance_length"]
    assert (
        f"{run['rounds']} rounds wrote {run['new_tokens']} tokens, the first of them in the prefill: {tau:.2f} a"
        in said
    )
    assert f"Of {run['drafted']} guesses {run['accepted']} were accepted" in said
    assert f"what is accepted: {run['accepted_with_probability']:.2f} of the mass here" in said
    assert f"Of its {run['tree_nodes']} nodes (the root is known) {run['tree_accepted']} were accepted" in said
    assert (run["tree_added"] == "bonus") == ("added one more for free" in said)
