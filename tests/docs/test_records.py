"""Every number and table on the pages is that of a committed record."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import methods
import pytest
import support
import support_record
import validated
import write_tables

from eagle3_jax.conversion.families import FAMILIES, WRAPPERS
from eagle3_jax.conversion.heads import HEADS
from eagle3_jax.named import NAMED
from eagle3_jax.training.methods import RECIPES
from validation.runs import load

ROOT = Path(__file__).resolve().parent.parent.parent

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


def test_every_method_has_a_row() -> None:
    said = methods.facts()
    for key, known in (("heads", HEADS), ("named", NAMED), ("recipe", RECIPES)):
        assert {row[key] for row in said if key in row} == set(known), key
    for row in said:
        page = (ROOT / "docs/methods" / row.get("page", "index.md").partition("#")[0]).resolve()
        assert page.is_file(), row["label"]
        for name, address in row.get("papers", ()):
            assert name.endswith("2023") or address == f"https://arxiv.org/abs/{name}"
            assert name in page.read_text(encoding="utf-8"), f"{page.name} does not name {name}"


def test_every_page_of_a_method_is_in_the_table_or_named_beside_it() -> None:
    text = (ROOT / "docs/methods/index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs/methods").glob("*.md"):
        if page.name != "index.md":
            assert f"({page.name}" in text and f"\n{page.stem}\n" in text, page.name


def test_what_was_measured_is_of_methods_that_are_in_the_table() -> None:
    found = methods.record()
    known = {row["measured"] for row in methods.facts() if "measured" in row} | {"none"}
    assert {row["method"] for row in found["rows"]} <= known
    assert all(row["lossless"] for row in found["rows"])
    assert found.get("programs_after_warm_up", 0) == 0, "times with compilation in them"
    # No place of one machine is published with a record.
    assert not re.search(r'"(/|~/)', methods.RECORD.read_text(encoding="utf-8") if methods.RECORD.exists() else "")


def test_the_example_measures_what_the_tables_show(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("measured_methods", ROOT / "examples" / "methods.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    options = (
        "--named ngram --chains 2 --tree num_nodes=3,max_depth=2,top_k=2 --prompts 1 --repeats 1 --max-new-tokens 4"
    )
    example.main([*options.split(), "--output", str(tmp_path / "methods.json")])
    found = json.loads((tmp_path / "methods.json").read_text())
    assert [(row["method"], row["draft"]) for row in found["rows"]] == [
        ("ngram", "K=2"), ("eagle3", "K=2"), ("eagle3", "tree N=3 G=2"),
    ]  # fmt: skip
    assert [(one["method"], "cannot draft a tree" in one["reason"]) for one in found["missing"]] == [("ngram", True)]
    assert all(row["lossless"] and row["same_texts"] for row in found["rows"])
    assert "| EAGLE-3, 3.1 | tree N=3 G=2 | " in methods.what_was_measured(found)


def test_what_is_recorded_is_of_the_matrix_and_of_tests_that_are_there() -> None:
    assert support.PRECISIONS == support_record.PRECISIONS
    assert support.DRAFTS == support_record.DRAFTS
    assert tuple(support.WHAT) == support_record.WHAT
    for name, case in support.cases().items():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), name
        for family, precision, draft, what in case["cells"]:
            assert family in {*FAMILIES, *WRAPPERS} and precision in support.PRECISIONS, name
            assert draft in support.DRAFTS and what in support.WHAT, name
    assert all(case["passed"] for case in support.cases().values())


def test_a_family_whose_texts_are_recorded_was_drafted_for_by_chains_and_trees() -> None:
    found = support.cells(support.cases())
    for family in {cell.family for cell in found if cell[1:] == ("float32", "plain", "parity")}:
        for draft in support.DRAFTS:
            assert found[support.Cell(family, "float32", draft, "parity")].passed, (family, draft)
