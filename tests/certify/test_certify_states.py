"""Tests of a server's states: each fails for a server that errs in one state, and for no other."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_server import FakeServer, serving
from faulty_sampler import FaultySampler

from eagle3_jax.certify.asking import Asker, Plan
from eagle3_jax.certify.client import Client
from eagle3_jax.certify.greedy import Noise, Scores
from eagle3_jax.certify.source import Completion
from eagle3_jax.certify.states import examine_states
from eagle3_jax.certify.statistics import Test

PLAN = Plan(prompts=[[0], [1], [2], [3]], num_reported=12, concurrency=2)
OF_TEXTS = dataclasses.replace(PLAN, prompts=["0", "1"])
QUIET = Noise(Scores(np.zeros(0), np.zeros(0), np.zeros(0)), 1e-4)
AGAIN = "greedy answers, again behind another"
AT_ONCE = "greedy answers, 8 at once"
UNSEEDED = "texts without a seed"
TURNS = "second turns"
LONG = "greedy tokens behind a long text"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FaultySampler(vocab_size=16, sureness=0.0)) as running:
        yield running


def examine(
    server: FakeServer,
    noise: Noise | None = QUIET,
    plan: Plan = PLAN,
    client: Client | None = None,
) -> dict[str, Test]:
    """The tests by name."""
    asker = Asker(client or Client(server.url), plan, lambda message: None)
    tests = examine_states(asker, noise)
    assert not asker.failures and not asker.stopped
    assert [test.name for test in tests] == [UNSEEDED, AGAIN, AT_ONCE, TURNS, LONG]
    assert all(test.is_controlled and 0 <= test.p_value <= 1 for test in tests)
    return {test.name: test for test in tests if test.tokens}


def test_a_server_without_states_passes_with_few_requests(server: FakeServer) -> None:
    tests = examine(server)
    assert list(tests) == [UNSEEDED, AGAIN, AT_ONCE, TURNS, LONG]
    assert all(test.p_value > 1e-6 for test in tests.values()), tests
    assert tests[LONG].detail.startswith("after 928 tokens;")  # of 1024 that the server takes
    assert tests[AT_ONCE].detail.startswith("0 of 8 pairs of answers differ; ")
    assert len(server.requests) <= 120
    unseeded = [body for body in server.requests if body["max_tokens"] == 16]
    assert len(unseeded) == 8 and not any("seed" in body for body in unseeded)


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ({"wrong_greedy": 5, "wrong_when": "again"}, AGAIN),
        ({"wrong_greedy": 5, "wrong_when": "crowded", "seconds": 0.05}, AT_ONCE),
        ({"wrong_greedy": 1, "wrong_when": "long"}, LONG),
        ({"stale_prefixes": True}, TURNS),
        ({"fixed_seed": 7}, UNSEEDED),
    ],
)
def test_an_error_in_one_state_fails_its_test_alone(
    server: FakeServer, error: dict[str, Any], name: str
) -> None:
    server.manners = dataclasses.replace(server.manners, **error)
    tests = examine(server)
    failed = {test.name for test in tests.values() if test.p_value < 1e-9}
    assert failed - ({AT_ONCE} if name == AGAIN else set()) == {name}, tests


def test_a_fork_at_a_tie_is_not_an_error(server: FakeServer) -> None:
    server.sampler.target = 0.01 * server.sampler.target + 0.99 / 16  # every two tokens are tied
    server.manners.wrong_greedy = 5
    server.manners.wrong_when = "again"
    test = examine(server)[AGAIN]
    assert test.p_value == 1
    assert test.detail.startswith("4 of 4 pairs of answers differ, 4 of them at tied tokens;")


def test_chats_are_compared_with_themselves_only(server: FakeServer) -> None:
    tests = examine(server, None, OF_TEXTS, Client(server.url, api="chat"))
    assert list(tests) == [UNSEEDED, AGAIN, AT_ONCE]


def test_with_much_noise_only_repeated_texts_are_judged(server: FakeServer) -> None:
    assert list(examine(server, dataclasses.replace(QUIET, size=math.inf))) == [UNSEEDED]


def test_texts_are_continued_as_texts_where_ids_are_not_told(server: FakeServer) -> None:
    server.manners.form = "texts"
    tests = examine(server, plan=OF_TEXTS)
    assert list(tests) == [UNSEEDED, AGAIN, AT_ONCE, TURNS]
    assert all(test.p_value > 1e-6 for test in tests.values()), tests


def test_answers_without_texts_are_compared_by_their_tokens(server: FakeServer) -> None:
    server.manners.writes_texts = False
    assert examine(server)[UNSEEDED] == Test(
        UNSEEDED, 1.0, 128, "8 requests wrote 8 different texts", is_controlled=True
    )
    server.manners.fixed_seed = 7
    assert examine(server)[UNSEEDED].p_value < 1e-9


def test_a_text_is_halved_until_the_server_takes_it(server: FakeServer) -> None:
    client = Client(server.url)
    client.facts.pop("max_model_len")
    complete = client.complete
    lengths = []

    def refuse(prompt: Any, **fields: Any) -> Completion:
        lengths.append(len(prompt))
        if len(prompt) > 3000:
            server.manners.refused_fields = {"prompt"}
        try:
            return complete(prompt, **fields)
        finally:
            server.manners.refused_fields = set()

    client.complete = refuse  # type: ignore[method-assign]
    test = examine(server, client=client)[LONG]
    assert test.detail.startswith("after 1,952 tokens;") and test.p_value == 1
    assert max(lengths) == 16384 - 96


def test_nothing_is_said_by_an_answer_of_one_token_behind_a_long_text(server: FakeServer) -> None:
    server.manners.refused_fields = {"ignore_eos"}
    server.sampler.target[:] = np.eye(16)[0] * 0.9 + 0.1 / 16  # the token that ends a text
    assert LONG not in examine(server)
