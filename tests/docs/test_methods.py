"""A method has a drafter, a conversion table, a recipe, a page and its rows in the tables and in the contract."""

from __future__ import annotations

import sys
from pathlib import Path

import methods
import pytest
from heads_on_disk import CHECKPOINTS
from test_drafter_contract import ALL_DRAFTERS, drafter_of

from eagle3_jax import drafters
from eagle3_jax.conversion.heads import HEADS, LAYOUTS
from eagle3_jax.files.sources import NAMED
from eagle3_jax.training.methods import RECIPES

ROOT = Path(__file__).parent.parent.parent
# The page of each head.
PAGES = {
    "eagle3": "algorithm",
    "eagle1": "methods/eagle",
    "p-eagle": "methods/eagle",
    "mtp": "methods/eagle",
    "medusa": "methods/models",
    "dflash": "methods/dflash",
}


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
