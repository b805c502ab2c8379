"""The tables of drafting methods: every method has a row, and pages say what the record says."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle3_jax.conversion.heads import HEADS
from eagle3_jax.named import NAMED
from eagle3_jax.training.methods import RECIPES

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs" / "recorded"))
import methods  # noqa: E402


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


@pytest.mark.parametrize("page", ["README.md", "docs/methods/index.md"])
def test_the_pages_are_their_record(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == methods.filled(text, methods.parts(methods.record())[page]), "run python docs/recorded/methods.py"


def test_what_was_measured_is_of_methods_that_are_in_the_table() -> None:
    found = methods.record()
    known = {row["measured"] for row in methods.facts() if "measured" in row} | {"none"}
    assert {row["method"] for row in found["rows"]} <= known
    assert all(row["lossless"] for row in found["rows"])
    assert found.get("programs_after_warm_up", 0) == 0, "times with compilation in them"
    # No place of one machine is published with a record.
    assert not re.search(r'"(/|~/)', methods.RECORD.read_text(encoding="utf-8") if methods.RECORD.exists() else "")


def measured(method: str, draft: str, code: float, prose: float) -> dict[str, Any]:
    ratios = {"code": code, "prose": prose}
    tasks = {
        task: {"mean_acceptance_length": 1 + one, "ratio": {"value": one, "low": one - 0.1, "high": one + 0.1}}
        for task, one in ratios.items()
    }
    costs = {"verify_cost": 1.234, "draft_cost": 0.0567}
    return {"method": method, "draft": draft, "parameters": 1_250_000, "tasks": tasks, **costs}


def test_a_row_is_of_its_own_shape() -> None:
    rows = [measured("eagle1", *of) for of in (("K=3", 1.5, 1.0), ("K=5", 1.4, 1.3), ("tree N=8 G=5", 2.0, 2.0))]
    whole = methods.what_was_measured({"rows": rows})
    assert "| EAGLE-1 | K=3 | 1.2 M | 2.50 | 2.00 | 1.23 | 0.057 | 1.50 (1.40–1.60) | 1.00 (0.90–1.10) |" in whole
    assert whole.count("| EAGLE-1 |") == 2 and whole.count("| EAGLE-2 |") == 1


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no place for 'speed'"):
        methods.filled("# A page\n", {"speed": ""})


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
