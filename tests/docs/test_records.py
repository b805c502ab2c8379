"""Every number and table on the pages is that of a committed record."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import methods
import pytest
import speeds
import validated
import write_tables

from validation.runs import load

ROOT = Path(__file__).resolve().parent.parent.parent


def page(name: str) -> str:
    """A page as one line, so that a quotation may be broken anywhere."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


@pytest.mark.parametrize("page", write_tables.tables())
def test_the_tables_of_a_page_are_their_records(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == write_tables.filled(text, write_tables.tables()[page]), "run python docs/recorded/write_tables.py"


VALIDATION = load(validated.RECORD)


def test_the_record_of_the_validation_has_every_check_of_today() -> None:
    assert not validated.missing(VALIDATION)
    assert not VALIDATION.environment["git"]["dirty"]


def test_every_level_of_the_record_of_the_validation_passed() -> None:
    assert [line for line in VALIDATION.incomplete() if not line.startswith("L7 not run")] == []


def acceptance(draft: str, kind: str = "code") -> dict[str, Any]:
    (row,) = (
        one for one in speeds.record("acceptance-shipped-pair")["rows"] if (one["draft"], one["kind"]) == (draft, kind)
    )
    return row


def test_what_drawing_gains_is_its_record() -> None:
    likeliest, drawn = (acceptance(f"chain K=4, {how}")["mean_acceptance_length"] for how in ("likeliest", "drawn"))
    assert f"from {likeliest:.2f} to {drawn:.2f}" in page("docs/command_line.md")
    assert f"from {likeliest:.2f} to {drawn:.2f}" in page("docs/choosing.md")


def test_choosing_quotes_its_records() -> None:
    choosing = page("docs/choosing.md")
    lengths = speeds.LENGTHS.rows
    for k in (2, 3, 4, 5):
        row = lengths[f"chain K={k}"]
        costs = f"{row['verify_cost']:.2f}, {row['draft_cost']:.3f}"
        assert f"{k}: ({row['acceptance']['mean_acceptance_length']:.2f}, {costs})" in choosing
    tree = lengths["tree N=8 G=4"]
    tau = tree["acceptance"]["mean_acceptance_length"]
    assert f"a tree of 8 nodes has τ {tau:.2f} and costs {tree['verify_cost']:.2f} plain steps: " in choosing
    assert f"plain steps: {tree['ratio']['median']:.2f} times plain decoding, less than a chain of three" in choosing
    large = speeds.SMALL.rows["tree N=60 G=8"]
    assert f"costs the small pair {large['verify_cost']:.2f} plain steps: [{large['ratio']['median']:.2f}]" in choosing
    chat = speeds.CHAT.rows
    head, ngram, both = (chat[name] for name in ("smollm2 chain K=3", "n-gram K=4", "ngram+smollm2 chain K=3"))
    assert (
        f"K=3 reaches {head['ratio']['median']:.2f} times plain decoding, n-grams {ngram['ratio']['median']:.2f}"
        in choosing
    )
    assert f"(`--drafter ngram+HEAD`) {both['ratio']['median']:.2f} |" in choosing
    of_task = {part["task"]: part["ratio"]["value"] for part in ngram["tasks"]}
    assert f"`ngram` reaches {of_task['humaneval']:.2f} times" in choosing
    assert f"on those of MT-bench {of_task['mt_bench']:.2f}" in choosing
    shares = [f"{share:.2f}"[1:] for share in acceptance("chain K=5")["acceptance_per_position"]]
    assert f"{shares[0]} accept the first token, {shares[2]} the third and {shares[4]} the fifth" in choosing


def test_the_algorithm_quotes_the_run_of_its_pictures() -> None:
    run = json.loads((ROOT / "docs" / "pictures" / "real_run.json").read_text(encoding="utf-8"))
    text = page("docs/algorithm.md")
    assert run["same_as_plain"]
    assert f"{run['rounds']} rounds wrote {run['new_tokens']} tokens, the first of them in the prefill." in text
    assert f"τ is {run['mean_acceptance_length']:.2f} tokens per round" in text
    assert f"accepted {run['accepted']} of {run['drafted']} drafted tokens" in text
    assert f"The filled parts are accepted: {run['accepted_with_probability']:.2f} of the mass" in text
    assert f"Of its {run['tree_nodes']} nodes, the root included, {run['tree_accepted']} were accepted" in text
    assert (run["tree_added"] == "bonus") == ("the target added a bonus token" in text)


def test_the_example_measures_what_the_tables_show(tmp_path: Path) -> None:
    options = (
        "--named ngram --chains 2 --tree num_nodes=3,max_depth=2,top_k=2 --prompts 1 --repeats 1 --max-new-tokens 4"
    )
    main = runpy.run_path(str(ROOT / "examples" / "methods.py"))["main"]
    main([*options.split(), "--output", str(tmp_path / "methods.json")])
    record = json.loads((tmp_path / "methods.json").read_text())
    assert [(row["method"], row["draft"]) for row in record["rows"]] == [
        ("ngram", "K=2"), ("eagle3", "K=2"), ("eagle3", "tree N=3 G=2"),
    ]  # fmt: skip
    assert [(row["method"], "cannot draft a tree" in row["reason"]) for row in record["missing"]] == [("ngram", True)]
    assert all(row["lossless"] and row["same_texts"] for row in record["rows"])
    assert "| method | parameters | K=2 | tree N=3 G=2 |" in methods.what_was_measured(record)
