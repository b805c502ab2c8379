"""A kind of head has a drafter, a recipe, and rows in the contract and in the pages' tables."""

from __future__ import annotations

import methods
import pytest
from drafter_table import ALL_DRAFTERS, drafter_of
from heads_on_disk import CHECKPOINTS

from eagle3_jax import drafters
from eagle3_jax.conversion.heads import HEADS, LAYOUTS
from eagle3_jax.files.sources import NAMED
from eagle3_jax.training.methods import RECIPES

# Published, and not trained here.
UNTRAINED = ("gemma4-assistant",)


@pytest.mark.parametrize("name", HEADS)
def test_every_kind_of_head_is_complete(name: str) -> None:
    kind = HEADS[name]
    assert kind.layouts
    assert set(kind.layouts) <= set(LAYOUTS)
    _, drafter = kind.classes
    assert {part.__name__ for part in kind.classes} <= set(drafters.__all__)
    assert any(type(drafter_of(row).drafter) is drafter for row in ALL_DRAFTERS), (
        f"{name} has no row in the contract"
    )
    assert name in RECIPES or name in UNTRAINED, f"{name} cannot be trained"
    assert any(path.startswith(kind.label) for path in CHECKPOINTS), f"no tiny checkpoint of {name}"


def test_every_method_has_a_row_in_the_tables() -> None:
    rows = methods.facts()
    for key, names in (("heads", HEADS), ("named", NAMED), ("recipe", RECIPES)):
        assert {row[key] for row in rows if key in row} == set(names), key
