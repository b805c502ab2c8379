"""Slots of caches and the drawing of a head: what is drawn is what was given."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform, usual_head
from eagle3_jax.pictures.anatomy import eagle3_head
from eagle3_jax.pictures.slots import COMMITTED, EMPTY, NEW, REFUSED, moved, slot_map


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


def test_every_refused_slot_carries_a_cross_and_no_other() -> None:
    status = np.array([[COMMITTED, NEW, REFUSED, EMPTY], [COMMITTED, COMMITTED, REFUSED, REFUSED]])
    axes = Figure().add_subplot()
    slot_map(status, ax=axes, first=7, rows=["one", "two"], title="slots")
    crosses = sorted((text.get_position()[1], text.get_position()[0]) for text in axes.texts)
    assert crosses == [(0, 9), (1, 9), (1, 10)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    assert axes.get_title(loc="left") == "slots" or axes.get_title() == "slots"


def test_the_first_row_is_on_top_of_shared_axes_too() -> None:
    for axes in Figure().subplots(1, 2, sharey=True):
        slot_map(np.array([[COMMITTED], [NEW]]), ax=axes, legend=False)
        assert axes.yaxis_inverted()


def test_a_moved_path_lies_side_by_side_and_garbage_behind_it() -> None:
    (axes,) = moved([0, 2, 5], 6, first=10, title="a path").axes
    below = {text.get_position()[0]: text.get_text() for text in axes.texts if text.get_position()[1] == 0}
    assert [below[10 + slot] for slot in range(6)] == ["0", "2", "5", "×", "×", "×"]


@pytest.mark.parametrize("num_layers", [12, 80])
def test_a_head_is_drawn_with_its_own_sizes_and_taps(num_layers: int) -> None:
    layer = GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=8), GatedMLP(width=48)
    target = DecoderConfig(vocab_size=96, width=24, layers=uniform(num_layers, *layer))
    config = usual_head(target, draft_vocab_size=32)
    (axes,) = eagle3_head(config, num_layers).axes
    words = " ".join(texts(axes))
    assert "3·24 → 24" in words and "48 → 24" in words and "24 → 32" in words
    assert {str(tap) for tap in config.aux_layers} <= set(texts(axes))
