"""The client of ``eagle3 certify`` against a local server: whole answers, or errors of one line."""

from __future__ import annotations

import concurrent.futures
import email.utils
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_server import UNREADABLE, FakeServer, serving
from faulty_sampler import FaultySampler

from eagle3_jax.certify import client as client_module
from eagle3_jax.certify.client import Client, parse_counters
from eagle3_jax.certify.source import Completion, Refused, ServerError

FIELDS = {"num_reported": 20, "max_tokens": 12, "temperature": 1.0, "seed": 3}
NOT_OPENAIS = {
    "return_token_ids", "return_tokens_as_token_ids", "ignore_eos", "min_tokens", "top_k", "min_p",
    "repetition_penalty",
}  # fmt: skip


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FaultySampler()) as running:
        yield running


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_WAIT", 0.02)


def written(server: FakeServer, prompt: int = 1, seed: int = 3) -> tuple[list[int], list[int]]:
    """What the sampler writes for ``FIELDS``."""
    tokens, chunk_index = server.sampler.answer(np.array([prompt]), 12, seed=seed)
    return tokens[0].tolist(), chunk_index[0].tolist()


def answers_at_once(client: Client, prompt: Any, number: int) -> list[Completion]:
    """The answers to a prompt with as many seeds, each asked for by a thread of its own."""
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        return list(
            pool.map(lambda seed: client.complete(prompt, **FIELDS | {"seed": seed}), range(number))
        )


def failure(act: Callable[[], Any], kind: type[ServerError] = ServerError) -> str:
    """The one line of an error."""
    with pytest.raises(kind) as raised:
        act()
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_an_answer_is_what_the_sampler_writes_and_its_reports_are_the_targets(
    server: FakeServer,
) -> None:
    answer = Client(server.url).complete([1], **FIELDS)
    assert (answer.tokens, answer.chunk_index) == written(server)
    assert (
        answer.prompt_ids == [1] and answer.finish_reason == "length" and answer.num_drafted is None
    )

    sampler = server.sampler
    distributions = [sampler.first[1], *sampler.target[1, answer.tokens[:-1]]]
    for report, distribution in zip(answer.reports, distributions, strict=True):
        expected = np.log(distribution)
        assert report.is_readable and report.log_prob == expected[report.token]
        assert (
            report.top == {token: expected[token] for token in report.top} and len(report.top) >= 20
        )


def test_a_key_is_not_sent_to_another_host(server: FakeServer) -> None:
    client = Client(server.url, key="sesame")
    with serving(server.sampler) as other_server:
        server.manners.redirect = other_server.url
        for message in (
            failure(lambda: client.complete([1], **FIELDS)),
            failure(lambda: Client(server.url, key="sesame")),
        ):
            assert f"redirects to {other_server.url};" in message
        assert other_server.keys == [] and other_server.requests == []


def test_a_proxy_of_the_environment_is_not_asked(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert Client(server.url).model == "fake"


def test_a_stream_that_drips_ends_with_the_time_of_the_request(server: FakeServer) -> None:
    client = Client(server.url, timeout=0.5)
    server.manners.drip = 0.05
    start = time.monotonic()
    assert "no answer in 0.5 s; raise --timeout" in failure(lambda: client.complete([1], **FIELDS))
    assert time.monotonic() - start < 30  # the whole stream would take minutes
    server.manners.drip = 0.0
    assert client.complete([1], **FIELDS).tokens == written(server)[0]


@pytest.mark.parametrize("status", [429, 502, 503, 529])
@pytest.mark.parametrize("retry_after", ["0", "soon", None, email.utils.formatdate(0), "nan"])
def test_a_busy_server_is_asked_again(
    server: FakeServer, status: int, retry_after: str | None
) -> None:
    server.manners.refusals = [status] * 5
    server.manners.retry_after = retry_after
    client = Client(server.url)
    assert client.complete([1], **FIELDS).tokens == written(server)[0]
    server.manners.refusals = [status] * 6
    assert f"answered {status}" in failure(lambda: client.complete([1], **FIELDS))


@pytest.mark.parametrize(
    ("retry_after", "attempt", "seconds"),
    [("7", 0, 7.0), ("3600", 0, 10.0), ("-1", 3, 0.0), (None, 2, 0.08)],
)
def test_the_wait_is_what_the_server_wants_up_to_ten_seconds(
    retry_after: str | None, attempt: int, seconds: float
) -> None:
    assert client_module._wait(retry_after, attempt) == seconds


def test_a_date_to_try_again_is_read() -> None:
    assert 4 < client_module._wait(email.utils.formatdate(time.time() + 6, usegmt=True), 0) <= 6


@pytest.mark.parametrize(
    ("status", "kind"), [(400, Refused), (422, Refused), (500, ServerError), (418, ServerError)]
)
def test_other_statuses_are_not_tried_again(
    server: FakeServer, status: int, kind: type[ServerError]
) -> None:
    client = Client(server.url)
    client.complete([1], **FIELDS)
    server.manners.refusals = [status, status]
    assert f"answered {status}" in failure(lambda: client.complete([1], **FIELDS), kind)
    assert isinstance(kind(""), Refused) or server.manners.refusals == [status]


def test_a_server_that_restarts_is_waited_for(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_FIRST_WAIT", 0.1)
    client = Client(server.url)
    server.restart(0.5)
    assert client.complete([1], **FIELDS).tokens == written(server)[0]


def test_a_server_that_never_answered_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_WAIT", math.inf)
    assert "no server answers at http://127.0.0.1:9" in failure(
        lambda: Client("http://127.0.0.1:9")
    )


def test_a_cut_stream_is_asked_for_again(server: FakeServer) -> None:
    server.manners.cut_every = 2
    client = Client(server.url)
    for seed in range(4):
        assert (
            client.complete([1], **FIELDS | {"seed": seed}).tokens == written(server, seed=seed)[0]
        )


def test_a_cut_stream_is_not_an_answer(server: FakeServer) -> None:
    server.manners.cut_every = 1
    client = Client(server.url)
    assert "cut off a stream before its end" in failure(lambda: client.complete([1], **FIELDS))
    assert server.answered == 6


def test_a_stream_that_lost_its_mark_is_cut(server: FakeServer) -> None:
    client = Client(server.url)
    client.complete([1], **FIELDS)
    server.manners.mangle = lambda data: data.removesuffix(b"data: [DONE]\n\n")
    assert "cut off a stream" in failure(lambda: client.complete([1], **FIELDS))
    # A server without such marks.
    assert Client(server.url).complete([1], **FIELDS).tokens == written(server)[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"<html>\n<h1>Welcome</h1></html>",
            "does not answer in JSON but '<html> <h1>Welcome</h1></html>'",
        ),
        (b"", "does not answer in JSON but ''"),
        (b"[1, 2]", "answered [1, 2]; expected a JSON object"),
        (b"{}", "answered {}; expected choices with a finish_reason"),
        (b'{"choices": {}}', "answered {} as choices; expected list"),
        (b'{"choices": [7]}', "answered 7 as a choice; expected an object"),
        (b'{"choices": [{"text": 7}]}', "answered 7 as text; expected str"),
        (
            b'{"choices": [{"text": "a", "logprobs": {"tokens": [7]}}]}',
            "answered 7 as a token; expected a text",
        ),
        (
            b'{"choices": [{"text": "a", "logprobs": {"content": ["a"]}}]}',
            "answered 'a' as a token",
        ),
        (b'{"error": {"message": "out of memory"}}', 'failed: {"message": "out of memory"}'),
        (b"[" * 100_000, "does not answer in JSON"),
        (b"data: {\n\n", "does not answer in JSON"),
        (b"data: {}\n\n<html>\n\n", "answered '<html>' in a stream"),
        (b'data: {"choices": []}\n\ndata: 5\n\n', "answered 5; expected a JSON object"),
    ],
)
def test_what_is_no_answer_is_shown(server: FakeServer, data: bytes, message: str) -> None:
    client = Client(server.url)
    server.manners.mangle = lambda _: data
    assert message in failure(lambda: client.complete([1], **FIELDS))


def mangled(data: bytes, rng: random.Random) -> bytes:
    """An answer with changed bytes, lines and values."""
    values: list[Any] = [
        None,
        7,
        -1e400,
        "a",
        [],
        {},
        [None],
        math.nan,
        {"token": 5},
        True,
        10**30,
        [[["a"]]],
    ]

    def change(value: Any) -> Any:
        if rng.random() < 0.03:
            return rng.choice(values)
        if isinstance(value, dict):
            return {name: change(entry) for name, entry in value.items() if rng.random() > 0.01}
        return [change(entry) for entry in value] if isinstance(value, list) else value

    if rng.random() < 0.3:
        position = rng.randrange(len(data))
        return (
            data[:position] + rng.randbytes(rng.randrange(4)) + data[position + rng.randrange(20) :]
        )
    lines = data.split(b"\n\n")
    changed = []
    for line in lines:
        is_event = line.startswith(b"data: {")
        changed.append(
            b"data: " + json.dumps(change(json.loads(line[6:]))).encode() if is_event else line
        )
    return b"\n\n".join(changed)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_no_mangled_answer_raises_anything_but_a_server_error(
    server: FakeServer, api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_RETRIES", 0)
    client = Client(server.url, api=api)
    rng = random.Random(0)
    server.manners.mangle = lambda data: mangled(data, rng)
    answers = []
    messages = []

    for seed in range(200):
        try:
            answers.append(client.complete("1", **FIELDS | {"seed": seed}))
        except ServerError as error:
            messages.append(str(error))

    assert answers and messages and not any("\n" in message for message in messages)
    assert all(len(answer.tokens) in (0, 12) for answer in answers)


@pytest.mark.parametrize("api", ["completions", "chat"])
@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_cannot_be_read_is_counted_and_not_judged(
    server: FakeServer, kind: str, api: Any
) -> None:
    server.manners.unreadable = kind
    answer = Client(server.url, api=api).complete("1", **FIELDS)
    tokens, chunk_index = written(server)
    assert answer.tokens == tokens
    assert [report.is_readable for report in answer.reports] == [
        index == 0 for index in chunk_index
    ]
    assert all(
        report.is_readable or (math.isnan(report.log_prob) and not report.top)
        for report in answer.reports
    )


def test_vllms_minus_infinity_stays(server: FakeServer) -> None:
    client = Client(server.url)
    choice = {"text": "a", "finish_reason": "stop", "index": 0}
    choice["logprobs"] = {
        "tokens": ["token_id:7"],
        "token_logprobs": [-9999.0],
        "top_logprobs": [{"token_id:7": -9999.0}],
    }
    server.manners.mangle = lambda _: json.dumps({"choices": [choice]}).encode()
    (report,) = client.complete([1], **FIELDS).reports
    assert report.is_readable and report.log_prob == -9999.0


@pytest.mark.parametrize("counts", [True, False])
def test_fewer_reports_than_tokens_are_refused(server: FakeServer, counts: bool) -> None:
    server.manners.leaves_out = True
    server.manners.counts = counts
    client = Client(server.url)
    assert "of the 12 tokens of an answer" in failure(lambda: client.complete([1], **FIELDS))


def test_a_text_that_ends_early_has_all_its_reports(server: FakeServer) -> None:
    server.manners.leaves_out = True
    client = Client(server.url)
    tokens, chunk_index = written(server)
    position = chunk_index.index(1)  # an accepted draft
    stop = "".join(f" {token}" for token in tokens[position - 1 : position + 1])
    assert f"reports {position} of the {position + 1} tokens" in failure(
        lambda: client.complete([1], stop=[stop], **FIELDS)
    )

    server.manners.leaves_out = False
    answer = client.complete([1], stop=[stop], **FIELDS)
    assert (
        answer.finish_reason == "stop"
        and answer.tokens == tokens[: position + 1]
        and stop not in answer.text
    )


def test_every_field_is_sent_at_its_neutral_value_and_the_callers_own_replace_them(
    server: FakeServer,
) -> None:
    client = Client(server.url)
    client.complete([1], **FIELDS)
    neutral = {"top_p": 1, "top_k": -1, "min_p": 0, "presence_penalty": 0, "frequency_penalty": 0}
    neutral |= {
        "repetition_penalty": 1,
        "min_tokens": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    assert neutral.items() <= server.requests[-1].items()

    client.complete([1], top_k=3, ignore_eos=False, presence_penalty=1.5, **FIELDS)
    assert {"top_k": 3, "ignore_eos": False, "presence_penalty": 1.5}.items() <= server.requests[
        -1
    ].items()
    assert "refused_fields" not in client.facts


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_fields_that_are_refused_are_left_out_and_named(server: FakeServer, api: Any) -> None:
    server.manners.refused_fields = {"return_token_ids", "min_p"}
    client = Client(server.url, api=api)
    answer = client.complete("1", **FIELDS)
    assert len(answer.reports) == 12
    shape = {"return_token_ids", "return_tokens_as_token_ids"}
    samplers = {"top_k", "min_p", "repetition_penalty"}
    # Not what is between these groups.
    assert client.facts["refused_fields"] == sorted(shape | samplers)

    number = len(server.requests)
    client.complete("1", **FIELDS)
    assert (
        len(server.requests) == number + 1
        and not server.manners.refused_fields & server.requests[-1].keys()
    )


def test_all_fields_that_are_not_openais_can_be_refused(server: FakeServer) -> None:
    server.manners.refused_fields = NOT_OPENAIS | {"max_tokens"}
    server.manners.chat_tokens = "bytes"
    client = Client(server.url, api="chat")
    answers = answers_at_once(client, "1", 32)
    assert set(client.facts["refused_fields"]) == server.manners.refused_fields
    assert server.requests[-1]["max_completion_tokens"] == 12

    for seed, answer in enumerate(answers):
        tokens = written(server, seed=seed)[0][: len(answer.tokens)]
        assert answer.text == "".join(f" {token}" for token in tokens if token)


@pytest.mark.parametrize("name", ["top_k", "min_p", "ignore_eos", "presence_penalty"])
def test_a_field_of_the_caller_is_never_left_out(server: FakeServer, name: str) -> None:
    server.manners.refused_fields = {name}
    client = Client(server.url)
    assert f"unknown: {name}" in failure(
        lambda: client.complete([1], **FIELDS, **{name: 1}), Refused
    )
    assert "refused_fields" not in client.facts
    assert all(name in request for request in server.requests)


def test_a_request_that_is_refused_for_itself_leaves_fields_as_they_were(
    server: FakeServer,
) -> None:
    client = Client(server.url)
    client.complete([1], **FIELDS)
    server.manners.refused_fields = {"seed"}
    assert "unknown: seed" in failure(lambda: client.complete([1], **FIELDS), Refused)
    server.manners.refused_fields = set()
    client.complete([1], **FIELDS)
    assert "refused_fields" not in client.facts and server.requests[-1].keys() >= NOT_OPENAIS


@pytest.mark.parametrize("names", ["ids", "bytes", "texts"])
def test_a_chat_reports_what_a_completion_does(server: FakeServer, names: str) -> None:
    """Tokens of equal texts, such as parts of a character, are told apart by their bytes."""
    expected = Client(server.url).complete("1", **FIELDS)
    server.manners.chat_tokens = names
    client = Client(server.url, api="chat")
    answer = client.complete("1", **FIELDS)
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "1"}]
    assert answer.text == expected.text and answer.chunk_index == expected.chunk_index
    assert [report.log_prob for report in answer.reports] == [
        report.log_prob for report in expected.reports
    ]

    ids: dict[int, int] = {}
    for report, expected_report in zip(answer.reports, expected.reports, strict=True):
        assert sorted(report.top.values()) == sorted(expected_report.top.values())
        assert report.top[report.token] == report.log_prob
        assert (report.token >= 0) == (names == "ids")
        assert ids.setdefault(report.token, expected_report.token) == expected_report.token


def test_what_a_chat_cannot_do_is_one_line(server: FakeServer) -> None:
    client = Client(server.url, api="chat")
    assert client.scoring == "none"
    assert "a chat takes texts, not token ids" in failure(lambda: client.complete([1], **FIELDS))
    answer = client.complete("1", **FIELDS)
    message = "a chat cannot be continued from given tokens"
    assert message in failure(lambda: client.score("1", answer, num_reported=20), Refused)


def test_reasoning_is_no_part_of_the_answer(server: FakeServer) -> None:
    client = Client(server.url, api="chat")
    expected = client.complete("1", **FIELDS)
    assert "reasoning" not in client.facts
    server.manners.reasons = True
    assert client.complete("1", **FIELDS) == expected
    assert client.facts["reasoning"] is True


def test_a_server_that_only_chats_says_so(server: FakeServer) -> None:
    server.manners.completes = False
    client = Client(server.url)
    message = failure(lambda: client.complete([1], **FIELDS))
    assert "has no /v1/completions; try --api chat" in message


def test_a_gateway_without_a_list_of_models_needs_a_name(server: FakeServer) -> None:
    server.manners.lists_models = False
    assert "name the model with --model" in failure(lambda: Client(server.url))
    assert Client(server.url, model="fake").complete([1], **FIELDS).tokens == written(server)[0]


def test_a_key_that_is_wanted_or_refused_is_not_shown(server: FakeServer) -> None:
    server.manners.key = "sesame"
    message = (
        "wants a key: put it into the environment variable MY_KEY, or name another with"
        " --api-key-env"
    )
    assert message in failure(lambda: Client(server.url, key_variable="MY_KEY"))
    # The server repeats a wrong key.
    shown = failure(lambda: Client(server.url, key="open-barley", key_variable="MY_KEY"))
    assert message in shown and "barley" not in shown

    client = Client(server.url, key="sesame")
    client.complete([1], **FIELDS)
    assert "sesame" not in repr(client) + json.dumps(client.facts)
    assert "sesame" not in failure(lambda: Client(server.url, key="ses\name"))
    assert "sesame" not in failure(lambda: Client("http://user:sesame@localhost:8000"))


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://x", "http://", "http://[::1", "http://a/?b=c", ""]
)
def test_what_is_no_address_is_one_line(url: str) -> None:
    assert "is not the address of a server" in failure(lambda: Client(url))


def test_several_answers_are_kept_apart(server: FakeServer) -> None:
    client = Client(server.url)
    expected = [client.complete([1], **FIELDS | {"seed": 3 + index}) for index in range(3)]
    answer = client.complete([1], n=3, **FIELDS)
    assert answer.reports == expected[0].reports and answer.chunk_index == expected[0].chunk_index
    assert (answer.text, *answer.more_texts) == tuple(choice.text for choice in expected)


@pytest.mark.parametrize("echoes", [True, False])
@pytest.mark.parametrize("refused", [set(), {"cache_salt"}])
def test_scores_are_the_targets_and_read_no_shared_cache(
    server: FakeServer, echoes: bool, refused: set[str]
) -> None:
    server.manners.echoes = echoes
    server.manners.refused_fields = refused
    client = Client(server.url)
    answer = client.complete([1], **FIELDS | {"temperature": 0.0})
    assert client.score([1], answer, num_reported=20) == answer.reports
    assert client.scoring == ("echo" if echoes else "prefixes")
    assert client.facts.get("refused_fields", []) == sorted(refused)

    server.requests.clear()
    client.score([1], answer, num_reported=20)
    salts = [request.get("cache_salt") for request in server.requests]
    assert len(salts) == (1 if echoes else 12)
    assert len(set(salts)) == (1 if refused else len(salts)) and (None in salts) == bool(refused)


def test_an_answer_without_reports_behind_a_prefix_is_an_error(server: FakeServer) -> None:
    server.manners.echoes = False
    client = Client(server.url)
    answer = client.complete([1], **FIELDS)
    server.manners.reports = False
    assert "reports nothing about the token behind a prefix" in failure(
        lambda: client.score([1], answer, num_reported=20)
    )


def test_llama_cpp_is_asked_for_what_it_withholds_and_told_all_of_its_samplers(
    server: FakeServer,
) -> None:
    server.manners.form = "llama.cpp"
    client = Client(server.url)
    assert client.facts == {
        "model": "fake",
        "max_model_len": 512,
        "version": "0.0.fake",
        "build_info": "b1-fake",
    }
    answer = client.complete("1", repetition_penalty=1.2, **FIELDS)
    request = next(request for request in server.requests if "prompt" in request)
    assert (
        request["repeat_penalty"] == 1.2
        and "penalties" in request["samplers"]
        and request["mirostat"] == 0
    )

    answer = client.complete("1", **FIELDS)
    tokens, chunk_index = written(server)
    assert answer.tokens == tokens and all(report.is_readable for report in answer.reports)
    assert answer.num_drafted == np.count_nonzero(chunk_index)

    server.requests.clear()
    assert client.score("1", answer, num_reported=20) == answer.reports
    assert client.scoring == "echo" or all(
        request["cache_prompt"] is False for request in server.requests[1:]
    )


def test_the_counters_are_those_of_the_rounds(server: FakeServer) -> None:
    client = Client(server.url)
    before = client.counters()
    assert before["num_drafts"] == 0
    for seed in range(8):
        client.complete([1], **FIELDS | {"seed": seed})
    chunk_indices = [written(server, seed=seed)[1] for seed in range(8)]
    counters = client.counters()
    assert counters["num_drafts"] == sum(chunk_index[1:].count(0) for chunk_index in chunk_indices)
    assert counters["num_accepted_tokens_per_pos"] == [
        sum(chunk_index.count(position + 1) for chunk_index in chunk_indices)
        for position in range(3)
    ]


def test_sglang_counts_rounds() -> None:
    text = 'sglang:spec_verify_calls_total{model_name="m"} 40.0\nsglang:spec_accept_length 2.5\n'
    assert parse_counters(text) == {"num_drafts": 40}


def test_hundreds_of_threads_share_a_client(server: FakeServer) -> None:
    answers = answers_at_once(Client(server.url), [1], 200)
    for seed, answer in enumerate(answers):
        assert answer.tokens == written(server, seed=seed)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 0.3},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {"9": 100}},
        {"min_tokens": 12, "ignore_eos": False},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_field_that_is_ignored_changes_what_is_written(
    server: FakeServer, fields: dict[str, Any]
) -> None:
    """The server itself: tests of honest servers and of others rest on this."""
    client = Client(server.url)
    name, *_ = fields

    def texts() -> list[str]:
        seeds = range(16)
        return [client.complete([1], **FIELDS | {"seed": seed} | fields).text for seed in seeds]

    honest = texts()
    server.manners.ignored_fields = {name}
    ignoring = texts()
    assert honest != ignoring
    if name == "logit_bias":
        assert set(honest) == {" 9" * 12}
    if name == "min_tokens":
        assert all(len(text.split()) == 12 for text in honest) and any(
            len(text.split()) < 12 for text in ignoring
        )
