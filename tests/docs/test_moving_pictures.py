"""Pictures with sliders: the numbers that a browser shows are those of the closed forms."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from browser import browsing
from pictures.moving import Moving
from pictures.trees import statuses
from scipy.special import softmax

from eagle3_jax.theory.speedup import speedup
from eagle3_jax.tree import ancestor_mask

LABELS = ["Paris", "</script>", "a", "located", "London"]
TARGET = [3.2, 1.6, 1.0, 0.7, -0.3]
DRAFTER = [2.0, 2.2, 1.2, -0.2, 0.9]


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    with browsing() as page:
        yield page


def show(page: Any, picture: Moving, *, width: int = 1280, scheme: str = "light") -> None:
    """Shows one picture on an empty page."""
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)
    page.set_content(f'<!doctype html><meta charset="utf-8"><body>{picture._repr_html_()}')


def move(page: Any, name: str, value: float) -> None:
    script = (
        "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')); }"
    )
    page.locator(f"input[name={name}]").evaluate(script, value)


def number(page: Any, name: str) -> float:
    return float(page.locator(f"output[name={name}]").text_content())


@pytest.mark.parametrize(
    ("temperature", "top_p", "error"),
    [(1, 1, 1), (0.5, 1, 1), (1, 0.7, 1), (2, 0.85, 0.5), (1, 1, 0), (0.2, 0.1, 2)],
)
def test_accepted_part_and_residual_are_p(
    page: Any, temperature: float, top_p: float, error: float
) -> None:
    show(page, Moving("acceptance", {"labels": LABELS, "target": TARGET, "drafter": DRAFTER}))
    for name, value in (("temperature", temperature), ("top_p", top_p), ("error", error)):
        move(page, name, value)

    target = np.array(TARGET)
    p = softmax(target / temperature)
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p /= p.sum()
    q = softmax((target + error * (np.array(DRAFTER) - target)) / temperature)

    bars = page.locator("g[data-token]")
    read = lambda name: np.array([float(bar.get_attribute(f"data-{name}")) for bar in bars.all()])
    np.testing.assert_allclose(read("p"), p, atol=1e-12)
    np.testing.assert_allclose(read("q"), q, atol=1e-12)
    np.testing.assert_allclose(read("accepted"), np.minimum(p, q), atol=1e-12)
    np.testing.assert_allclose(read("accepted") + read("residual"), p, atol=1e-12)

    accepted = np.minimum(p, q).sum()
    assert number(page, "accepted") == pytest.approx(accepted, abs=6e-4)
    rejected = number(page, "rejected")
    assert number(page, "residual") == rejected == pytest.approx(1 - accepted, abs=6e-4)
    assert number(page, "sum") == 1


def test_tokens_sampled_by_the_rule_approach_p(page: Any) -> None:
    show(page, Moving("acceptance", {"labels": LABELS, "target": TARGET, "drafter": DRAFTER}))
    for _ in range(20):
        page.click("button")
    assert "10000 tokens" in page.locator(".counted").text_content()

    # The height of a mark over the height of the bar of p is frequency over p.
    heights = page.evaluate(
        """() => [...document.querySelectorAll("g[data-token]")].map(group => {
          const mark = group.querySelector("line"), bars = group.querySelectorAll("rect");
          const bar = bars[4];
          const bottom = Number(bar.getAttribute("y")) + Number(bar.getAttribute("height"));
          return (bottom - Number(mark.getAttribute("y1")))
            / Number(bar.getAttribute("height"));
        })"""
    )

    p = softmax(np.array(TARGET))
    noise = np.sqrt(p * (1 - p) / 10_000)
    assert np.all(np.abs(np.array(heights) * p - p) < 6 * noise)

    move(page, "temperature", 0.5)
    assert page.locator(".counted").text_content() == "", "another p starts again"


@pytest.mark.parametrize(
    ("tau", "v", "c", "length"),
    [(2.4, 1.2, 0.1, 3), (1.2, 3.0, 0.2, 5), (4.0, 1.0, 0.0, 3), (2.0, 1.0, 0.5, 1)],
)
def test_the_speed_up_is_that_of_the_formula(
    page: Any, tau: float, v: float, c: float, length: int
) -> None:
    show(page, Moving("speedup", {"tau": 2.4, "v": 1.2, "c": 0.1, "K": 3}))
    for name, value in (("K", length), ("tau", tau), ("v", v), ("c", c)):
        move(page, name, value)
    expected = speedup(tau, num_draft_tokens=length, verify_cost=v, draft_cost=c)
    assert number(page, "speedup") == pytest.approx(expected, abs=6e-3)
    assert ("Slower" in page.locator(".verdict").text_content()) == (expected < 1)
    move(page, "K", 1)
    assert number(page, "tau-shown") <= 2, "a round adds at most K + 1 tokens"


PARENTS = [-1, 0, 0, 0, 1, 1, 2, 4, 4]
TREE = {
    "tokens": ["the", "<b>", "land", "sea", ".", ",", "of", "Try", "It"],
    "parents": PARENTS,
    "ids": [*range(9)],
    "choices": [f"choice {node}" for node in range(9)],
    "length": 40,
}


@pytest.mark.parametrize(
    ("choices", "path"),
    [
        ([1, 4, 9, 9, 8, 9, 9, 9, 9], [1, 4, 8]),  # a bonus
        ([2, 4, 0, 9, 8, 9, 9, 9, 9], [2]),  # a correction
        ([9, 4, 6, 9, 8, 9, 9, 9, 9], []),
    ],
)
def test_a_round_accepts_and_commits_the_path(
    page: Any, choices: list[int], path: list[int]
) -> None:
    show(page, Moving("draft_tree", {**TREE, "choice_ids": choices}))
    root = page.locator(".e3-draft_tree")

    names = [root.get_attribute("data-step")]
    while page.locator("button[name=next]").is_enabled():
        page.click("button[name=next]")
        names.append(root.get_attribute("data-step"))
        if names[-1] == "mask":
            cells = page.locator("rect[data-row]").all()
            seen = np.array([cell.get_attribute("data-seen") == "true" for cell in cells])
            expected = ancestor_mask(jnp.array(PARENTS)[None], 3)[0]
            np.testing.assert_array_equal(seen.reshape(9, 9), expected)

    accepts = ["accept"] * (len(path) + 1)
    assert names == ["start", *["propose"] * 3, "mask", "verify", *accepts, "commit"]

    groups = page.locator("g[data-node]").all()
    shown = {int(g.get_attribute("data-node")): g.get_attribute("data-kind") for g in groups}
    assert [shown[node] for node in range(9)] == statuses(PARENTS, path)

    slots = page.locator("g[data-line='1']").all()
    contents = [slot.get_attribute("data-holds") for slot in slots]
    assert contents == [*map(str, [0, *path]), *[""] * (8 - len(path))]
    assert int(slots[0].get_attribute("data-slot")) == 40

    caption = page.locator(".caption").text_content()
    assert f"grows by {len(path) + 1}" in caption
    end = path[-1] if path else 0
    assert f"choice {end}" in caption

    page.click("button[name=back]")
    assert ("bonus" in page.locator(".caption").text_content()) == (end not in PARENTS)


def test_recorded_rounds_are_shown_with_their_values(page: Any) -> None:
    """A token cannot leave the script that it is in."""
    drafted = {
        "tokens": ["x", "</script>"],
        "parents": [-1, 0],
        "kinds": ["root", "accepted"],
        "p": [None, 0.25],
    }
    show(page, Moving("rounds", {"title": "", "rounds": [drafted]}))
    page.hover("g[data-node='1'] text")
    page.wait_for_selector(".caption:text('</script>”: node 1, accepted, p (target) 0.2500')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["acceptance", "speedup", "draft_tree"])
def test_a_picture_fits_a_phone_and_is_legible(page: Any, name: str, scheme: str) -> None:
    values = {"labels": LABELS, "target": TARGET, "drafter": DRAFTER}
    values |= {"tau": 2.4, "v": 1.2, "c": 0.1, "K": 3}
    values |= {**TREE, "choice_ids": [1, 4, 9, 9, 8, 9, 9, 9, 9]}

    show(page, Moving(name, values), width=390, scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    style = f"getComputedStyle(document.querySelector('.e3-{name}'))"
    luminance = lambda color: np.dot(
        [0.21, 0.72, 0.07], [int(part) for part in color[4:-1].split(",")[:3]]
    )

    ink = luminance(page.evaluate(f"{style}.color"))
    paper = luminance(page.evaluate(f"{style}.backgroundColor"))
    assert (ink < paper) == (scheme == "light")
    assert abs(ink - paper) > 150


BLOCK = re.compile(r"^```{moving-picture} (\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        pytest.param(name, values, id=f"{path.name}-{name}")
        for path in PAGES
        for name, values in BLOCK.findall(path.read_text("utf-8"))
    ],
)
def test_a_picture_of_a_page_is_shown(page: Any, name: str, values: str) -> None:
    show(page, Moving(name, json.loads(values)))
    assert page.locator("svg *").count() > 1
    assert page.locator("b").text_content() == json.loads(values)["title"]
