"""Every figure that the pages quote stands in a committed record, rounded as they round it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import eagle3_jax
from validation.runs import load

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "docs" / "recorded"))
import validated  # noqa: E402

RESULTS = ROOT / "validation" / "results"


def record(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def page(name: str) -> str:
    """A page as one line, so that a quotation may be broken anywhere."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


BENCH = record("bench-cpu-intel-xeon-2-cores")["reports"][0]
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
    "vLLM plain, compiled": "vLLM 0.32.0 plain, compiled, `float32`",
    "vLLM eagle3 K=3, compiled": "vLLM 0.32.0 with the same head, K=3, compiled, `float32`",
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


VALIDATION = load(validated.RECORD)


def test_the_page_of_the_validation_is_its_record() -> None:
    text = validated.PAGE.read_text(encoding="utf-8")
    assert text == validated.filled(text, VALIDATION), "run python docs/recorded/validated.py"


def test_the_record_of_the_validation_has_every_check_of_today() -> None:
    assert not validated.missing(VALIDATION)
    assert not VALIDATION.environment["git"]["dirty"]
    assert VALIDATION.environment["versions"]["eagle3_jax"] == eagle3_jax.__version__


def test_every_level_of_the_record_of_the_validation_passed() -> None:
    assert [line for line in VALIDATION.incomplete() if not line.startswith("L7 not run")] == []


def test_the_record_of_the_validation_is_of_recent_code() -> None:
    commit = VALIDATION.environment["git"]["commit"]
    git = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", "eagle3_jax", "conversion"]
    found = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        reason = found.stderr.strip()
        pytest.skip(f"this checkout lacks the commit {commit[:10]}, so the record's age is unknown: {reason}")
    assert int(found.stdout) <= validated.MOST_COMMITS, "run the validation again: make validation, --complete"


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
