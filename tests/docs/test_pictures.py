"""Pictures show the numbers that they were given. That they can be drawn at all, the notebooks show."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib").use("agg")
pytest.importorskip("plotly")
# ruff: noqa: E402

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pictures import bars
from pictures.interactive import Interactive
from pictures.maps import table_map
from pictures.ribbons import acceptance_ribbons
from pictures.rooflines import Step, roofline
from pictures.slots import COMMITTED, EMPTY, NEW, REFUSED, moved, slot_map
from pictures.strips import tokens_of
from pictures.style import ACCEPTED, BONUS, CORRECTED
from pictures.times import stacked_steps
from pictures.trees import interactive_rounds, mask_map, statuses

import eagle3_jax as e3
from eagle3_jax.theory.accelerators import KNOWN_ACCELERATORS
from eagle3_jax.trace import record


@pytest.fixture(autouse=True)
def _close():
    yield
    from matplotlib import pyplot as plt

    plt.close("all")


P = np.array([0.1, 0.4, 0.0, 0.3, 0.2])
Q = np.array([0.5, 0.1, 0.0, 0.3, 0.1])
LABELS = ["a", " b", "c", "\n", "$d$"]


def heights(container) -> list[float]:
    return [bar.get_height() for bar in container]


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


def test_what_has_no_bar_of_its_own_is_the_last_group() -> None:
    shown = bars.columns(P, Q, labels=LABELS, top=2)
    assert shown.labels == ["␣b", "a", "3 others"]
    laws = (P, Q, np.minimum(P, Q), np.maximum(P - Q, 0))
    for drawn, law in zip((shown.p, shown.q, shown.common, shown.rest), laws, strict=True):
        assert drawn.sum() == pytest.approx(law.sum())
    # Token by token: the minimum of the sums would be more.
    assert shown.common[-1] == pytest.approx(np.minimum(P, Q)[[2, 3, 4]].sum())


def test_every_refused_slot_carries_a_cross_and_no_other() -> None:
    status = np.array([[COMMITTED, NEW, REFUSED, EMPTY], [COMMITTED, COMMITTED, REFUSED, REFUSED]])
    axes = Figure().add_subplot()
    slot_map(status, ax=axes, first=7, rows=["one", "two"], title="slots")
    crosses = sorted((text.get_position()[1], text.get_position()[0]) for text in axes.texts)
    assert crosses == [(0, 9), (1, 9), (1, 10)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]
    assert axes.get_title(loc="left") == "slots" or axes.get_title() == "slots"


def test_a_moved_path_lies_side_by_side_and_garbage_behind_it() -> None:
    (axes,) = moved([0, 2, 5], 6, first=10, title="a path").axes
    below = {text.get_position()[0]: text.get_text() for text in axes.texts if text.get_position()[1] == 0}
    assert [below[10 + slot] for slot in range(6)] == ["0", "2", "5", "×", "×", "×"]


def test_the_kinds_of_a_strip_are_counted_as_the_loop_counts_them() -> None:
    """``num_accepted_tokens`` accepted, and one of the target's own for every round."""
    target = e3.load_target()
    decoder = e3.SpeculativeDecoder(
        target, e3.load_drafter(target=target), stop_tokens=(), tree=e3.DynamicTree(num_nodes=8, max_depth=4, top_k=2)
    )
    prompt = "def read_config(filename, encoding=None):\n"
    trace = record(decoder, [prompt], max_new_tokens=[40], sampling=e3.SamplingParams(), seed=0)
    kinds = [token.kind for token in tokens_of(trace.prompts[0], decoder.target.tokenizer)]
    stats = trace.result.stats
    assert kinds.count(ACCEPTED) == stats.num_accepted_tokens
    assert kinds.count(CORRECTED) + kinds.count(BONUS) == stats.num_drafts
    assert kinds.count("from the prefill") == 1


PARTS = {"draft": [0.0, 1.5, 2.5], "verify": [2.0, 3.0, 3.5], "commit": [0.0, 0.25, 0.001], "host": [0.5, 0.5, 0.5]}
NAMES = ["plain step", "chain of 3", "chain of 5"]


def test_bars_are_as_long_as_their_parts_and_stand_end_to_end() -> None:
    axes = stacked_steps(NAMES, PARTS).axes[0]
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    assert len(bars) == len(NAMES) * len(PARTS)
    for number, (part, times) in enumerate(PARTS.items()):
        for index, time in enumerate(times):
            bar = bars[number * len(NAMES) + index]
            before = sum(PARTS[other][index] for other in list(PARTS)[:number])
            assert bar.get_width() == pytest.approx(time), part
            assert bar.get_x() == pytest.approx(before), part


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


def test_a_table_shows_every_value_or_its_words() -> None:
    values = np.array([[0.0, 0.25], [1.0, 2.0]])
    axes = table_map(values, ["one", "two"], [1, 2], title="a table", most=2.0).axes[0]
    assert [text.get_text() for text in axes.texts] == ["0.00", "0.25", "1.00", "2.00"]
    assert [text.get_position() for text in axes.texts] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    words = [["a", "b"], ["c", "d"]]
    axes = table_map(values, ["one", "two"], [1, 2], title="a table", most=2.0, words=words).axes[0]
    assert [text.get_text() for text in axes.texts] == ["a", "b", "c", "d"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two"]


def test_a_roofline_moves_its_roof_and_keeps_the_intensities() -> None:

    chips = [KNOWN_ACCELERATORS["h200"], KNOWN_ACCELERATORS["l4"]]
    steps = [Step("plain step", 1.0, "1 row"), Step("checking", 6.0), Step("checking", 900.0)]
    words = [["3 ms", "3 ms", "9 ms"], ["50 ms", "50 ms", "90 ms"]]
    figure = roofline(steps, chips, words).figure
    roof, plain, checking = figure.data
    assert list(roof.x)[1] == pytest.approx(989 / 4.8)  # the ridge
    assert list(checking.y) == pytest.approx([6 * 4.8, 989])  # on the slope, and on the roof
    assert figure.layout.title.text == "H200: ridge point at 206 operations per byte"
    changes, texts = figure.layout.updatemenus[0].buttons[1].args
    assert list(changes["x"][2]) == list(checking.x) == [6.0, 900.0]
    assert list(changes["y"][1]) == pytest.approx([0.3])
    assert changes["hovertext"][1] == ["50 ms"] and list(plain.hovertext) == ["3 ms"]
    assert texts["title.text"].startswith("L4: ")
    with pytest.raises(ValueError, match="words for 2 accelerators and 3 steps"):
        roofline(steps, chips, words[:1])


#            0 -> 1 -> 3 -> 5      0 -> 2      1 -> 4 -> 6
PARENTS = [-1, 0, 0, 1, 1, 3, 4]
TOKENS = ["def", " f", "\n", "</script>", "$a_b$", "<!-- x", "a very long token indeed"]
STATUS = ["root", "accepted", "never visited", "rejected", "accepted", "never visited", "rejected"]
PLAIN = {"tokens": TOKENS, "parents": PARENTS, "status": STATUS}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ([1, 4], STATUS),
        ([], ["root", "rejected", "rejected", *["never visited"] * 4]),
        ([2], ["root", "rejected", "accepted", *["never visited"] * 4]),
        ([1, 3, 5], ["root", "accepted", "never visited", "accepted", "never visited", "accepted", "never visited"]),
    ],
)
def test_what_became_of_each_node(path, expected):
    assert statuses(PARENTS, path) == expected


def test_the_mask_shows_every_square_as_it_is():
    mask = np.eye(3, dtype=bool)
    figure = mask_map(mask, TOKENS[:3], depths=[0, 1, 1])
    figure.canvas.draw()
    assert (np.asarray(figure.axes[0].images[0].get_array()) == mask).all()


def figure_of(html):
    return json.loads(re.search(r"const figure = (.*);", html).group(1))


def test_what_is_known_of_a_node_stands_in_its_hover():
    p, q, score = ([value * (node + 1) for node in range(7)] for value in (0.01, 0.02, -1.0))
    known = {"p": p, "q": q, "score": [None, *score[1:]]}
    html = interactive_rounds([{**PLAIN, **known}]).html()
    hovers = [text for trace in figure_of(html)["data"] for text in trace.get("hovertext", [])]
    assert len(hovers) == len(TOKENS)
    (one,) = (text for text in hovers if "node 4," in text)
    assert "accepted" in one
    assert all(number in one for number in ("0.0500", "0.1000", "-5.000"))
    (root,) = (text for text in hovers if "node 0," in text)
    assert "ln q" not in root


def test_tokens_cannot_leave_the_script_they_stand_in():
    html = Interactive(interactive_rounds([PLAIN]).figure).html(library=False)
    assert html.count("</script") == 1
    assert "<!--" not in html
    assert any("&lt;/script&gt;" in text for trace in figure_of(html)["data"] for text in trace.get("hovertext", []))


def test_every_round_shows_its_own_tree_and_title():
    one = PLAIN
    short = {"tokens": TOKENS[:2], "parents": PARENTS[:2], "status": ["root", "bonus"]}
    figure = interactive_rounds([{**one, "title": "first"}, {**short, "title": "second"}]).figure
    steps = figure.layout.sliders[0].steps
    shown = [np.array(step.args[0]["visible"]) for step in steps]
    assert (shown[0] ^ shown[1]).all()
    assert len(shown[0]) == len(figure.data)
    assert [step.args[1]["title.text"] for step in steps] == ["first", "second"]
    nodes = [sum(len(t.hovertext or ()) for t, on in zip(figure.data, mask, strict=True) if on) for mask in shown]
    assert nodes == [7, 2]
