"""A local server with OpenAI's completions over a ``FaultySampler``, with its errors and with bad manners."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from eagle3_jax.certify.faulty import FaultySampler

MODEL = "fake"


class Manners:
    """How the server answers besides its texts; tests change these.

    Attributes:
        refusals: Status codes of the next answers, before the server answers rightly.
        key: The key that it wants.
        reports: Whether it reports log-probabilities.
        most_reported: Most log-probabilities of a position.
        echoes: Whether it scores prompts.
        form: ``completions`` (ids as texts), ``texts`` (texts alone), ``content`` (as in chats) or ``llama.cpp``, which
            reports nothing about drafted tokens.
        leaves_out: Whether tokens behind drafts are missing in the report.
        models: Models that it answers as, in turns.
        seconds: Time of an answer.
        wrong_greedy: Position whose greedy token is the second likeliest.
        fixed_seed: Seed that it uses in place of the request's.
        shift: What it adds to log-probabilities of every eighth token that are scored by force, behind the first.
    """

    def __init__(self) -> None:
        self.refusals: list[int] = []
        self.key = ""
        self.reports = True
        self.most_reported = 20
        self.echoes = True
        self.form = "completions"
        self.leaves_out = False
        self.models = [MODEL]
        self.seconds = 0.0
        self.wrong_greedy: int | None = None
        self.fixed_seed: int | None = None
        self.shift = 0.0


class FakeServer(http.server.ThreadingHTTPServer):
    """The server; a prompt is ``[p]``, the number of a prompt, or the text of that number."""

    daemon_threads = True

    def __init__(self, sampler: FaultySampler) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sampler = sampler
        self.manners = Manners()
        self.answered = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving(sampler: FaultySampler) -> Iterator[FakeServer]:
    """Serves until the context ends."""
    server = FakeServer(sampler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *arguments: Any) -> None:
        """Writes nothing."""

    def do_GET(self) -> None:
        manners = self.server.manners
        if manners.key and self.headers.get("Authorization") != f"Bearer {manners.key}":
            self._answer(401, {"error": {"message": "no key"}})
        elif self.path == "/v1/models":
            self._answer(200, {"data": [{"id": MODEL}]})
        elif self.path == "/props" and manners.form == "llama.cpp":
            self._answer(200, {"build_info": "b1-fake"})
        elif self.path == "/version":
            self._answer(200, {"version": "0.0.fake"})
        else:
            self._answer(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        manners = self.server.manners
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize" and manners.form == "llama.cpp":
            text = body["content"]
            self._answer(200, {"tokens": [int(word) for word in text.split() if word.isdecimal()] or [5]})
            return
        if self.path != "/v1/completions":
            self._answer(404, {"error": {"message": "not found"}})
            return
        if manners.refusals:
            self._answer(manners.refusals.pop(0), {"error": {"message": "busy"}})
            return
        time.sleep(manners.seconds)
        prompt = body["prompt"]
        ids = [int(word) for word in prompt.split()] if isinstance(prompt, str) else prompt
        if body.get("echo") and not manners.echoes:
            self._answer(400, {"error": {"message": "echo is not supported"}})
            return
        self.server.answered += 1
        if manners.form == "llama.cpp":
            self._answer_like_llama_cpp(ids, body)
        elif body.get("stream"):
            self._stream(ids, body)
        else:
            self._answer(200, self._event(self._echoed(ids, body), ids))

    def _tokens(self, ids: list[int], body: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Returns the answer, and the position of each token in its chunk."""
        manners = self.server.manners
        number = body["max_tokens"]
        if body["temperature"]:
            seed = body["seed"] if manners.fixed_seed is None else manners.fixed_seed
            tokens, chunk_index = self.server.sampler.answer(np.array(ids[:1]), number, seed=seed)
            return tokens[0].tolist(), chunk_index[0].tolist()
        tokens = ids[1:]
        for position in range(number):
            order = np.argsort(-self._distribution(ids[0], tokens))
            tokens = [*tokens, int(order[1 if position == manners.wrong_greedy and number > 1 else 0])]
        return tokens[len(ids) - 1 :], [0] * number

    def _distribution(self, prompt: int, before: list[int]) -> np.ndarray:
        return self.server.sampler.target[prompt, before[-1] if before else 0]

    def _entry(self, prompt: int, before: list[int], token: int, number: int, shift: float = 0.0) -> dict[str, Any]:
        """Returns a token with the likeliest tokens of its position."""
        distribution = np.log(self._distribution(prompt, before)) + shift
        listed = {*np.argsort(-distribution)[: min(number, self.server.manners.most_reported)].tolist(), token}
        return {
            "id": token,
            "logprob": float(distribution[token]),
            "top": {likely: float(distribution[likely]) for likely in listed},
        }

    def _echoed(self, ids: list[int], body: dict[str, Any]) -> list[dict[str, Any]]:
        tokens = ids[1:] + self._tokens(ids, body)[0]
        shift = self.server.manners.shift
        return [
            self._entry(ids[0], tokens[:index], token, body["logprobs"], shift if index and token % 8 == 0 else 0.0)
            for index, token in enumerate(tokens)
        ]

    def _answer_like_llama_cpp(self, ids: list[int], body: dict[str, Any]) -> None:
        tokens, chunk_index = self._tokens(ids, body)
        entries = [
            self._entry(ids[0], ids[1:] + tokens[:index], token, body["logprobs"]) for index, token in enumerate(tokens)
        ]
        event = self._event(entries, ids)
        for entry, position in zip(event["choices"][0]["logprobs"]["content"], chunk_index, strict=True):
            if position > 0:
                entry |= {"logprob": 0.0, "top_logprobs": []}
        self._answer(200, event | {"__verbose": {"tokens": tokens}})

    def _stream(self, ids: list[int], body: dict[str, Any]) -> None:
        tokens, chunk_index = self._tokens(ids, body)
        events = []
        for index, token in enumerate(tokens):
            entry = self._entry(ids[0], ids[1:] + tokens[:index], token, body["logprobs"])
            if chunk_index[index] == 0:
                events.append([])
            events[-1].append(entry)
        if self.server.manners.leaves_out:
            events = [chunk[:1] for chunk in events]
        lines = [f"data: {json.dumps(self._event(chunk, ids))}\n\n" for chunk in events]
        self._send(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _event(self, entries: list[dict[str, Any]], ids: list[int]) -> dict[str, Any]:
        manners = self.server.manners
        name = manners.models[self.server.answered % len(manners.models)]
        choice: dict[str, Any] = {"text": "".join(f" {entry['id']}" for entry in entries), "logprobs": None}
        choice["finish_reason"] = "length"
        if manners.form not in ("texts", "llama.cpp"):
            choice["prompt_token_ids"] = ids
        if manners.reports and manners.form in ("content", "llama.cpp"):
            listed = []
            for entry in entries:
                top = [{"id": likely, "token": "x", "logprob": value} for likely, value in entry["top"].items()]
                listed.append({"id": entry["id"], "token": "x", "logprob": entry["logprob"], "top_logprobs": top})
            choice["logprobs"] = {"content": listed}
        elif manners.reports:
            mark = "token_id:" if manners.form == "completions" else " "
            choice["logprobs"] = {
                "tokens": [f"{mark}{entry['id']}" for entry in entries],
                "token_logprobs": [entry["logprob"] for entry in entries],
                "top_logprobs": [{f"{mark}{key}": value for key, value in entry["top"].items()} for entry in entries],
            }
        return {"model": name, "choices": [choice]}

    def _answer(self, status: int, values: dict[str, Any]) -> None:
        self._send(status, json.dumps(values).encode())

    def _send(self, status: int, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status in (429, 503):
                self.send_header("Retry-After", "0")
            self.end_headers()
            self.wfile.write(data)
