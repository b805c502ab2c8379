"""A method is its drafter's file, its conversion table, its recipe, its page and its rows: nothing else knows it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from heads_on_disk import CHECKPOINTS
from test_architecture import imports
from test_drafter_contract import ALL_DRAFTERS, drafter_of

from eagle3_jax import drafters
from eagle3_jax.conversion.heads import HEADS, LAYOUTS
from eagle3_jax.training.methods import RECIPES

ROOT = Path(__file__).parent.parent.parent
DRAFTERS = ROOT / "eagle3_jax" / "drafters"
SHARED = {"base", "grow", "parallel", "static_tree", "text"}
METHODS = sorted({path.stem for path in DRAFTERS.glob("[!_]*.py")} - SHARED)
# The page of each head.
PAGES = {
    "eagle3": "algorithm",
    "eagle1": "methods/eagle",
    "p-eagle": "methods/eagle",
    "mtp": "methods/eagle",
    "medusa": "methods/models",
    "dflash": "methods/dflash",
}
# What builds a pair from nothing, a model of the target's kind, or plain decoding knows its drafter.
MAY_IMPORT = {
    "eagle3_jax.load": {"draft_model"},
    "eagle3_jax.bench.random_models": {"eagle3"},
    "eagle3_jax.theory.sizes": {"eagle3"},
    "eagle3_jax.named": {"draft_model", "ngram", "suffix"},
    "eagle3_jax.conversion.acceptance": {"draft_model"},
    "eagle3_jax.conversion.doctor": {"draft_model"},
}
OWN_PLACES = ("eagle3_jax.drafters", "eagle3_jax.training", "eagle3_jax.conversion.heads")


@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_is_whole(name: str) -> None:
    kind = HEADS[name]
    assert kind.layouts and set(kind.layouts) <= set(LAYOUTS)
    config, drafter = kind.classes
    for part in (config, drafter):
        assert getattr(drafters, part.__name__) is part, f"{part.__name__} is not exported"
        assert part.__name__ in drafters.__all__
    assert any(type(drafter_of(row).drafter) is drafter for row in ALL_DRAFTERS), f"{name} has no row in the contract"
    assert name in RECIPES, f"{name} cannot be trained"
    assert (ROOT / "docs" / f"{PAGES[name]}.md").is_file()
    assert any(path.startswith(kind.label) for path in CHECKPOINTS), f"no tiny checkpoint of {name}"
    doc = sys.modules[drafter.__module__].__doc__ or ""
    assert "arXiv" in doc, "the module names its paper"


def test_the_command_line_names_every_layout() -> None:
    told = (ROOT / "eagle3_jax" / "cli" / "convert.py").read_text()
    assert [layout for layout in LAYOUTS if layout not in told] == []


@pytest.mark.parametrize("stem", METHODS)
def test_a_drafter_is_read_in_one_sitting(stem: str) -> None:
    assert len((DRAFTERS / f"{stem}.py").read_text().splitlines()) < 400


@pytest.mark.parametrize("package", ["eagle3_jax", "conversion"])
def test_only_its_own_files_know_a_method(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts if package == "eagle3_jax" else ("eagle3_jax", *parts))
        if module.startswith(OWN_PLACES):
            continue
        known = {
            imported.removeprefix("eagle3_jax.drafters.").split(".")[0]
            for imported, _ in imports(ast.parse(path.read_text()))
            if imported.startswith("eagle3_jax.drafters.")
        }
        assert known & set(METHODS) - {"plain", "silent", "fallback"} <= MAY_IMPORT.get(module, set()), module
