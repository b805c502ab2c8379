"""A client of the server, and what `generate` writes for the same requests."""

from __future__ import annotations

import dataclasses
import functools
import json
import urllib.error
import urllib.request
from typing import Any

import eagle3_jax as e3

TEMPLATE = e3.ChatTemplate("{% for message in messages %}{{ message.content }}\n{% endfor %}")
JSON_BODY = {"Content-Type": "application/json"}
Answer = dict[str, Any]


@functools.cache
def decoder() -> e3.SpeculativeDecoder:
    target = dataclasses.replace(e3.load_target(), chat_template=TEMPLATE)
    return e3.SpeculativeDecoder(target, e3.load_drafter(target=target), num_speculative_tokens=3)


def post(url: str, body: Any, path: str = "/v1/completions") -> tuple[int, Answer]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, JSON_BODY)
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
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(url + path, data, JSON_BODY)
    with urllib.request.urlopen(request, timeout=300) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        parts = response.read().decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        return response.read().decode()


def generated(fields: Answer, **options: Any) -> e3.Generation:
    """Returns what `generate` writes for the fields of a request."""
    sampling = e3.SamplingParams(
        temperature=fields["temperature"],
        top_k=fields.get("top_k", 0),
        top_p=fields.get("top_p", 1.0),
    )
    options |= {
        "max_new_tokens": fields["max_tokens"],
        "sampling": sampling,
        "seed": fields.get("seed", 0),
    }
    return decoder().generate(fields["prompt"], **options).rows[0]
