"""Findings about the fields of requests: each is right about a server that errs in one of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from fake_server import FakeServer, serving
from faulty_sampler import CORRECT, FAULTS, Fault, FaultySampler

from eagle3_jax.certify.asking import Asker, Plan
from eagle3_jax.certify.client import Client
from eagle3_jax.certify.fields import examine_fields
from eagle3_jax.certify.source import Completion, ServerError

PLAN = Plan(prompts=[[0], [1], [2], [3]], num_reported=12, concurrency=2)
NEVER = ("repetition_penalty", "not run")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FaultySampler(vocab_size=16, sureness=0.0)) as running:
        yield running


class Exam(NamedTuple):
    """The outcome and the detail of each field, and what asked."""

    outcomes: dict[str, str]
    details: dict[str, str]
    asker: Asker


def examine(server: FakeServer, client: Client | None = None) -> Exam:
    asker = Asker(client or Client(server.url), PLAN, lambda message: None)
    findings = examine_fields(asker)
    outcomes = {finding.name: finding.outcome for finding in findings}
    details = {finding.name: finding.detail for finding in findings}
    assert all("\n" not in detail and len(detail) < 400 for detail in details.values())
    return Exam(outcomes, details, asker)


def test_a_server_that_honours_all_fields_passes_with_few_requests(server: FakeServer) -> None:
    outcomes, details, asker = examine(server)
    assert NEVER in outcomes.items() and set(outcomes.values()) == {"passed", "not run"}, details
    assert (
        list(outcomes.values()).count("not run") == 1 and not asker.failures and not asker.stopped
    )
    assert len(server.requests) <= 160


@pytest.mark.parametrize(
    ("error", "field", "words"),
    [
        (
            {"ignored_fields": {"logit_bias"}},
            "logit_bias",
            "came in spite of a bias of -100",
        ),
        ({"ignored_fields": {"min_tokens"}}, "min_tokens", "min_tokens "),
        ({"ignored_fields": {"ignore_eos"}}, "ignore_eos", "an answer ended after"),
        ({"ignored_fields": {"stop"}}, "stop", "goes on behind"),
        ({"stop_delay": 1}, "stop", "goes on behind"),
        ({"stop_delay": -1}, "stop", "ends at character"),
        ({"ignored_fields": {"n"}}, "n", "n 4 gave 1 answer"),
        ({"fixed_seed": 3}, "n", "answers of the same request are equal"),
        ({"ignored_fields": {"response_format"}}, "response_format", "8 of 8 answers do not match"),
        ({"constrained": "broken"}, "response_format", "8 of 8 answers do not match"),
        ({"constrained": "broken"}, "regex", "8 of 8 answers do not match"),
        (
            {"ignored_fields": {"regex", "structured_outputs"}},
            "regex",
            "8 of 8 answers do not match",
        ),
        ({"ignored_fields": {"min_p"}}, "min_p", "are less likely than 0.3 of the likeliest"),
        ({"penalized": 0.0}, "presence_penalty", "as if it were ignored"),
        ({"penalized": 0.0}, "frequency_penalty", "as if it were ignored"),
        ({"penalized": 0.5}, "frequency_penalty", "as if half of it counted"),
        ({"penalized": 2.0}, "presence_penalty", "as if it were doubled"),
        (
            {"penalized_rounds": True},
            "frequency_penalty",
            "as if the tokens of earlier rounds counted",
        ),
    ],
)
def test_an_error_is_told_and_no_other_field_is_blamed(
    server: FakeServer, error: dict[str, Any], field: str, words: str
) -> None:
    server.manners = dataclasses.replace(server.manners, **error)
    outcomes, details, _ = examine(server)
    assert outcomes[field] == "failed" and words in details[field], details
    related = (
        {"presence_penalty", "frequency_penalty"}
        if "penalty" in field
        else {"response_format", "regex", field}
    )
    related |= {"max_tokens"} if field == "ignore_eos" else set()
    assert {name for name, outcome in outcomes.items() if outcome == "failed"} <= related, details


@pytest.mark.parametrize(
    "field",
    [
        "logit_bias",
        "min_tokens",
        "stop",
        "n",
        "response_format",
        "min_p",
        "presence_penalty",
        "ignore_eos",
    ],
)
def test_a_refused_field_is_refused_and_no_request_counts_as_failed(
    server: FakeServer, field: str
) -> None:
    server.manners.refused_fields = {field}
    outcomes, details, asker = examine(server)
    assert outcomes[field] == "refused", details
    assert "failed" not in outcomes.values(), details
    assert asker.failures == [] and asker.stopped == ""


def test_nothing_is_said_by_answers_without_texts_about_the_fields_that_change_texts(
    server: FakeServer,
) -> None:
    server.manners.writes_texts = False
    outcomes, details, _ = examine(server)
    fields = {"stop", "n", "response_format", "regex"}
    assert {name for name, outcome in outcomes.items() if outcome == "not run"} == {
        *fields,
        NEVER[0],
    }
    assert all(details[field] == "the answers have no texts" for field in fields), details
    assert "failed" not in outcomes.values(), details

    server.manners.ignored_fields = {"n"}
    assert examine(server)[1]["n"] == "n 4 gave 1 answer"  # which needs no texts


TOKENS_SHOW = {
    "logit_bias",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
}


@pytest.mark.parametrize("fields", [TOKENS_SHOW, {"logit_bias"}, {"min_tokens"}])
def test_nothing_is_said_by_answers_without_reports_about_the_fields_that_tokens_show(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, fields: set[str]
) -> None:
    complete = Client.complete

    def complete_silently(self: Client, prompt: Any, **values: Any) -> Completion:
        answer = complete(self, prompt, **values)
        return (
            dataclasses.replace(answer, reports=[], chunk_index=[])
            if fields & values.keys()
            else answer
        )

    monkeypatch.setattr(Client, "complete", complete_silently)
    outcomes, details, _ = examine(server)
    assert {name for name, outcome in outcomes.items() if outcome == "not run"} == {
        *fields,
        NEVER[0],
    }, details
    assert "failed" not in outcomes.values(), details


def test_nothing_is_said_by_constrained_answers_that_are_empty(server: FakeServer) -> None:
    server.manners.constrained = "empty"
    outcomes, details, _ = examine(server)
    assert outcomes["response_format"] == outcomes["regex"] == "not run"
    assert details["regex"] == "the answers have no texts"


def test_answers_that_are_cut_off_by_their_length_match_as_beginnings(server: FakeServer) -> None:
    server.manners.constrained = "cut"
    outcomes, details, _ = examine(server)
    assert outcomes["response_format"] == outcomes["regex"] == "passed"
    assert details["regex"].startswith("0 answers match") and details["regex"].endswith(
        "8 were cut off and match so far"
    )


def test_nothing_is_said_by_reports_after_the_fields(server: FakeServer) -> None:
    server.manners.processed = True
    outcomes, details, _ = examine(server)
    for field in ("min_p", "presence_penalty", "frequency_penalty"):
        assert outcomes[field] == "not run" and details[field].startswith(
            "the reports are those after"
        ), details


def test_nothing_is_said_where_no_answer_ends(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fake_server.END", -1)
    outcomes, details, _ = examine(server)
    assert outcomes["min_tokens"] == outcomes["ignore_eos"] == "not run"
    assert details["min_tokens"] == "no answer ended by itself"


@pytest.mark.parametrize(
    ("fault", "outcome", "words"),
    [
        (CORRECT, "failed", "sampled answers are as if it were ignored"),
        (
            FAULTS["every draft accepted"],
            "passed",
            "Sampled tokens do not follow their reports without it either",
        ),
    ],
)
def test_sampled_answers_are_blamed_for_a_penalty_only_if_they_are_right_without_it(
    fault: Fault, outcome: str, words: str
) -> None:
    with serving(FaultySampler(fault, vocab_size=16, sureness=0.0, error=2.0)) as server:
        client = Client(server.url)
        complete = client.complete

        def ignore(prompt: Any, **fields: Any) -> Completion:
            if fields["temperature"]:
                fields.pop("frequency_penalty", None)
            return complete(prompt, **fields)

        client.complete = ignore  # type: ignore[method-assign]
        outcomes, details, _ = examine(server, client)
    assert outcomes["frequency_penalty"] == outcome and words in details["frequency_penalty"]


def test_a_token_beyond_the_limit_is_told(server: FakeServer) -> None:
    server.manners.overshoot = 1
    outcomes, details, _ = examine(server)
    assert outcomes["max_tokens"] == "failed"
    assert details["max_tokens"] == "max_tokens 2 gave 3 tokens"


def test_a_server_that_fails_for_a_field_loses_no_other(server: FakeServer) -> None:
    client = Client(server.url)
    complete = client.complete

    def fail(prompt: Any, **fields: Any) -> Completion:
        if "n" in fields:
            raise ServerError("it is broken")
        return complete(prompt, **fields)

    client.complete = fail  # type: ignore[method-assign]
    outcomes, details, asker = examine(server, client)
    assert (outcomes.pop("n"), details["n"]) == ("not run", "it is broken")
    assert asker.failures == ["it is broken"] and not asker.stopped
    assert set(outcomes.values()) == {"passed", "not run"}


def test_an_interrupted_run_asks_nothing_more(server: FakeServer) -> None:
    asker = Asker(Client(server.url), PLAN, lambda message: None)
    asker.stopped = "interrupted"
    number = len(server.requests)
    findings = examine_fields(asker)
    assert len(server.requests) == number
    assert {
        (finding.outcome, finding.detail) for finding in findings if finding.name != NEVER[0]
    } == {("not run", "interrupted")}


def test_texts_in_place_of_ids_cannot_be_biased(server: FakeServer) -> None:
    server.manners.form = "texts"
    outcomes, details, _ = examine(server)
    assert (outcomes["logit_bias"], details["logit_bias"]) == ("not run", "token ids are not told")
    assert (
        outcomes["stop"] == outcomes["max_tokens"] == "passed" and "failed" not in outcomes.values()
    ), details
