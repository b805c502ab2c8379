"""Every number and table on the pages is that of a committed record."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import methods
import pytest
import speeds
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


def page(name: str) -> str:
    """A page as one line, so that a quotation may be broken anywhere."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_every_row_of_the_canonical_benchmark_has_a_name() -> None:
    assert list(speeds.ROWS) == list(speeds.NAMES)
    assert set(speeds.SHIPPED) <= set(speeds.NAMES)
    assert speeds.BENCH["about"]["versions"]["eagle3_jax"] == "0.2.0" and not speeds.BENCH["about"]["git"]["dirty"]


@pytest.mark.parametrize("row", speeds.ROWS.values(), ids=lambda row: row["name"])
def test_the_prediction_of_the_canonical_benchmark_is_the_formula(row: dict[str, Any]) -> None:
    if row["acceptance"] and row["verify_cost"]:
        tau = row["acceptance"]["mean_acceptance_length"]
        cost = row["verify_cost"] + row["num_draft_steps"] * row["draft_cost"]
        assert tau / cost == pytest.approx(row["predicted_ratio"], rel=0.01)


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
    rows, said = speeds.ROWS, page("docs/choosing.md")
    for k in (1, 2, 3, 5):
        row = rows[f"chain K={k}"]
        costs = f"{row['verify_cost']:.2f}, {row['draft_cost']:.3f}"
        assert f"{k}: ({row['acceptance']['mean_acceptance_length']:.2f}, {costs})" in said
    large, small, ngram = (rows[name] for name in ("tree N=60 G=8", "tree N=8 G=5", "n-gram K=5"))
    tau = lambda row: f"{row['acceptance']['mean_acceptance_length']:.2f}"
    assert f"a tree of 60 nodes has τ {tau(large)} and costs {large['verify_cost']:.2f} plain steps: " in said
    assert (
        f"{large['ratio']['median']:.2f} times plain decoding. A tree of 8 nodes has τ {tau(small)} and reaches" in said
    )
    assert f"reaches {small['ratio']['median']:.2f}, less than a chain of three" in said
    assert f"EAGLE-3 has τ {tau(rows['chain K=5'])} at K=5, n-grams {tau(ngram)}" in said
    assert f"`ngram` reaches {ngram['ratio']['median']:.2f} times plain decoding" in said
    shares = [f"{share:.2f}"[1:] for share in acceptance("chain K=5")["acceptance_per_position"]]
    assert f"{shares[0]} accept the first token, {shares[2]} the third and {shares[4]} the fifth" in said


def test_pictures_of_records_say_what_the_pages_say() -> None:
    drawn = (ROOT / "docs" / "pictures" / "make_records.py").read_text(encoding="utf-8")
    plan = page("docs/deploying.md")
    stages = re.findall(r"\((\d+), (\d+)\)", drawn.partition("STAGES = ")[2].partition("\n")[0])
    assert len(stages) == 4 and all(f"| {share}% | {hours} h |" in plan for share, hours in stages)
    assert ", ".join(f"{share} % for {hours}" for share, hours in stages).replace("34", "34 hours", 1) in plan
    best = max(
        (row for name, row in speeds.ROWS.items() if name.startswith("chain")), key=lambda row: row["ratio"]["median"]
    )
    assert f"K={best['num_draft_steps']} is the highest bar, {best['ratio']['median']:.2f};" in page("docs/numbers.md")


def test_no_other_page_tells_a_measured_speed_up_of_a_chain() -> None:
    """The canonical benchmark is included by generated tables, and told in no other words."""
    for path in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        prose = re.sub(
            r"<!-- (.*?): written by .*?<!-- end of \1 -->", "", path.read_text(encoding="utf-8"), flags=re.S
        )
        found = re.findall(r"(?:EAGLE-3|chain of three|K ?= ?3)[^.|\n]{0,40}\b([12]\.\d\d)\b (?:times|of plain)", prose)
        assert found == [], path.name


def test_the_algorithm_quotes_the_run_of_its_pictures() -> None:
    run = json.loads((ROOT / "docs" / "pictures" / "real_run.json").read_text(encoding="utf-8"))
    said = page("docs/algorithm.md")
    assert run["same_as_plain"]
    assert f"{run['rounds']} rounds wrote {run['new_tokens']} tokens, the first of them in the prefill." in said
    assert f"τ is {run['mean_acceptance_length']:.2f} tokens per round" in said
    assert f"accepted {run['accepted']} of {run['drafted']} drafted tokens" in said
    assert f"The filled parts are accepted: {run['accepted_with_probability']:.2f} of the mass" in said
    assert f"Of its {run['tree_nodes']} nodes, the root included, {run['tree_accepted']} were accepted" in said
    assert (run["tree_added"] == "bonus") == ("the target added a bonus token" in said)


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
    assert "| method | parameters | K=2 | tree N=3 G=2 |" in methods.what_was_measured(found)


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
