"""The server writes what `generate` writes, over HTTP, whatever its clients do."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax.cli import run
from eagle3_jax.serving.engine import Engine
from eagle3_jax.types import SamplingMode

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from eagle3_jax.serving.local import serving

PROMPTS = ["def add(a, b):\n", "import", "class Queue:\n", "x = [", '"""Reads a file line by line, and ', "for"]
TEMPLATE = e3.ChatTemplate("{% for message in messages %}{{ message.content }}\n{% endfor %}")
Answer = dict[str, Any]


@functools.cache
def decoder() -> e3.SpeculativeDecoder:
    target = e3.load_target()
    return e3.SpeculativeDecoder(target, e3.load_drafter(target=target), num_speculative_tokens=3)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(decoder(), slots=4, capacity=128, logprobs=20, max_queue=64) as address:
        yield address


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    """One slot, no queue, greedy only, no log-probabilities, and a target with a chat template."""
    target = dataclasses.replace(e3.load_target(), chat_template=TEMPLATE)
    plain = e3.SpeculativeDecoder(target)
    options = {"slots": 1, "capacity": 64, "max_queue": 0, "chunk": 24, "sampling_mode": SamplingMode.GREEDY}
    with serving(plain, **options) as address:
        yield address


def post(url: str, body: Any, path: str = "/v1/completions") -> tuple[int, Answer]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def complete(url: str, **fields: Any) -> Answer:
    """Returns the choice of a completion."""
    status, answer = post(url, {"return_token_ids": True, **fields})
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice | {"usage": answer["usage"]}


def events_of(url: str, body: Answer, path: str = "/v1/completions") -> list[Answer]:
    request = urllib.request.Request(url + path, json.dumps(body | {"stream": True}).encode())
    with urllib.request.urlopen(request, timeout=300) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        parts = response.read().decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def counters(url: str) -> dict[str, float]:
    lines = re.findall(r"^vllm:(\w+)\{(.*?)\} (\S+)$", get(f"{url}/metrics"), re.M)
    values = {}
    for name, labels, value in lines:
        others = re.sub(r'model_name="[^"]*"|engine="0"|,', "", labels)
        values[f"{name}{others}"] = float(value)
    return values


def generated(fields: Answer, **options: Any) -> e3.Generation:
    """Returns what `generate` writes for the fields of a request."""
    sampling = e3.SamplingParams(
        temperature=fields["temperature"], top_k=fields.get("top_k", 0), top_p=fields.get("top_p", 1.0)
    )
    options |= {"max_new_tokens": fields["max_tokens"], "sampling": sampling, "seed": fields.get("seed", 0)}
    return decoder().generate(fields["prompt"], **options).rows[0]


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
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}
        assert choice["usage"] == usage


def test_a_prompt_of_token_ids_and_the_defaults_of_openai(url: str) -> None:
    prompt = decoder().encode("import os\n")
    choice = complete(url, prompt=prompt, seed=5)
    expected = generated({"prompt": prompt, "max_tokens": 16, "temperature": 1.0, "seed": 5})
    assert choice["token_ids"] == expected.tokens
    assert complete(url, prompt=[prompt], seed=5)["token_ids"] == expected.tokens
    without_seed = {complete(url, prompt=prompt, temperature=1.5)["text"] for _ in range(3)}
    assert len(without_seed) > 1


@pytest.mark.parametrize("streams", [False, True])
def test_log_probabilities_are_those_of_generate(url: str, streams: bool) -> None:
    fields = {"prompt": "def add(a, b):\n", "max_tokens": 12, "temperature": 0.8, "seed": 3, "logprobs": 2}
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
        expected.tokens, columns["token_logprobs"], columns["top_logprobs"], expected.logprobs, strict=True
    ):
        assert logprob == pytest.approx(score.logprob, abs=1e-4)
        likeliest = dict(score.top) | {token: score.logprob}
        assert top == pytest.approx({f"token_id:{key}": value for key, value in likeliest.items()}, abs=1e-4)
    pieces = decoder().stream(fields["prompt"], max_new_tokens=12, sampling=e3.SamplingParams(temperature=0.8), seed=3)
    lengths = [len(piece) for chunk in pieces for piece in chunk.pieces]
    assert columns["text_offset"] == np.cumsum([0, *lengths[:-1]]).tolist()


@pytest.mark.parametrize("limit", [0, 3])
def test_an_echo_scores_the_prompt_as_one_forward_of_the_target_does(url: str, limit: int) -> None:
    text = "def add(a, b):\n    return a + b\n"
    fields = {"prompt": text, "max_tokens": limit, "temperature": 0, "logprobs": 3, "echo": True}
    choice = complete(url, **fields, return_tokens_as_token_ids=True)
    tokens = decoder().encode(text)
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
        assert logprobs["token_logprobs"][position + 1] == pytest.approx(scores[position, token], abs=1e-3)
        top = logprobs["top_logprobs"][position + 1]
        likeliest = {f"token_id:{index}" for index in np.argsort(-scores[position])[:3]}
        assert set(top) == likeliest | {f"token_id:{token}"}
    assert logprobs["text_offset"][1] == len(target.tokenizer.decode(tokens[:1]))


def test_an_echo_without_log_probabilities_is_the_text(url: str) -> None:
    fields = {"prompt": "import os\n", "max_tokens": 4, "temperature": 0, "echo": True}
    expected = generated(fields)
    (first, *_), text = [], ""
    for event in events_of(url, fields):
        text += event["choices"][0]["text"]
        first = first or event["choices"][0]["text"]
    assert text == "import os\n" + (expected.text or "") and first == "import os\n"


def test_a_stop_text_across_chunks_ends_the_text_before_it(url: str) -> None:
    fields = {"prompt": "class Queue:\n", "max_tokens": 40, "temperature": 0}
    chunks = [event["choices"][0]["text"] for event in events_of(url, fields)]
    text = "".join(chunks)
    tried = 0
    for number in range(2, 8):
        border = len("".join(chunks[:number]))
        stop = text[border - 2 : border + 2]
        if text.index(stop) != border - 2:
            continue
        tried += 1
        expected = generated(fields, stop=stop)
        streamed = [event["choices"][0] for event in events_of(url, fields | {"stop": ["\0", stop]})]
        assert "".join(choice["text"] for choice in streamed) == expected.text == text[: border - 2]
        choice = complete(url, **fields, stop=stop)
        assert (choice["text"], choice["token_ids"]) == (expected.text, expected.tokens)
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        assert choice["usage"]["completion_tokens"] == len(expected.tokens)
    assert tried >= 2


def test_metrics_are_the_counters_of_generate(url: str) -> None:
    before = counters(url)
    stats = []
    for fields in requests():
        complete(url, **fields)
        stats.append(generated(fields))
    after = counters(url)
    gains = {name: after[name] - before[name] for name in after}
    merged = e3.SpeculationStats.merge(row.stats for row in stats)
    assert gains["spec_decode_num_drafts_total"] == merged.num_drafts
    assert gains["spec_decode_num_draft_tokens_total"] == merged.num_draft_tokens
    assert gains["spec_decode_num_accepted_tokens_total"] == merged.num_accepted_tokens
    for position, count in enumerate(merged.num_accepted_tokens_per_pos):
        assert gains[f'spec_decode_num_accepted_tokens_per_pos_totalposition="{position}"'] == count
    assert gains["generation_tokens_total"] == sum(len(row.tokens) for row in stats)
    assert gains["prompt_tokens_total"] == sum(len(row.prompt_tokens) for row in stats)
    ended = {reason: gains[f'request_success_totalfinished_reason="{reason}"'] for reason in ("stop", "length")}
    reasons = [row.finish_reason.name.lower() for row in stats]
    assert ended == {"stop": reasons.count("stop"), "length": reasons.count("length")}
    assert gains["time_to_first_token_seconds_count"] == gains["e2e_request_latency_seconds_count"] == len(stats)
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0


def leave(url: str, body: Answer, *, after: int) -> None:
    """Sends a request and closes the connection after some bytes of the answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body))
    if after:
        connection.getresponse().read(after)
    connection.close()


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_its_slot_and_its_rounds_count(url: str, streams: bool) -> None:
    before = counters(url)
    body = {"prompt": "def", "max_tokens": 110, "stream": streams, "temperature": 0, "ignore_eos": True}
    for _ in range(8):  # twice the slots
        leave(url, body, after=20 if streams else 0)
    deadline = time.monotonic() + 60
    while counters(url)["num_requests_running"] + counters(url)["num_requests_waiting"] and time.monotonic() < deadline:
        time.sleep(0.05)
    after = counters(url)
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
    name = 'request_success_totalfinished_reason="abort"'
    assert after[name] - before[name] == 8
    tokens = after["generation_tokens_total"] - before["generation_tokens_total"]
    drafts = after["spec_decode_num_drafts_total"] - before["spec_decode_num_drafts_total"]
    assert tokens < 8 * 100
    assert drafts <= tokens and (drafts > 0) >= streams
    assert complete(url, **requests()[2])["text"] == generated(requests()[2]).text


def test_a_slow_reader_does_not_hold_up_the_others(url: str) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = {"prompt": "def", "max_tokens": 100, "stream": True, "temperature": 0, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body))
    fields = requests()[4]
    assert complete(url, **fields)["text"] == generated(fields).text
    lines = connection.getresponse().read().decode()
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines.split("\n\n") if '"choices"' in line]
    unstopped = e3.SpeculativeDecoder(decoder().target, stop_tokens=())
    assert "".join(texts) == unstopped.generate("def", max_new_tokens=100).texts[0]


def test_two_hundred_requests_at_once_are_answered_or_refused(url: str) -> None:
    fields = {"prompt": "import", "max_tokens": 4, "temperature": 0}
    expected = generated(fields).text
    with concurrent.futures.ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda _: post(url, fields), range(200)))
    texts = [answer["choices"][0]["text"] for status, answer in answers if status == 200]
    assert texts == [expected] * len(texts) and len(texts) >= 68
    errors = [answer["error"] for status, answer in answers if status != 200]
    assert all(error["code"] == 503 and error["type"] == "ServiceUnavailableError" for error in errors)


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
    ({"prompt": "x", "n": 2}, "n", 400),
    ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty", 400),
    ({"prompt": "x", "tools": [{"type": "function"}]}, "tools", 400),
    ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format", 400),
    ({"prompt": "x", "guided_json": {}}, "guided_json", 400),
]


@pytest.mark.parametrize(("body", "param", "status"), BAD)
def test_a_bad_request_is_refused_with_its_field(url: str, body: Any, param: str | None, status: int) -> None:
    actual, answer = post(url, body)
    assert actual == status
    assert answer["error"]["param"] == param and answer["error"]["code"] == status
    assert answer["error"]["message"] and "\n" not in answer["error"]["message"]


def test_values_that_change_nothing_pass(url: str) -> None:
    neutral = {"n": 1, "repetition_penalty": 1.0, "logprobs": None, "stop": None, "presence_penalty": 0, "user": "me"}
    neutral |= {"min_p": 0.0, "logit_bias": {}, "best_of": 1, "suffix": None, "tools": [], "model": "eagle3"}
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
    assert model["id"] == decoder().target.name and model["max_model_len"] == 124


def test_the_server_is_certified(url: str) -> None:
    from eagle3_jax.certify import Client, Plan, Verdict, certify

    client = Client(url)
    prompts = [decoder().encode(prompt) for prompt in PROMPTS]
    plan = Plan(prompts=prompts, num_requests=48, num_greedy=4, max_new_tokens=16, concurrency=8)
    certificate = certify(client, plan)
    assert certificate.verdict is Verdict.LOSSLESS, certificate.reason
    assert client.scoring == "echo"
    assert "The same seed wrote the same text in 4 of 4 requests." in certificate.notes


# A target with a chat template, one slot and no queue

QUESTION = [{"role": "user", "content": [{"type": "text", "text": "def add"}, {"type": "text", "text": "(a, b):"}]}]
CHAT = "/v1/chat/completions"


def test_a_chat_is_the_completion_of_the_rendered_conversation(small: str) -> None:
    prompt = decoder().target.tokenizer.encode("def add(a, b):\n", add_special_tokens=False).ids
    plain = e3.SpeculativeDecoder(decoder().target)
    expected = plain.generate(prompt, max_new_tokens=8).rows[0]
    body = {"messages": QUESTION, "max_completion_tokens": 8, "temperature": 0}
    status, answer = post(small, body, CHAT)
    assert status == 200 and answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected.text}
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    chunks = events_of(small, body, CHAT)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta["content"] for delta in deltas) == expected.text
    assert deltas[0]["role"] == "assistant" and "role" not in deltas[1]
    assert chunks[0]["object"] == "chat.completion.chunk"
    status, answer = post(small, body | {"max_completion_tokens": None}, CHAT)
    unlimited = plain.generate(prompt, max_new_tokens=63 - len(prompt)).rows[0]
    assert answer["choices"][0]["message"]["content"] == unlimited.text


@pytest.mark.parametrize(
    ("body", "path", "message"),
    [
        (
            {"messages": QUESTION, "temperature": 0, "logprobs": True, "top_logprobs": 2},
            CHAT,
            "start it with --logprob",
        ),
        ({"messages": [{"role": "judge", "content": "x"}], "temperature": 0}, CHAT, "has the role 'judge'"),
        ({"messages": QUESTION, "temperature": 0, "echo": True}, CHAT, "'echo' is not supported"),
        ({"prompt": "x", "temperature": 0, "logprobs": 1}, "/v1/completions", "start it with --logprobs 1"),
        ({"prompt": "x", "temperature": 1}, "/v1/completions", "the server chose it with --sampling"),
    ],
)
def test_a_server_says_what_it_was_not_started_for(small: str, body: Answer, path: str, message: str) -> None:
    status, answer = post(small, body, path)
    assert status == 400 and message in answer["error"]["message"]


def test_a_chat_with_a_model_without_template_is_refused(url: str) -> None:
    status, answer = post(url, {"messages": QUESTION}, CHAT)
    assert status == 400 and "has no chat template; use /v1/completions" in answer["error"]["message"]


def test_log_probabilities_of_a_chat_have_their_own_form() -> None:
    target = dataclasses.replace(e3.load_target(), chat_template=TEMPLATE)
    with serving(e3.SpeculativeDecoder(target), slots=1, capacity=32, logprobs=2) as address:
        body = {"messages": QUESTION, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        status, answer = post(address, body, CHAT)
    assert status == 200
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]
    assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in content)


def test_a_full_server_says_when_to_come_back(small: str) -> None:
    body = {"prompt": "def", "max_tokens": 55, "temperature": 0, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: post(small, body), range(6)))
    statuses = sorted(status for status, _ in answers)
    assert statuses[0] == 200 and statuses[-1] == 503


def test_a_failing_engine_fails_its_requests_and_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Engine._begin_group

    def fail(engine: Engine) -> None:
        if len(engine._waiting[0][1].tokens) == 3:
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
    assert "the engine failed: ArithmeticError: lost the device" in statuses[1][1]["error"]["message"]


# The command


def test_a_signal_ends_the_server_after_its_requests() -> None:
    words = [sys.executable, "-m", "eagle3_jax", "serve", "--port", "0", "--capacity", "128", "--slots", "1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line.split()[-1]
        assert " is ready at http://127.0.0.1:" in line
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        idle = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
        idle.connect()
        body = {"prompt": "def", "max_tokens": 100, "stream": True, "temperature": 0, "ignore_eos": True}
        connection.request("POST", "/v1/completions", json.dumps(body))
        response = connection.getresponse()
        response.read(10)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        with contextlib.suppress(OSError, http.client.HTTPException):  # it may have ended already
            idle.request("GET", "/health")
            refusal = idle.getresponse()
            assert (refusal.status, refusal.headers["Retry-After"]) == (503, "1")
        lines = response.read().decode()
        assert lines.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in lines
        assert process.wait(60) == 0


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert run(["serve", "--port", str(listener.getsockname()[1])]) == 2
    error = capsys.readouterr().err
    assert "address already in use; choose another port" in error and error.count("\n") == 1


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert run(["serve"]) == 2
    assert "pip install 'eagle3-jax[serve]'" in capsys.readouterr().err
