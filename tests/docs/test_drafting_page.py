"""The page that computes with recorded p and q: its numbers are those of an independent program."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from browser import browsing
from drafting_page import DOCS, RECORD, whole_page

import eagle3_jax as e3
from eagle3_jax.measure.trace import record
from eagle3_jax.prompts.benchmark import Prompt
from eagle3_jax.theory.speedup import speedup

sys.path.append(str(DOCS / "recorded"))
import drafting

SAVED = json.loads(RECORD.read_text(encoding="utf-8"))


def positions_of(text: dict[str, Any]) -> list[dict[str, Any]]:
    """Reads the bytes of a text, as the script that wrote them describes them."""
    codes = iter(gzip.decompress(base64.b64decode(text["data"])))

    def take(count: int) -> np.ndarray:
        return np.array([*itertools.islice(codes, count)], float)

    def probabilities(count: int) -> np.ndarray:
        bytes_ = take(count)
        return np.where(bytes_ == 255, 0, np.exp(-14 * (bytes_ / 255) ** 2))

    positions = []
    for index, token in enumerate(text["tokens"][1:], start=1):
        size = next(codes)
        low = take(size)
        ids = low + 256 * take(size)
        p = probabilities(size + 1)
        q = [probabilities(size + 2) for _ in range(min(5, index))]
        positions.append({"ids": ids, "written": [*ids].index(token), "p": p, "q": q})
    assert next(codes, None) is None
    return positions


def chance(position: dict[str, Any], step: int, *, sampled: bool) -> float:
    """Returns the probability that a draft step is accepted, given the token of the text."""
    written = position["written"]
    size = position["ids"].size
    q = position["q"][step - 1]
    if not sampled:
        return float(q[:size].argmax() == written)
    p = position["p"][written]
    return min(1.0, q[written] / p) if p else 0.0


def rounds_of(
    positions: list[dict[str, Any]], length: int, *, sampled: bool
) -> tuple[float, np.ndarray]:
    """Returns expected rounds of a text, and how many accept each depth: from the last root back."""
    last_root = min(len(positions), SAVED["compared"] - 1) - length - 1
    nothing = (0.0, np.zeros(length))
    after = {root: nothing for root in range(last_root + 1, last_root + length + 2)}
    for root in range(last_root, -1, -1):
        chances = [
            chance(positions[root + depth], depth + 1, sampled=sampled) for depth in range(length)
        ]
        # The probabilities of 0, 1, ... accepted tokens.
        reached = np.cumprod([1.0, *chances])
        exactly = -np.diff(reached, append=0.0)
        rounds = 1 + sum(share * after[root + 1 + count][0] for count, share in enumerate(exactly))
        accepted = reached[1:] + sum(
            share * after[root + 1 + count][1] for count, share in enumerate(exactly)
        )
        after[root] = (rounds, accepted)
    return after.get(0, nothing)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(whole_page(), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    with browsing() as page:
        page.emulate_media(reduced_motion="reduce")
        page.context.set_offline(True)
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        page.wait_for_selector(".e3-drafting[data-state=shown]")
        yield page
        assert requests == [address]


def move(page: Any, **values: float) -> None:
    for name, value in values.items():
        script = (
            "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')) }"
        )
        page.locator(f"input[name={name}]").evaluate(script, value)


def number(page: Any, name: str) -> float:
    return float(page.locator(f"output[name={name}]").first.text_content())


def test_the_page_is_one_small_file() -> None:
    assert len(whole_page().encode()) < 1_500_000
    assert len(SAVED["prompts"]) == 100


@pytest.mark.parametrize(
    ("temperature", "length", "sampled"),
    [(0, 3, True), (1, 2, True), (1, 3, False), (0.5, 5, True)],
)
def test_tokens_per_round_and_the_speed_up_are_those_of_all_courses_of_the_rounds(
    page: Any, temperature: float, length: int, sampled: bool
) -> None:
    page.locator(f"[name=sampled][value={'yes' if sampled else 'no'}]").check()
    page.select_option("[name=task]", "humaneval")
    move(page, length=length, temperature=temperature, v=1.37, c=0.11)
    shown = f"{temperature:g}"
    page.wait_for_function(
        "shown => document.querySelector('[name=temperature-shown]').textContent === shown",
        arg=shown,
    )

    index = SAVED["temperatures"].index(temperature)
    totals = [
        rounds_of(positions_of(prompt["texts"][index]), length, sampled=sampled)
        for prompt in SAVED["prompts"]
        if prompt["task"] == "humaneval"
    ]
    shares = sum(accepted for _, accepted in totals) / sum(rounds for rounds, _ in totals)
    tau = 1 + shares.sum()
    outputs = page.locator(".depths output").all_text_contents()
    percent = [float(text.removesuffix(" %")) for text in outputs]
    assert percent == pytest.approx(100 * shares, abs=0.051)
    assert number(page, "tau") == pytest.approx(tau, abs=0.0051)
    gain = speedup(tau, num_draft_tokens=length, verify_cost=1.37, draft_cost=0.11)
    assert number(page, "speedup") == pytest.approx(gain, abs=0.0051)

    # The first guess of the shown text.
    page.locator(".round").first.click()
    shown_prompt = SAVED["prompts"][int(page.locator("[name=prompt]").input_value())]
    position = positions_of(shown_prompt["texts"][index])[0]
    p = position["p"][:-1]
    q = position["q"][0]
    common = np.minimum(p, q[:-2]).sum() + q[-1]
    expected = common if sampled else p[q[:-2].argmax()]
    assert float(page.locator(".chance").get_attribute("data-value")) == pytest.approx(expected)

    limit = page.locator("[data-answer=v]").text_content()
    assert f"{tau / 1.1 - length * 0.11:.2f}" in limit


def test_a_perfect_head_keeps_every_guess_and_a_costly_verification_does_not_pay_off(
    page: Any,
) -> None:
    page.locator("[name=sampled][value=yes]").check()
    page.locator("[name=perfect][value=yes]").check()
    move(page, temperature=1, length=4)
    page.wait_for_function("() => document.querySelector('[name=tau]').textContent === '5.00'")
    page.locator("[name=perfect][value=no]").check()
    move(page, v=4)
    assert "does not pay off" in page.inner_text(".verdict")


def test_the_lanes_have_one_text_and_the_steps_of_both(page: Any) -> None:
    move(page, temperature=0, length=3, v=1.25, c=0.064)
    lanes = [page.locator(f".{lane} .text") for lane in ("plain", "drafted")]
    page.wait_for_function(
        "() => document.querySelector('[name=temperature-shown]').textContent === '0'"
    )
    plain, drafted = [lane.text_content() for lane in lanes]
    assert plain == drafted != ""
    rounds = page.locator(".round").count()
    assert f"{rounds} passes of the target, done after {rounds * 1.442:.1f}" in page.inner_text(
        ".drafted .passes"
    )

    # The first round is shown after its time, and the others are not.
    page.click("[name=step]")
    assert page.locator(".drafted .text > span:not(.later)").count() == 2
    assert number(page, "clock") == pytest.approx(1.4)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_a_telephone_and_follows_the_color_scheme(page: Any, scheme: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    move(page, length=5, temperature=1)
    page.wait_for_function("() => document.querySelectorAll('.depths output').length === 5")
    page.locator("details").evaluate_all("all => all.forEach((each) => { each.open = true })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    tree = page.locator(".tree")
    assert tree.evaluate("place => place.scrollWidth <= place.clientWidth")
    ink = page.evaluate("getComputedStyle(document.querySelector('.e3-drafting')).color")
    brightness = sum(map(int, ink.removeprefix("rgb(").removesuffix(")").split(",")))
    assert brightness < 200 if scheme == "light" else brightness > 600


# ---------------------------------------------------------------- the record


def test_the_recorded_distributions_are_those_that_rounds_draft_and_verify_with() -> None:
    """The script reads both models once for a whole text; here the decoder runs round by round."""
    target = e3.load_target()
    head = e3.load_drafter(target=target)
    prompt = Prompt("code", "", target.encode("def mean(values):\n"), None, None, 0)
    options: dict[str, Any] = {"sampling": e3.SamplingParams(), "seed": 0}
    decoder = e3.SpeculativeDecoder(target, head, num_speculative_tokens=3)
    played = record(decoder, [prompt.tokens], max_new_tokens=[40], **options)
    text = played.result.tokens[0]
    p_logits, q_logits = drafting.logits_of(target, head, prompt, [text])

    # Greedy rounds: the head's likeliest tokens that the text has are those that were accepted.
    root = 0
    for round_ in played.prompts[0]["rounds"][:-2]:
        likeliest = q_logits[:3, 0, root].argmax(-1)
        hits = likeliest == text[root + 1 : root + 4]
        accepted = int(np.cumprod(hits).sum())
        assert accepted == round_["num_accepted"]
        root += accepted + 1

    # A sampled round: q of every draft step whose guesses so far are in the text.
    sampler = e3.SpeculativeDecoder(
        target, head, num_speculative_tokens=3, draft_sampling="probabilistic"
    )
    warm = e3.SamplingParams(temperature=0.25)
    compared = 0
    for root in range(4, 10):
        prefix = [*prompt.tokens, *text[:root]]
        latest = sampler.step(sampler.prefill([prefix], max_new_tokens=8, sampling=warm, seed=0))
        drafted = np.asarray(latest.draft.tokens[0])
        for step in range(3):
            if drafted[: step + 1].tolist() != text[root : root + step + 1]:
                break
            q = drafting.distribution(q_logits[step, 0, root], 0.25)
            np.testing.assert_allclose(latest.draft.probs[0, step + 1], q, atol=1e-4)
            compared += 1
    assert compared > 8

    # A position keeps p, q and what they have in common, within the rounding of bytes.
    warm_text = {"tokens": text}
    _, warm_text["data"] = drafting.packed(text, (p_logits, q_logits), 0, 1.0)
    for index, position in enumerate(positions_of(warm_text)[:20]):
        p = drafting.distribution(p_logits[0, index], 1.0)
        ids = position["ids"].astype(int)
        np.testing.assert_allclose(position["p"][:-1], p[ids], rtol=0.07, atol=1e-5)
        for step, q_read in enumerate(position["q"]):
            q = drafting.distribution(q_logits[step, 0, index - step], 1.0)
            common = np.minimum(position["p"][:-1], q_read[:-2]).sum() + q_read[-1]
            assert common == pytest.approx(np.minimum(p, q).sum(), abs=0.02)
