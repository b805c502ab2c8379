"""The server writes what `generate` writes, over HTTP, whatever its clients do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax.cli import run
from eagle3_jax.engine.engine import Engine
from eagle3_jax.types import SamplingMode

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from server_client import JSON_BODY, Answer, complete, decoder, events_of, generated, get, post

from eagle3_jax.cli._decoding import DraftOptions
from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import ModelOptions
from eagle3_jax.cli.serve import ServerOptions, _bind, _described, _hosts
from eagle3_jax.server.local import serving

PROMPTS = [
    "def add(a, b):\n",
    "import",
    "class Queue:\n",
    "x = [",
    '"""Reads a file line by line, and ',
    "for",
]


@functools.cache
def tiny_decoder() -> e3.SpeculativeDecoder:
    return e3.SpeculativeDecoder(tiny.target(13))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(decoder(), slots=4, capacity=64, logprobs=20, max_queue=64) as address:
        yield address


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    """One slot, no queue, greedy only, no log-probabilities, no tokenizer, no chat template."""
    options = {
        "slots": 1,
        "capacity": 400,
        "max_queue": 0,
        "chunk": 24,
        "sampling_mode": SamplingMode.GREEDY,
    }
    with serving(tiny_decoder(), **options) as address:
        yield address


def counters(url: str) -> dict[str, float]:
    lines = re.findall(r"^vllm:(\w+)\{(.*?)\} (\S+)$", get(f"{url}/metrics"), re.M)
    values = {}
    for name, labels, value in lines:
        others = re.sub(r'model_name="[^"]*"|engine="0"|,', "", labels)
        values[f"{name}{others}"] = float(value)
    return values


def counters_at_rest(url: str) -> dict[str, float]:
    """Returns the counters when no request waits or runs."""
    for _ in range(600):
        values = counters(url)
        if values["num_requests_running"] + values["num_requests_waiting"] == 0:
            return values
        time.sleep(0.1)
    raise AssertionError("requests run for a minute")


def requests() -> list[Answer]:
    fields = []
    for number, prompt in enumerate(PROMPTS):
        sampled = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": number}
        choice = sampled if number % 2 else {"temperature": 0}
        fields.append({"prompt": prompt, "max_tokens": 1 + 6 * number, **choice})
    return fields


@pytest.mark.parametrize("streams", [False, True])
def test_every_text_is_that_of_generate(url: str, streams: bool) -> None:
    def answer(fields: Answer) -> Answer:
        if not streams:
            return complete(url, **fields)
        options = {"return_token_ids": True, "stream_options": {"include_usage": True}}
        *chunks, last = events_of(url, fields | options)
        assert last["choices"] == []
        choices = [chunk["choices"][0] for chunk in chunks]
        assert len(choices[0]["token_ids"]) == 1  # the prefill's token
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        joined = {"text": "".join(choice["text"] for choice in choices), "usage": last["usage"]}
        joined["token_ids"] = [token for choice in choices for token in choice["token_ids"]]
        return choices[-1] | joined | {"prompt_token_ids": choices[0]["prompt_token_ids"]}

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(answer, requests()))
    for fields, choice in zip(requests(), answers, strict=True):
        expected = generated(fields)
        assert (choice["text"], choice["token_ids"]) == (expected.text, expected.tokens)
        assert choice["prompt_token_ids"] == expected.prompt_tokens
        assert choice["finish_reason"] == expected.finish_reason.name.lower()
        num_prompt = len(expected.prompt_tokens)
        num_new = len(expected.tokens)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }
        assert choice["usage"] == usage


def test_a_prompt_of_token_ids_and_the_defaults_of_openai(url: str) -> None:
    prompt = decoder().target.encode("import os\n")
    expected = complete(url, prompt="import os\n", seed=5, temperature=1.0, max_tokens=16)
    assert expected["usage"]["completion_tokens"] == 16
    for form in (prompt, [prompt], ["import os\n"]):
        assert complete(url, prompt=form, seed=5)["token_ids"] == expected["token_ids"]
    without_seed = {complete(url, prompt=prompt, temperature=1.5)["text"] for _ in range(3)}
    assert len(without_seed) > 1


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_are_those_of_generate(url: str, streams: bool) -> None:
    fields = {
        "prompt": "def add(a, b):\n",
        "max_tokens": 12,
        "temperature": 0.8,
        "seed": 3,
        "logprobs": 2,
    }
    fields["return_tokens_as_token_ids"] = True

    choices = [complete(url, **fields)]
    if streams:
        choices = [chunk["choices"][0] for chunk in events_of(url, fields)]

    expected = generated(fields, logprobs=2)

    columns = {}
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        columns[name] = [value for choice in choices for value in choice["logprobs"][name]]
    assert columns["tokens"] == [f"token_id:{token}" for token in expected.tokens]

    assert expected.logprobs is not None

    for token, logprob, top, score in zip(
        expected.tokens,
        columns["token_logprobs"],
        columns["top_logprobs"],
        expected.logprobs,
        strict=True,
    ):
        assert logprob == pytest.approx(score.logprob, abs=1e-4)
        likeliest = dict(score.top) | {token: score.logprob}
        assert top == pytest.approx(
            {f"token_id:{key}": value for key, value in likeliest.items()}, abs=1e-4
        )

    texts = [
        decoder().target.tokenizer.decode(expected.tokens[:count])
        for count in range(len(expected.tokens))
    ]
    assert columns["text_offset"] == [len(text) for text in texts]


@pytest.mark.parametrize("limit", [0, 3])
def test_an_echo_scores_the_prompt_as_one_forward_of_the_target_does(url: str, limit: int) -> None:
    text = "def add(a, b):\n    return a + b\n"
    fields = {"prompt": text, "max_tokens": limit, "temperature": 0, "logprobs": 3, "echo": True}

    choice = complete(url, **fields, return_tokens_as_token_ids=True)
    tokens = decoder().target.encode(text)
    written = generated(fields).tokens if limit else []

    assert choice["token_ids"] == [*tokens, *written]
    assert choice["text"] == text + (decoder().target.tokenizer.decode(written) if written else "")
    assert choice["usage"]["completion_tokens"] == limit
    assert choice["finish_reason"] == "length"

    target = decoder().target
    logits, _ = tiny.forward(target.model, target.params, np.array([[*tokens, *written]], np.int32))
    scores = np.asarray(jax.nn.log_softmax(logits[0]))

    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None

    for position, token in enumerate([*tokens, *written][1:]):
        assert logprobs["token_logprobs"][position + 1] == pytest.approx(
            scores[position, token], abs=1e-3
        )
        top = logprobs["top_logprobs"][position + 1]
        likeliest = {f"token_id:{index}" for index in np.argsort(-scores[position])[:3]}
        assert set(top) == likeliest | {f"token_id:{token}"}

    assert logprobs["text_offset"][1] == len(target.tokenizer.decode(tokens[:1]))


def test_an_echo_without_log_probabilities_is_the_text(url: str) -> None:
    fields = {"prompt": "import os\n", "max_tokens": 4, "temperature": 0, "echo": True}
    expected = generated(fields)
    texts = [event["choices"][0]["text"] for event in events_of(url, fields)]
    assert texts[0] == "import os\n"
    assert "".join(texts[1:]) == expected.text


def test_a_stop_text_across_chunks_ends_the_text_before_it(url: str) -> None:
    fields = {"prompt": "class Queue:\n", "max_tokens": 40, "temperature": 0}

    chunks = [event["choices"][0]["text"] for event in events_of(url, fields)]
    text = "".join(chunks)
    tokens = generated(fields).tokens
    tokenizer = decoder().target.tokenizer

    tried = 0

    for number in range(2, 8):
        border = len("".join(chunks[:number]))
        stop = text[border - 2 : border + 2]
        if text.index(stop) != border - 2:
            continue

        tried += 1
        complete_at = [
            count for count in range(len(tokens) + 1) if stop in tokenizer.decode(tokens[:count])
        ]
        streamed = [
            event["choices"][0] for event in events_of(url, fields | {"stop": ["\0", stop]})
        ]

        assert "".join(choice["text"] for choice in streamed) == text[: border - 2]
        choice = complete(url, **fields, stop=stop)
        assert choice["text"] == text[: border - 2]
        assert choice["token_ids"] == tokens[: complete_at[0]]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["usage"]["completion_tokens"] == complete_at[0]

    assert tried >= 2


def test_metrics_are_the_counters_of_generate(url: str) -> None:
    # A round may still run of a request that a stop text ended; after this request all rounds of
    # earlier ones are counted.
    complete(url, prompt="def", max_tokens=1, temperature=0)

    before = counters_at_rest(url)

    stats = []
    for fields in requests():
        complete(url, **fields)
        stats.append(generated(fields))

    after = counters_at_rest(url)
    gains = {name: after[name] - before[name] for name in after}

    merged = e3.SpeculationStats.merge(row.stats for row in stats)
    assert gains["spec_decode_num_drafts_total"] == merged.num_drafts
    assert gains["spec_decode_num_draft_tokens_total"] == merged.num_draft_tokens
    assert gains["spec_decode_num_accepted_tokens_total"] == merged.num_accepted_tokens

    for position, count in enumerate(merged.num_accepted_tokens_per_pos):
        assert gains[f'spec_decode_num_accepted_tokens_per_pos_totalposition="{position}"'] == count

    assert gains["generation_tokens_total"] == sum(len(row.tokens) for row in stats)
    assert gains["prompt_tokens_total"] == sum(len(row.prompt_tokens) for row in stats)

    ended = {
        reason: gains[f'request_success_totalfinished_reason="{reason}"']
        for reason in ("stop", "length")
    }
    reasons = [row.finish_reason.name.lower() for row in stats]
    assert ended == {"stop": reasons.count("stop"), "length": reasons.count("length")}

    assert (
        gains["time_to_first_token_seconds_count"]
        == gains["e2e_request_latency_seconds_count"]
        == len(stats)
    )
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0


def test_the_page_names_the_metrics_that_exist(url: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "serving.md"
    named = set(re.findall(r"vllm:\w+", page.read_text(encoding="utf-8")))
    exist = set(
        re.findall(r"^# TYPE (vllm:\w+?)(?:_total|_created)? ", get(f"{url}/metrics"), re.M)
    )
    assert named == exist


def leave(url: str, body: Answer) -> None:
    """Sends a request, and leaves when it runs; a stream after the first bytes of the answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), JSON_BODY)
    if body["stream"]:
        connection.getresponse().read(20)
    else:
        while counters(url)["num_requests_running"] == 0:
            time.sleep(0.01)
    connection.close()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_slot_and_its_rounds_count(url: str, streams: bool) -> None:
    before = counters_at_rest(url)
    body = {
        "prompt": "def",
        "max_tokens": 50,
        "stream": streams,
        "temperature": 0,
        "ignore_eos": True,
    }

    for _ in range(6):  # more than there are slots
        leave(url, body)
    after = counters_at_rest(url)

    name = 'request_success_totalfinished_reason="abort"'
    assert after[name] - before[name] == 6

    tokens = after["generation_tokens_total"] - before["generation_tokens_total"]
    drafts = after["spec_decode_num_drafts_total"] - before["spec_decode_num_drafts_total"]
    assert tokens < 6 * 50
    assert 0 < drafts < tokens
    assert complete(url, **requests()[2])["text"] == generated(requests()[2]).text


def test_a_slow_reader_does_not_hold_up_the_others(url: str) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = {"prompt": "def", "max_tokens": 50, "stream": True, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON_BODY)

    fields = requests()[4]
    assert complete(url, **fields)["text"] == generated(fields).text

    lines = connection.getresponse().read().decode()
    texts = [
        json.loads(line[6:])["choices"][0]["text"]
        for line in lines.split("\n\n")
        if '"choices"' in line
    ]

    unstopped = e3.SpeculativeDecoder(decoder().target, stop_tokens=())
    assert "".join(texts) == unstopped.generate("def", max_new_tokens=50).texts[0]


def test_two_hundred_requests_at_once_are_answered_or_refused(url: str) -> None:
    fields = {"prompt": "import", "max_tokens": 4, "temperature": 0}
    expected = generated(fields).text
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda _: post(url, fields), range(200)))
    texts = [answer["choices"][0]["text"] for status, answer in answers if status == 200]
    assert texts == [expected] * len(texts) and len(texts) >= 68
    errors = [answer["error"] for status, answer in answers if status != 200]
    assert all(
        error["code"] == 503 and error["type"] == "ServiceUnavailableError" for error in errors
    )


BAD = [
    (b"", None, 400),
    (b"{", None, 400),
    (b"[]", None, 400),
    (b'{"prompt": "x", "temperature": NaN}', None, 400),
    (b"[" * 100_000, None, 400),
    (b"\xff", None, 400),
    ({}, "prompt", 400),
    ({"prompt": ""}, "prompt", 400),
    ({"prompt": ["a", "b"]}, "prompt", 400),
    ({"prompt": [4096]}, "prompt", 400),
    ({"prompt": [True]}, "prompt", 400),
    ({"prompt": {"a": 1}}, "prompt", 400),
    ({"prompt": "x" * 1_000_000}, "prompt", 400),
    ({"prompt": "x", "model": "gpt"}, "model", 404),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", 400),
    ({"prompt": "x", "max_tokens": 10**30}, "max_tokens", 400),
    ({"prompt": "x", "max_tokens": "7"}, "max_tokens", 400),
    ({"prompt": "x", "max_tokens": True}, "max_tokens", 400),
    ({"prompt": "x", "temperature": -1}, "temperature", 400),
    ({"prompt": "x", "temperature": 1e300}, "temperature", 400),
    ({"prompt": "x", "top_p": 0}, "top_p", 400),
    ({"prompt": "x", "seed": 1.5}, "seed", 400),
    ({"prompt": "x", "logprobs": 21}, "logprobs", 400),
    ({"prompt": "x", "logprobs": -1}, "logprobs", 400),
    ({"prompt": "x", "stop": ["a"] * 5}, "stop", 400),
    ({"prompt": "x", "stop": [""]}, "stop", 400),
    ({"prompt": "x", "stream_options": {}}, "stream_options", 400),
    ({"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}}, "include_usage", 400),
    ({"prompt": "x", "stream": True, "stream_options": {"other": 1}}, "other", 400),
    ({"prompt": "x", "n": 2}, "n", 400),
    ({"prompt": "x", "n": True}, "n", 400),
    ({"prompt": "x", "min_p": False}, "min_p", 400),
    ({"prompt": "x", "use_beam_search": 0}, "use_beam_search", 400),
    ({"prompt": "\ud800"}, None, 400),
    ({"prompt": "x", "user": {"\ud800": 1}}, None, 400),
    ({"\ud800": 1}, None, 400),
    ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty", 400),
    ({"prompt": "x", "tools": [{"type": "function"}]}, "tools", 400),
    ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format", 400),
    ({"prompt": "x", "guided_json": {}}, "guided_json", 400),
]


@pytest.mark.parametrize(("body", "param", "status"), BAD)
def test_a_bad_request_is_refused_with_its_field(
    url: str, body: Any, param: str | None, status: int
) -> None:
    actual, answer = post(url, body)
    assert actual == status
    assert answer["error"]["param"] == param and answer["error"]["code"] == status
    assert answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_a_deep_value_is_refused(url: str) -> None:
    """Python's limit is that of the stack, so some depth is read and cannot be printed."""
    for depth in range(880, 1000, 8):
        status, answer = post(url, b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}")
        assert status == 400 and answer["error"]["message"]


def test_values_that_change_nothing_pass(url: str) -> None:
    neutral = {
        "n": 1,
        "repetition_penalty": 1.0,
        "logprobs": None,
        "stop": None,
        "presence_penalty": 0,
        "user": "me",
    }
    neutral |= {
        "min_p": 0.0,
        "logit_bias": {},
        "best_of": 1,
        "suffix": None,
        "tools": [],
        "model": "eagle3",
    }

    neutral["model"] = json.loads(get(f"{url}/v1/models"))["data"][0]["id"]

    fields = requests()[2]
    assert complete(url, **fields, **neutral)["text"] == generated(fields).text

    huge = complete(url, **fields | {"top_k": 10**30, "seed": -1, "temperature": 1e-300})
    assert huge["text"] == generated(fields).text


@pytest.mark.parametrize("size", [2_000_000, 50_000_000])
def test_a_large_body_is_refused(url: str, size: int) -> None:
    status, answer = post(url, json.dumps({"prompt": [1] * (size // 3)}).encode())
    assert status == 413 and "more than 1048576 bytes" in answer["error"]["message"]


def test_unknown_paths_and_methods_are_errors_in_json(url: str) -> None:
    assert post(url, {}, "/v1/embeddings")[0] == 404
    status, answer = post(url, {}, "/health")
    assert status == 405 and answer["error"]["message"]


def test_the_server_tells_about_itself(url: str) -> None:
    assert get(f"{url}/health") == ""
    assert json.loads(get(f"{url}/version")) == {"version": f"eagle3-jax {e3.__version__}"}
    (model,) = json.loads(get(f"{url}/v1/models"))["data"]
    assert model["id"] == decoder().target.name and model["max_model_len"] == 60


def test_the_server_is_certified(url: str) -> None:
    from eagle3_jax.certify.asking import Plan
    from eagle3_jax.certify.certificate import Verdict
    from eagle3_jax.certify.client import Client
    from eagle3_jax.certify.examine import certify

    client = Client(url)
    prompts = [decoder().target.encode(prompt) for prompt in PROMPTS]
    plan = Plan(prompts=prompts, num_requests=32, num_long=12, num_greedy=4, max_new_tokens=16)
    certificate = certify(client, plan)
    # So few requests see too little for a verdict, and nothing else is missing.
    assert certificate.verdict is Verdict.INCONCLUSIVE, certificate.reason
    unmet = {requirement.name for requirement in certificate.requirements if not requirement.is_met}
    assert unmet == {"greedy tokens", "first tokens", "sight"}
    assert client.scoring == "echo"
    assert "The same seed wrote the same text in 4 of 4 requests." in certificate.notes


QUESTION = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "def add"}, {"type": "text", "text": "(a, b):"}],
    }
]
CHAT = "/v1/chat/completions"


def test_a_chat_is_the_completion_of_the_rendered_conversation(url: str) -> None:
    fields = {
        "prompt": decoder().target.encode("def add(a, b):\n"),
        "max_tokens": 8,
        "temperature": 0,
    }

    expected = generated(fields)
    body = {"messages": QUESTION, "max_completion_tokens": 8, "temperature": 0}

    status, answer = post(url, body, CHAT)
    assert status == 200 and answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    assert answer["usage"]["prompt_tokens"] == len(fields["prompt"])

    chunks = events_of(url, body, CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] for delta in deltas) == expected.text
    assert deltas[0]["role"] == "assistant" and "role" not in deltas[1]
    assert chunks[0]["object"] == "chat.completion.chunk"

    unlimited = complete(url, **fields | {"max_tokens": 60 - len(fields["prompt"])})
    status, answer = post(url, body | {"max_completion_tokens": None}, CHAT)
    assert answer["choices"][0]["message"]["content"] == unlimited["text"]


def test_a_developer_is_the_system_and_empty_fields_are_absent(url: str) -> None:
    answers = [
        post(url, {"messages": messages, "temperature": 0, "max_tokens": 4}, CHAT)
        for messages in (
            [{"role": "system", "content": "def"}],
            [{"role": "developer", "content": "def", "name": None}],
        )
    ]
    assert [status for status, _ in answers] == [200, 200]
    system, developer = (answer["choices"] for _, answer in answers)
    assert system == developer


def test_log_probabilities_of_a_chat_have_their_own_form(url: str) -> None:
    fields = {"max_tokens": 3, "temperature": 0}
    body = {"messages": QUESTION, "logprobs": True, "top_logprobs": 2, **fields}
    status, answer = post(url, body, CHAT)
    assert status == 200

    content = answer["choices"][0]["logprobs"]["content"]
    assert (
        "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    )
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)

    completed = complete(url, prompt="def add(a, b):\n", logprobs=2, **fields)
    assert [entry["logprob"] for entry in content] == completed["logprobs"]["token_logprobs"]


# A server with one slot


def test_a_prompt_in_chunks_to_a_target_without_tokenizer(small: str) -> None:
    prompt = [number % 13 for number in range(70)]
    choice = complete(small, prompt=prompt, max_tokens=20, temperature=0)
    assert choice["token_ids"] == tiny_decoder().generate(prompt, max_new_tokens=20).tokens[0]
    assert choice["text"] == ""


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        (
            {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2},
            CHAT,
            "start it with --logprob",
        ),
        (
            {"messages": QUESTION, "temperature": 0},
            CHAT,
            "has no chat template; use /v1/completions",
        ),
        (
            {"prompt": [1], "temperature": 0, "logprobs": 1},
            "/v1/completions",
            "start it with --logprobs 1",
        ),
        (
            {"prompt": [1], "temperature": 1},
            "/v1/completions",
            "the server chose it with --sampling",
        ),
        ({"prompt": "x", "temperature": 0}, "/v1/completions", "has no tokenizer"),
        ({"prompt": [1], "temperature": 0, "stop": "x"}, "/v1/completions", "has no tokenizer"),
    ],
)
def test_a_server_says_what_it_cannot_do(small: str, body: Answer, path: str, message: str) -> None:
    status, answer = post(small, body, path)
    assert status == 400 and message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [{"role": "judge", "content": "x"}]}, "has the role 'judge'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "has a part that is not text",
        ),
        ({"messages": QUESTION, "echo": True}, "'echo' is not supported"),
        ({"messages": QUESTION, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({"messages": QUESTION, "logprobs": False, "top_logprobs": 0}, "needs logprobs"),
        (
            {"messages": [{"role": "user", "content": "x", "name": "Ann"}]},
            "message 1 has 'name', which is not supported",
        ),
    ],
)
def test_a_bad_conversation_is_refused(url: str, body: Answer, message: str) -> None:
    status, answer = post(url, body, CHAT)
    assert status == 400 and message in answer["error"]["message"]


def test_a_full_server_says_when_to_come_back(small: str) -> None:
    body = {"prompt": [1, 2], "max_tokens": 390, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: post(small, body), range(6)))
    statuses = sorted(status for status, _ in answers)
    assert statuses[0] == 200 and statuses[-1] == 503


def test_a_failing_engine_fails_its_requests_and_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = Engine._begin_group

    def fail(engine: Engine) -> None:
        if len(engine._waiting[0].request.tokens) == 3:
            raise ArithmeticError("lost the device")
        ticks(engine)

    monkeypatch.setattr(Engine, "_begin_group", fail)
    statuses = []

    def ask() -> None:
        with serving(e3.SpeculativeDecoder(tiny.target(13)), slots=2, capacity=24) as address:
            for prompt in ([1, 2], [1, 2, 3]):
                statuses.append(post(address, {"prompt": prompt, "max_tokens": 2}))

    with pytest.raises(ArithmeticError, match="lost the device"):
        ask()
    assert [status for status, _ in statuses] == [200, 500]
    assert (
        "the engine failed: ArithmeticError: lost the device" in statuses[1][1]["error"]["message"]
    )


# The command


@contextlib.contextmanager
def serving_command(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields a process of the command with a small target, and its address when ready."""
    (folder / "mine.py").write_text(
        "import tiny\n\ndef target(argument, *, dtype):\n    return tiny.target(13)\n"
    )

    words = [
        sys.executable, "-m", "eagle3_jax", "serve", "--target", "mine:target", "--drafter", "none",
    ]  # fmt: skip
    words += ["--port", "0", "--capacity", "512", "--slots", "1", "--chunk", "32"]

    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    with subprocess.Popen(words, **pipes, text=True, cwd=folder, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("mine:target is ready at http://127.0.0.1:")
        assert process.stdout.readline() == "1 slot; float32, weights dense; no drafter\n"
        yield process, line.split()[-1].removeprefix("http://")


def begin_long_stream(address: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(address, timeout=60)
    body = {"prompt": [1, 2], "max_tokens": 500, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON_BODY)
    response = connection.getresponse()
    response.read(10)
    return response


def test_a_signal_ends_the_server_after_its_requests(tmp_path: Path) -> None:
    with serving_command(tmp_path) as (process, address):
        idle = http.client.HTTPConnection(address, timeout=60)
        idle.connect()
        response = begin_long_stream(address)

        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        with contextlib.suppress(OSError, http.client.HTTPException):  # it may have ended already
            idle.request("GET", "/health")
            refusal = idle.getresponse()
            assert (refusal.status, refusal.headers["Retry-After"]) == (503, "1")

        lines = response.read().decode()
        assert lines.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in lines
        assert process.wait(60) == 0


def test_a_second_ctrl_c_ends_the_server_without_a_traceback(tmp_path: Path) -> None:
    with serving_command(tmp_path) as (process, address):
        response = begin_long_stream(address)
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.02)
        assert process.wait(60) == 0
        assert process.stderr is not None
        for number, line in enumerate(process.stderr.read().splitlines(), 1):
            assert re.fullmatch(rf"{number} of 8(, about .* left)?: compiled .* in \d+\.\d s", line)
        response.close()


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert run(["serve", "--port", str(listener.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert "address already in use; choose another port" in error and error.count("\n") == 1


def test_a_port_is_taken_while_the_models_load_and_free_after_the_end() -> None:
    with _bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Misuse, match=f"--port {port}: address already in use"):
            _bind("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port)) as client:
            # The side that closes first keeps the address for a while.
            listener.accept()[0].close()
            assert client.recv(1) == b""
    _bind("127.0.0.1", port).close()


def test_a_schedule_is_described_by_rows() -> None:
    lists = "[[1, 2, 3], [3, 8, 1]]"
    schedule = e3.SpeculationSchedule.from_lists(json.loads(lists))
    decoder = e3.SpeculativeDecoder(tiny.target(13), e3.drafters.NGram(3), schedule=schedule)
    lengths = _described(decoder, ModelOptions(), DraftOptions(schedule=lists), 4)
    assert lengths == "NGram, K=3 for up to 2 rows, K=1 for up to 4 rows"


def test_a_name_of_this_machine_has_no_scheme_and_no_port(
    capsys: pytest.CaptureFixture,
) -> None:
    for name in ("http://box", "box:8000", "*", "", "a/b"):
        assert run(["serve", "--allow-host", name]) == 2
        assert "expected a name or an address without scheme" in capsys.readouterr().err
    assert _hosts(ServerOptions(allow_host=["box.local", "fd00::1"]))[:2] == [
        "box.local",
        "fd00::1",
    ]
    assert socket.gethostname() in _hosts(ServerOptions(host="0.0.0.0"))


def test_a_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(["serve"]) == 2
    assert "pip install 'eagle3-jax[serve]'" in capsys.readouterr().err
