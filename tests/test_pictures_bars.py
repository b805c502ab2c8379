"""What is drawn of two laws: heights, what is filled, what is hatched, what stands below."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("matplotlib").use("agg")
bars = pytest.importorskip("eagle3_jax.pictures.bars")

P = np.array([0.1, 0.4, 0.0, 0.3, 0.2])
Q = np.array([0.5, 0.1, 0.0, 0.3, 0.1])
LABELS = ["a", " b", "c", "\n", "$d$"]


def heights(container) -> list[float]:
    return [bar.get_height() for bar in container]


@pytest.fixture(autouse=True)
def _close():
    yield
    from matplotlib import pyplot as plt

    plt.close("all")


def test_every_token_has_its_bars_in_the_order_of_p() -> None:
    (axes,) = bars.laws(P, Q, labels=LABELS, residual=True, title="two laws").axes
    common, rest, p, q = axes.containers
    order = [1, 3, 4, 0, 2]
    np.testing.assert_allclose(heights(p), P[order])
    np.testing.assert_allclose(heights(q), Q[order])
    np.testing.assert_allclose(heights(common), np.minimum(P, Q)[order])
    np.testing.assert_allclose(heights(rest), np.maximum(P - Q, 0)[order])
    # The residual stands on what is common, so that both together are p.
    np.testing.assert_allclose([bar.get_y() for bar in rest], heights(common))
    assert all(bar.get_hatch() for bar in rest)
    assert not any(bar.get_fill() for bar in p) and all(bar.get_fill() for bar in common)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["␣b", r"\n", r"\$d\$", "a", "c"]
    assert axes.get_title() == "two laws"


def test_the_legend_has_the_sums() -> None:
    (axes,) = bars.laws(P, Q, residual=True).axes
    words = " ".join(text.get_text() for text in axes.get_legend().get_texts())
    assert f"{np.minimum(P, Q).sum():.3f}" in words and f"{np.maximum(P - Q, 0).sum():.3f}" in words


def test_without_a_drafter_or_a_residual_nothing_of_them_is_drawn() -> None:
    (alone,) = bars.laws(P).axes
    assert len(alone.containers) == 1 and heights(alone.containers[0]) == sorted(P, reverse=True)
    (pair,) = bars.laws(P, Q).axes
    assert len(pair.containers) == 3 and not any(bar.get_hatch() for one in pair.containers for bar in one)


def test_what_has_no_bar_of_its_own_is_the_last_group() -> None:
    shown = bars.columns(P, Q, labels=LABELS, top=2)
    assert shown.labels == ["␣b", "a", "3 others"]
    laws = (P, Q, np.minimum(P, Q), np.maximum(P - Q, 0))
    for drawn, law in zip((shown.p, shown.q, shown.common, shown.rest), laws, strict=True):
        assert drawn.sum() == pytest.approx(law.sum())
    # Token by token: the minimum of the sums would be more.
    assert shown.common[-1] == pytest.approx(np.minimum(P, Q)[[2, 3, 4]].sum())


def test_axes_of_somebodys_own_are_drawn_on() -> None:
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2)
    assert bars.laws(P, Q, ax=right) is figure
    assert not left.containers and right.containers


def test_darts_are_accepted_below_p() -> None:
    tokens = np.array([0, 0, 1, 3, 2])
    heights = np.array([0.05, 0.45, 0.09, 0.3, 0.0])  # the last two lie on p and are refused: the rule is strict
    (axes,) = bars.darts(P, Q, tokens, heights, top=4).axes
    accepted, refused = axes.collections
    assert (accepted.get_label(), refused.get_label()) == ("accepted", "rejected")
    order = [1, 3, 4, 0]  # token 2 is not shown
    drawn = lambda points: [(order[round(x)], y) for x, y in points.get_offsets()]
    assert drawn(accepted) == [(0, 0.05), (1, 0.09)]
    assert drawn(refused) == [(0, 0.45), (3, 0.3)]


def test_long_labels_are_cut() -> None:
    assert bars.visible("def a_long_function(") == "def␣a_long_fu…"


def test_a_label_too_few_is_refused() -> None:
    with pytest.raises(ValueError, match="4 labels; expected one entry per token"):
        bars.laws(P, Q, labels=LABELS[:4])
