"""Pictures of draft trees, and interactive ones as HTML of their own."""

from __future__ import annotations

import base64
import gzip
import json
import re

import numpy as np
import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("plotly")

import matplotlib as mpl

from eagle3_jax.pictures import interactive
from eagle3_jax.pictures.interactive import Interactive
from eagle3_jax.pictures.trees import interactive_rounds, interactive_tree, mask_map, statuses, tree

mpl.use("agg")

#            0 -> 1 -> 3 -> 5      0 -> 2      1 -> 4 -> 6
PARENTS = [-1, 0, 0, 1, 1, 3, 4]
TOKENS = ["def", " f", "\n", "</script>", "$a_b$", "<!-- x", "a very long token indeed"]
STATUS = ["root", "accepted", "never visited", "rejected", "accepted", "never visited", "rejected"]


@pytest.fixture(autouse=True)
def _fresh_page(monkeypatch):
    monkeypatch.setattr(interactive._Page, "carrier", None)


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


def test_a_tree_is_laid_out_by_level_and_no_two_nodes_share_a_place():
    figure = tree(TOKENS, PARENTS, status=STATUS, title="$not math")
    figure.canvas.draw()
    shown = figure.axes[0].texts
    assert len(shown) == len(TOKENS)
    assert [round(text.xy[0]) for text in shown] == [0, 1, 1, 2, 2, 3, 3]
    assert len({text.xy for text in shown}) == len(TOKENS)
    assert shown[6].get_text().endswith("…")
    assert "rejected (2)" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_the_mask_shows_every_square_as_it_is():
    mask = np.eye(3, dtype=bool)
    figure = mask_map(mask, TOKENS[:3], depths=[0, 1, 1])
    figure.canvas.draw()
    assert (np.asarray(figure.axes[0].images[0].get_array()) == mask).all()


def figure_of(html):
    return json.loads(re.search(r"const figure = (.*);", html).group(1))


def test_what_is_known_of_a_node_stands_in_its_hover():
    p, q, score = ([value * (node + 1) for node in range(7)] for value in (0.01, 0.02, -1.0))
    html = interactive_tree(TOKENS, PARENTS, status=STATUS, p=p, q=q, score=[None, *score[1:]]).html()
    hovers = [text for trace in figure_of(html)["data"] for text in trace.get("hovertext", [])]
    assert len(hovers) == len(TOKENS)
    (one,) = (text for text in hovers if "node 4," in text)
    assert "accepted" in one
    assert all(number in one for number in ("0.0500", "0.1000", "-5.000"))
    (root,) = (text for text in hovers if "node 0," in text)
    assert "ln q" not in root


def test_tokens_cannot_leave_the_script_they_stand_in():
    html = Interactive(interactive_tree(TOKENS, PARENTS, status=STATUS).figure).html(library=False)
    assert html.count("</script") == 1
    assert "<!--" not in html
    assert any("&lt;/script&gt;" in text for trace in figure_of(html)["data"] for text in trace.get("hovertext", []))


def test_every_round_shows_its_own_tree_and_title():
    one = {"tokens": TOKENS, "parents": PARENTS, "status": STATUS}
    short = {"tokens": TOKENS[:2], "parents": PARENTS[:2], "status": ["root", "bonus"]}
    figure = interactive_rounds([{**one, "title": "first"}, {**short, "title": "second"}]).figure
    steps = figure.layout.sliders[0].steps
    shown = [np.array(step.args[0]["visible"]) for step in steps]
    assert (shown[0] ^ shown[1]).all()
    assert len(shown[0]) == len(figure.data)
    assert [step.args[1]["title.text"] for step in steps] == ["first", "second"]
    nodes = [sum(len(t.hovertext or ()) for t, on in zip(figure.data, mask, strict=True) if on) for mask in shown]
    assert nodes == [7, 2]


def test_only_the_first_picture_of_a_page_carries_the_library(monkeypatch):
    monkeypatch.setattr(interactive, "_cell", lambda: cell)
    picture = interactive_tree(TOKENS, PARENTS, status=STATUS)
    cell = "one"
    carried = picture._repr_html_()
    cell = "two"
    assert "atob" not in picture._repr_html_()
    cell = "one"
    assert "atob" in picture._repr_html_()  # run again, it replaces what it carried
    script = gzip.decompress(base64.b64decode(re.search(r'atob\("([^"]*)"\)', carried).group(1))).decode()
    assert "plotly.js v" in script[:200]
    assert len(carried) < 3e6
    assert not re.search(r"(src|href)=", carried)  # nothing is fetched


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"status": STATUS[:3]}, "3 status for 7 nodes"),
        ({"p": [0.5]}, "1 p for 7 nodes"),
        ({"status": ["no"] * 7}, "status \\['no'\\] is not known"),
        ({"parents": [-1, 0, 0, 4, 1, 3, 4]}, "before its parent"),
    ],
)
def test_what_does_not_fit_is_refused(change, says):
    arguments = {"tokens": TOKENS, "parents": PARENTS, "status": STATUS} | change
    with pytest.raises(ValueError, match=says):
        interactive_tree(arguments.pop("tokens"), arguments.pop("parents"), **arguments)
