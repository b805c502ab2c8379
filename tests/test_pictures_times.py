"""Pictures of times and acceptance show the numbers that they were given."""

from __future__ import annotations

import io

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from eagle3_jax.pictures.ribbons import acceptance_ribbons, heat_map
from eagle3_jax.pictures.times import stacked_steps, twin

PARTS = {"draft": [0.0, 1.5, 2.5], "verify": [2.0, 3.0, 3.5], "commit": [0.0, 0.25, 0.001], "host": [0.5, 0.5, 0.5]}
NAMES = ["plain step", "chain of 3", "chain of 5"]


def drawn(figure: Figure) -> Figure:
    figure.savefig(io.BytesIO(), format="png")
    return figure


def words(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_bars_are_as_long_as_their_parts_and_stand_end_to_end() -> None:
    axes = drawn(stacked_steps(NAMES, PARTS)).axes[0]
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(bars) == len(NAMES) * len(PARTS)
    for number, (part, times) in enumerate(PARTS.items()):
        for index, time in enumerate(times):
            bar = bars[number * len(NAMES) + index]
            before = sum(PARTS[other][index] for other in list(PARTS)[:number])
            assert bar.get_width() == pytest.approx(time), part
            assert bar.get_x() == pytest.approx(before), part


def test_bars_name_themselves_their_parts_and_their_sum_with_the_unit() -> None:
    figure = drawn(stacked_steps(NAMES, PARTS, unit="µs", title="what a step is made of"))
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == NAMES
    assert axes.yaxis_inverted()  # the first on top
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(PARTS)
    assert {"2.5 µs", "5.25 µs", "6.5 µs"} <= set(words(figure))
    assert "µs" in axes.get_xlabel()
    assert axes.get_title() == "what a step is made of"


def test_parts_too_narrow_for_a_figure_carry_none() -> None:
    assert "0.001" not in words(drawn(stacked_steps(NAMES, PARTS)))


def test_every_part_needs_a_time_for_every_bar() -> None:
    with pytest.raises(ValueError, match="draft has 1 times for 3 bars"):
        stacked_steps(NAMES, {"draft": [1.0]})


def test_twin_axes_start_at_zero_and_hold_what_was_given() -> None:
    figure = drawn(
        twin(
            [1, 2, 8],
            [2.5, 2.5, 2.5],
            [1.0, 1.5, 4.0],
            labels=("rows", "tokens", "ms"),
            right_range=[(0.9, 1.2), (1.4, 1.6), (3.0, 9.0)],
        )
    )
    left, right = figure.axes
    assert list(left.lines[0].get_ydata()) == [2.5, 2.5, 2.5]
    assert list(right.lines[0].get_ydata()) == [1.0, 1.5, 4.0]
    assert left.get_ylim()[0] == right.get_ylim()[0] == 0.0
    assert right.get_ylim()[1] > 9.0  # the range is not cut off
    assert [label.get_text() for label in left.get_xticklabels()] == ["1", "2", "8"]
    assert (left.get_xlabel(), left.get_ylabel(), right.get_ylabel()) == ("rows", "tokens", "ms")
    assert left.lines[0].get_color() != right.lines[0].get_color()


SHARES = {"code": [0.72, 0.5, 0.31], "prose": [0.4, 0.1]}


def test_ribbons_hold_each_series_by_position() -> None:
    axes = drawn(acceptance_ribbons(SHARES)).axes[0]
    for line, (name, shares) in zip(axes.lines, SHARES.items(), strict=True):
        assert line.get_label() == name
        assert list(line.get_xdata()) == list(range(1, len(shares) + 1))
        assert list(line.get_ydata()) == shares
    assert axes.get_ylim() == (0, 1)
    assert list(axes.get_xticks()) == [1, 2, 3]


def test_ribbons_are_intervals_that_narrow_with_the_rounds() -> None:
    def width(rounds: int) -> float:
        figure = acceptance_ribbons({"code": [0.5, 0.5]}, rounds={"code": rounds})
        band = figure.axes[0].collections[0].get_paths()[0].vertices[:, 1]
        assert band.min() < 0.5 < band.max()
        return float(band.max() - band.min())

    assert width(100) == pytest.approx(0.192, abs=0.002)  # 0.4038 to 0.5962, Wilson
    assert width(10_000) < width(100) / 9
    assert (
        "10,000 rounds"
        in acceptance_ribbons({"code": [0.5]}, rounds={"code": 10_000}).axes[0].get_legend().get_texts()[0].get_text()
    )


def test_a_map_has_the_values_and_its_contour_lies_where_they_cross_the_level() -> None:
    x, y = np.linspace(0, 1, 11), np.linspace(0, 2, 21)
    figure = drawn(heat_map(x[None, :] + y[:, None], x, y, labels=("across", "up", "sum"), level=1.05))
    axes = figure.axes[0]
    mesh, contour = axes.collections[0], axes.collections[1]
    np.testing.assert_allclose(np.ravel(mesh.get_array()), np.ravel(x[None, :] + y[:, None]))
    line = np.concatenate([path.vertices for path in contour.get_paths()])
    np.testing.assert_allclose(line.sum(axis=1), 1.05, atol=1e-9)
    assert mesh.norm(1.05) == pytest.approx(0.5)  # the two colours meet there
    assert "1.05" in words(figure)
    assert figure.axes[1].get_ylabel() == "sum"


def test_a_map_above_its_level_everywhere_has_no_contour_and_names_its_marks() -> None:
    figure = drawn(heat_map([[2.0, 3.0]], [0, 1], [0], labels=("x", "y", "z"), marks={"here": (1, 0)}))
    assert len(figure.axes[0].collections) == 1
    assert "here" in words(figure)


def test_a_map_needs_a_value_for_every_pair() -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 2\) for 2 y and 2 x"):
        heat_map([[1.0, 2.0]], [0, 1], [0, 1], labels=("x", "y", "z"))


def test_a_roofline_moves_its_roof_and_keeps_the_intensities() -> None:
    pytest.importorskip("plotly")
    from eagle3_jax.pictures.rooflines import Step, roofline
    from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS

    chips = [KNOWN_ACCELERATORS["h200"], KNOWN_ACCELERATORS["l4"]]
    steps = [Step("plain step", 1.0, "1 row"), Step("checking", 6.0), Step("checking", 900.0)]
    words = [["3 ms", "3 ms", "9 ms"], ["50 ms", "50 ms", "90 ms"]]
    figure = roofline(steps, chips, words).figure
    roof, plain, checking = figure.data
    assert list(roof.x)[1] == pytest.approx(989 / 4.8)  # the ridge
    assert list(checking.y) == pytest.approx([6 * 4.8, 989])  # on the slope, and on the roof
    assert figure.layout.title.text == "H200: the ridge lies at 206 operations per byte"
    changes, texts = figure.layout.updatemenus[0].buttons[1].args
    assert list(changes["x"][2]) == list(checking.x) == [6.0, 900.0]
    assert list(changes["y"][1]) == pytest.approx([0.3])
    assert changes["hovertext"][1] == ["50 ms"] and list(plain.hovertext) == ["3 ms"]
    assert texts["title.text"].startswith("L4: ")
    with pytest.raises(ValueError, match="words for 2 accelerators and 3 steps"):
        roofline(steps, chips, words[:1])


def test_marks_near_each_other_are_named_at_different_heights() -> None:
    figure = drawn(
        heat_map([[0.5, 2.0], [1.0, 3.0]], [0, 1], [0, 1], labels=("x", "y", "z"), marks={"a": (0, 0), "b": (0, 0.01)})
    )
    heights = {text.get_text(): text.get_position()[1] for text in figure.axes[0].texts if text.get_text() in "ab"}
    assert heights["a"] != heights["b"]
