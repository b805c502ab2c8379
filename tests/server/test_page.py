"""The server's page: two lanes with the text of `generate`, probabilities, and a browser."""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from browser import browsing

import eagle3_jax as e3

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from server_client import JSON_BODY, Answer, complete, decoder, generated, get, post

from eagle3_jax.server.local import serving
from eagle3_jax.server.page.lanes import acceptance
from eagle3_jax.server.worker import Worker
from eagle3_jax.types import Draft

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # With the programs of test_serve.py.
    with serving(decoder(), slots=4, capacity=64, logprobs=20) as address:
        yield address


def watch(url: str, *, may_fail: bool = False, **fields: Any) -> list[Answer]:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, **fields}
    request = urllib.request.Request(f"{url}/watch", json.dumps(body).encode(), JSON_BODY)
    with urllib.request.urlopen(request, timeout=300) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        parts = response.read().decode().split("\n\n")
    assert parts[-1] == ""
    events = [json.loads(part.removeprefix("data: ")) for part in parts[:-1]]
    assert may_fail or "error" not in events[-1], events[-1]
    return events


def select(events: list[Answer], kind: str, lane: str | None = None) -> list[Answer]:
    return [event for event in events if event["event"] == kind and event.get("lane", lane) == lane]


def text_of(events: list[Answer], lane: str) -> str:
    parts = select(events, "first", lane) + select(events, "round", lane)
    return "".join(text for part in parts for text in part["texts"])


def test_both_lanes_write_the_text_of_generate_in_turns(url: str) -> None:
    events = watch(url)
    expected = generated({"prompt": PROMPT, "max_tokens": 20, "temperature": 0})
    assert text_of(events, "plain") == text_of(events, "speculative") == expected.text

    assert select(events, "done") == [{"event": "done", "same_text": True}]
    lanes = [event["lane"] for event in events if event["event"] in ("first", "round", "end")]
    assert [lane for lane, _ in itertools.groupby(lanes)] == ["plain", "speculative"]

    (plain,) = select(events, "end", "plain")
    (drafted,) = select(events, "end", "speculative")
    assert (plain["tokens"], plain["passes"]) == (20, 19)
    assert drafted["tokens"] == 20
    assert drafted["tau"] == round(float(expected.stats.mean_acceptance_length), 4)

    rounds = select(events, "round", "speculative")
    assert drafted["passes"] == len(rounds) == len(select(events, "probabilities"))
    assert (
        sum(len(round_["path"]) for round_ in rounds)
        == drafted["accepted"]
        == expected.stats.num_accepted_tokens
    )
    assert drafted["seconds"] == pytest.approx(
        sum(round_["seconds"] for round_ in rounds), abs=1e-3
    )


LONGEST = 48


@functools.cache
def forward() -> Any:
    """Returns a compiled forward pass of the target over padded texts, without a cache."""
    target = decoder().target
    return jax.jit(lambda tokens: tiny.forward(target.model, target.params, tokens)[0])


def distributions(texts: list[list[int]], temperature: float, top_k: int) -> np.ndarray:
    """Returns the target's distribution after each text."""
    rows = np.zeros((8, LONGEST), np.int32)
    for row, text in zip(rows, texts, strict=False):
        row[: len(text)] = text
    last_positions = [len(text) - 1 for text in texts]
    logits = np.asarray(forward()(rows), np.float64)[range(len(texts)), last_positions]
    values = logits / (temperature or 1.0)
    if top_k:
        values[values < np.sort(values)[:, -top_k, None]] = -np.inf
    weights = np.exp(values - values.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


SAMPLED = {"temperature": 0.9, "top_k": 50, "seed": 5}


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"max_tokens": 12}, {"num_speculative_tokens": 3}),
        (
            {**SAMPLED, "max_tokens": 12, "draft": "chain of 2", "draft_sampling": "probabilistic"},
            {"num_speculative_tokens": 2, "draft_sampling": "probabilistic"},
        ),
        (
            {**SAMPLED, "max_tokens": 10, "draft": "tree of 8"},
            {"tree": e3.DynamicTree(num_nodes=8, max_depth=4, top_k=4)},
        ),
    ],
    ids=["greedy", "sampled chain", "tree"],
)
def test_probabilities_are_those_of_one_forward_pass_and_of_the_draft(
    url: str, fields: dict[str, Any], shape: dict[str, Any]
) -> None:
    events = watch(url, **fields)
    target = decoder().target
    checked = e3.SpeculativeDecoder(target, e3.load_drafter(target=target), **shape)
    temperature = fields.get("temperature", 0.0)
    top_k = fields.get("top_k", 0)

    sampling = e3.SamplingParams(temperature=temperature, top_k=top_k)
    options = {
        "max_new_tokens": fields["max_tokens"],
        "sampling": sampling,
        "seed": fields.get("seed", 0),
    }

    text = checked.target.encode(PROMPT)
    rounds = select(events, "round", "speculative")
    examined = select(events, "probabilities")
    assert len(rounds) >= 3

    for round_, values, latest in zip(
        rounds, examined, checked.rounds(PROMPT, **options), strict=True
    ):
        tokens = round_["tokens"]
        parents = round_["parents"]
        assert tokens == latest.draft.tokens[0].tolist()
        assert parents == latest.draft.parents[0].tolist()

        paths = [[*text, tokens[0]]]
        for node in range(1, len(tokens)):
            paths.append([*paths[parents[node]], tokens[node]])

        p = distributions(paths, temperature, top_k)
        q = None if latest.draft.probs is None else np.asarray(latest.draft.probs[0])

        for node, entry in enumerate(values["nodes"]):
            for token, label, p_of_token, q_of_token in entry["bars"]:
                assert p_of_token == pytest.approx(p[node, token], abs=2e-3)
                assert label == target.tokenizer.decode([token])
                if q is not None and node in parents:
                    assert q_of_token == pytest.approx(q[parents.index(node), token], abs=1e-4)

            likely = {token for token in np.argsort(-p[node])[:3].tolist() if p[node, token] > 0.01}
            assert likely <= {token for token, *_ in entry["bars"]}

            if node > 0:
                check_chance(
                    entry, node, tokens, parents, p[parents[node]], q, is_greedy=temperature == 0
                )

        text += [tokens[node] for node in [0, *round_["path"]]]


def check_chance(
    entry: Answer,
    node: int,
    tokens: list[int],
    parents: list[int],
    p: np.ndarray,
    q: np.ndarray | None,
    *,
    is_greedy: bool,
) -> None:
    """Compares the values of one drafted token with the target's distribution after its parent."""
    token = tokens[node]
    assert entry["p"] == pytest.approx(p[token], abs=2e-3)
    assert entry["q"] == pytest.approx(1.0 if q is None else q[node, token], abs=1e-4)
    elders = [tokens[elder] for elder in range(node) if parents[elder] == parents[node]]
    if is_greedy:
        assert entry["accept"] == float(token == p.argmax())
    elif q is None:  # a rejected point mass leaves the others their share of what remains
        assert entry["accept"] == pytest.approx(p[token] / (1 - p[elders].sum()), abs=5e-3)
    else:
        assert entry["accept"] == pytest.approx(min(1.0, p[token] / q[node, token]), abs=2e-2)


def test_the_probability_of_acceptance_is_how_often_the_rule_accepts() -> None:
    """Two sampled siblings, each from a distribution of its own, and a child below the first."""
    p = np.array(
        [[0.1, 0.2, 0.3, 0.25, 0.15], [0.3, 0.3, 0.2, 0.1, 0.1], [0.2] * 5, [0.2] * 5], np.float32
    )
    q = np.array(
        [
            [0.2] * 5,
            [0.1, 0.1, 0.5, 0.2, 0.1],
            [0.1, 0.1, 0.1, 0.6, 0.1],
            [0.1, 0.6, 0.1, 0.1, 0.1],
        ],
        np.float32,
    )

    parents = [-1, 0, 0, 1]
    tokens = [0, 2, 3, 1]
    chances = acceptance(tokens, parents, p=p, q=q)
    # After the first sibling, p is the normalised max(p - q, 0): 0.5, 0.25 and 0.25 for tokens 1,
    # 3 and 4.
    assert chances == pytest.approx([1.0, 0.3 / 0.5, 0.25 / 0.6, 0.3 / 0.6], abs=1e-4)

    count = 40_000
    rows = lambda values: jnp.broadcast_to(jnp.asarray(values), (count, *np.shape(values)))
    draft = Draft(
        tokens=rows(np.array(tokens, np.int32)),
        parents=rows(np.array(parents, np.int32)),
        valid=rows(np.ones(4, bool)),
        probs=rows(q),
    )

    accept_key, choose_key = jax.random.split(jax.random.key(1))
    accept = jax.random.uniform(accept_key, (count, 4))
    choose = jax.random.uniform(choose_key, (count, e3.num_digits(5)))
    path = np.asarray(e3.verify(draft, rows(p), accept=accept, choose=choose, max_depth=2).path)

    first = path[:, 0] == 1
    second = path[:, 0] == 2
    below = path[first, 1] == 3

    for chance, outcomes in zip(chances[1:], (first, second[~first], below), strict=True):
        error = 5 * np.sqrt(0.25 / outcomes.size)
        assert chance == pytest.approx(outcomes.mean(), abs=error)


def test_other_requests_are_answered_while_the_page_is(url: str) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    connection.request("POST", "/watch", json.dumps(body), JSON_BODY)
    response = connection.getresponse()
    response.read(20)
    status, answer = post(url, body, "/watch")
    assert status == 503 and "the page is for one viewer" in answer["error"]["message"]
    fields = {"prompt": "import", "max_tokens": 12, "temperature": 0}
    assert complete(url, **fields)["text"] == generated(fields).text
    connection.close()
    wait_until_free(url)


def wait_until_free(url: str) -> None:
    """Returns when the server has seen that the viewer left."""
    deadline = time.monotonic() + 60
    while is_refused(url, {"prompt": PROMPT, "max_tokens": 2, "temperature": 0}):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_refused(url: str, body: Answer) -> bool:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/watch", json.dumps(body), JSON_BODY)
    response = connection.getresponse()
    text = response.read().decode()
    assert response.status == 503 or '"event": "done"' in text
    return response.status == 503


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"draft": "chain of 99"}, "draft", "expected one of as the server, chain of 1"),
        ({"draft": ["x"]}, "draft", "expected one of"),
        ({"draft": "tree of 8", "draft_sampling": "probabilistic"}, "draft_sampling", "tree"),
        ({"draft_sampling": "often"}, "draft_sampling", "expected 'greedy' or 'probabilistic'"),
        ({"stream": True}, "stream", "not supported by the page"),
        ({"max_tokens": 1000}, "max_tokens", "--capacity"),
        ({"prompt": None}, "prompt", "prompt"),
    ],
)
def test_a_bad_request_of_the_page_is_refused(
    url: str, fields: dict[str, Any], param: str, message: str
) -> None:
    status, answer = post(url, {"prompt": PROMPT, "temperature": 0, **fields}, "/watch")
    assert status == 400, answer
    assert answer["error"]["param"] == param and message in answer["error"]["message"]


def test_a_failure_of_the_page_is_no_failure_of_the_server(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr("eagle3_jax.server.page.lanes._examine", fail)
        *_, last = watch(url, max_tokens=2, may_fail=True)
    assert last["error"]["message"] == "MemoryError: no room"
    assert watch(url, max_tokens=2)[-1]["event"] == "done"


def test_a_server_without_drafter_and_tokenizer_has_two_equal_lanes() -> None:
    plain = e3.SpeculativeDecoder(tiny.target(13))
    with serving(plain, slots=1, capacity=24) as address:
        facts = json.loads(get(f"{address}/watch"))
        assert facts["drafts"] == ["as the server"] and facts["is_chat"] is False
        events = watch(address, prompt=[1, 2, 3], max_tokens=4)
    expected = plain.generate([[1, 2, 3]], max_new_tokens=4).tokens[0]
    assert (
        text_of(events, "speculative").split()
        == text_of(events, "plain").split()
        == list(map(str, expected))
    )


def test_the_page_is_served_and_loads_nothing_from_elsewhere(url: str) -> None:
    page = get(url)
    assert "function drawTree(" in page
    addresses = set(re.findall(r"\w+://[^\s\"'<>]+", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which is not fetched
    assert "default-src 'none'" in page


def test_a_viewer_sees_both_lanes_write_the_same_text(url: str) -> None:
    with browsing() as page:
        page.goto(url)
        page.wait_for_selector("#ask:not([hidden])")
        assert page.input_value("#mode") == "chat"  # the target has a template

        page.select_option("#mode", "text")
        page.fill("#prompt", PROMPT)
        page.fill("#limit", "20")
        page.click("#run")
        page.wait_for_selector("body[data-state=done]", timeout=120_000)

        expected = generated({"prompt": PROMPT, "max_tokens": 20, "temperature": 0}).text
        for lane in ("plain", "speculative"):
            assert page.text_content(f"#{lane}-text") == PROMPT + expected
        assert page.inner_text("#figures tr:last-child td:last-child") == "yes"

        page.click(".round[data-round='0']")
        # The root, three drafted tokens and the target's.
        assert page.locator("#tree .node").count() == 5
        assert page.locator("#bars .of-p").count() >= 5

        page.select_option("#draft", "tree of 8")
        page.select_option("#draft-sampling", "probabilistic")
        page.click("#run")
        page.wait_for_selector("body[data-state=failed]")
        assert "tree" in page.inner_text("#status")


def test_a_viewer_pauses_steps_and_stops_a_live_run(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rounds of 50 ms, so that the run lives while the viewer clicks."""
    run_watch = Worker._run_watch

    def run_slowly(worker: Worker) -> None:
        time.sleep(0.05)
        run_watch(worker)

    monkeypatch.setattr(Worker, "_run_watch", run_slowly)
    with browsing() as page:
        page.goto(url)
        page.wait_for_selector("#ask:not([hidden])")
        page.select_option("#mode", "text")
        page.fill("#prompt", PROMPT)
        page.fill("#limit", "40")

        def run_until(count: int) -> None:
            page.click("#run")
            wait_for_tokens(count)

        def wait_for_tokens(count: int) -> None:
            page.locator("#plain-text .token").nth(count - 1).wait_for(state="attached")

        def shown() -> int:
            page.wait_for_timeout(300)  # six rounds
            return page.locator("#plain-text .token").count()

        run_until(3)
        page.click("#pause")
        page.wait_for_selector("#pause:text('Play')")
        count = shown()
        assert count == shown() < 40
        page.click("#step")
        assert shown() == count + 1
        page.click("#pause")
        wait_for_tokens(count + 3)
        page.click("#run")
        page.wait_for_selector("body[data-state=failed]")
        assert (page.inner_text("#status"), page.inner_text("#run")) == ("Stopped.", "Run")
        assert shown() < 40
        wait_until_free(url)

        run_until(3)
        page.click("#pause")
        page.click("#run")
        page.wait_for_selector("body[data-state=failed]")
        assert (page.inner_text("#status"), page.inner_text("#run")) == ("Stopped.", "Run")
        wait_until_free(url)

        page.fill("#limit", "4")
        run_until(1)
        page.click("#pause")
        page.wait_for_selector("#run:text('Run')")  # the server has sent all
        page.click("#run")
        page.wait_for_selector("body[data-state=done]")
        assert page.locator("#plain-text .token").count() == 4
