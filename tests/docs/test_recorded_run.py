"""The recorded runs of the server's page replay in a browser, without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from browser import browsing
from recorded_run import RUNS, page_with_runs

LANES = ("plain", "speculative")
SAVED = json.loads(RUNS.read_text(encoding="utf-8"))["runs"]


def events_of(number: int, kind: str, lane: str | None = None) -> list[dict[str, Any]]:
    events = SAVED[number]["events"]
    return [event for event in events if event["event"] == kind and event.get("lane") == lane]


def text_of(number: int, lane: str) -> str:
    parts = events_of(number, "first", lane) + events_of(number, "round", lane)
    return "".join(text for part in parts for text in part["texts"])


@pytest.fixture
def address(tmp_path: Path) -> str:
    path = tmp_path / "page.html"
    path.write_text(page_with_runs(), encoding="utf-8")
    return path.as_uri()


def test_the_runs_are_small_complete_and_of_the_chat_model() -> None:
    assert RUNS.stat().st_size < 150_000
    for number, saved in enumerate(SAVED):
        (start,) = events_of(number, "start")
        assert start["model"] == "smollm2" and start["lossless"] is True
        (done,) = events_of(number, "done")
        assert done["same_text"] or start["temperature"] > 0
        num_rounds = len(events_of(number, "round", "speculative"))
        assert len(events_of(number, "probabilities")) == num_rounds
        assert saved["title"]

    titles = " ".join(saved["title"] for saved in SAVED)
    assert "chain" in titles and "tree" in titles and "temperature" in titles


def test_a_recorded_run_is_shown_and_replayed_without_a_server(address: str) -> None:
    with browsing() as page:
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.wait_for_selector("body[data-state=done]")
        assert page.is_hidden("#ask")

        for number in (1, 2, 0):
            page.select_option("#choice", str(number))
            for lane in LANES:
                assert page.text_content(f"#{lane}-text") == text_of(number, lane)
        assert page.inner_text("#figures tr:last-child td:last-child") == "yes"

        page.select_option("#speed", "0.025")
        page.click("#replay")
        page.click("#pause")
        assert len(page.text_content("#speculative-text")) < 20

        rounds = events_of(0, "round", "speculative")
        events = events_of(0, "first", "speculative") + rounds
        texts = ["".join(event["texts"]) for event in events]
        for count in range(1, 4):
            page.click("#step")
            page.wait_for_selector(f"#speculative-text > :nth-child({count})")
            assert page.text_content("#speculative-text") == "".join(texts[:count])

        page.click("#back")
        page.wait_for_selector("#speculative-text > :nth-child(3)", state="detached")
        assert requests == [address]


def test_a_click_on_a_round_shows_its_draft_and_its_probabilities(address: str) -> None:
    with browsing() as page:
        page.goto(address)
        for number in range(len(SAVED)):
            page.select_option("#choice", str(number))
            rounds = events_of(number, "round", "speculative")
            index = len(rounds) // 2
            page.click(f".round[data-round='{index}']")
            round_ = rounds[index]
            assert f"Round {index + 1} of {len(rounds)}" in page.inner_text("#round-title")
            assert page.locator("#tree .node").count() == len(round_["tokens"]) + 1
            nodes = events_of(number, "probabilities")[index]["nodes"]

            for node in range(1, len(round_["tokens"])):
                page.click(f"#tree .node[data-node='{node}']")
                bars = nodes[round_["parents"][node]]["bars"]
                widths = [100 * p for _, _, p, _ in bars]
                styles = page.locator("#bars .of-p").evaluate_all(
                    "bars => bars.map(bar => parseFloat(bar.style.width))"
                )
                assert styles == pytest.approx(widths, abs=1e-3)
                named = page.locator("#bars .word.named")
                assert named.count() == 1
                title = named.get_attribute("title").replace("␣", " ").replace("⏎", "\n")
                assert title == round_["labels"][node]

            if round_["path"]:
                kinds = page.locator(f".round[data-round='{index}'] .token").evaluate_all(
                    "tokens => tokens.map(token => getComputedStyle(token).borderBottomStyle)"
                )
                assert kinds[0] == "solid" and kinds[-1] in ("solid", "dashed", "double")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_telephone_and_follows_the_color_scheme(address: str, scheme: str) -> None:
    with browsing(width=390, height=844, scheme=scheme) as page:
        page.goto(address)
        for number in range(len(SAVED)):
            page.select_option("#choice", str(number))
            assert page.evaluate("document.documentElement.scrollWidth") <= 390
            tree = page.locator("#tree")
            assert tree.evaluate("tree => tree.scrollWidth <= tree.clientWidth")

        background, ink = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor,"
            " getComputedStyle(document.body).color]"
        )

        brightness = [
            sum(map(int, color.removeprefix("rgb(").removesuffix(")").split(",")))
            for color in (background, ink)
        ]
        assert (brightness[0] > 600 > 200 > brightness[1]) == (scheme == "light")
        assert (brightness[1] > 600 > 200 > brightness[0]) == (scheme == "dark")
