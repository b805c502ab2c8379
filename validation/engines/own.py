"""One decoder of ours behind a local address, with as much of OpenAI's completions as ``eagle3 certify`` asks for."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

from eagle3_jax import SamplingParams, SpeculativeDecoder, __version__
from eagle3_jax.results import Chunk


class Address(http.server.ThreadingHTTPServer):
    """The server. Requests wait for each other: the decoder has one row."""

    daemon_threads = True

    def __init__(self, decoder: SpeculativeDecoder, *, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.decoder = decoder
        self.name = name
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def chunks(self, prompt: list[int], body: dict[str, Any]) -> Iterator[Chunk]:
        """Continues a prompt as a request asks for it."""
        sampling = SamplingParams(
            temperature=body["temperature"], top_k=max(0, body.get("top_k", 0)), top_p=body.get("top_p", 1.0)
        )
        with self.lock:
            yield from self.decoder.stream(
                prompt,
                max_new_tokens=body["max_tokens"],
                sampling=sampling,
                seed=body.get("seed", 0),
                logprobs=body["logprobs"],
            )


@contextlib.contextmanager
def serving(decoder: SpeculativeDecoder, *, name: str = "eagle3-jax") -> Iterator[Address]:
    """Serves a decoder until the context ends."""
    address = Address(decoder, name=name)
    thread = threading.Thread(target=address.serve_forever, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        address.shutdown()
        address.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Address

    def log_message(self, *arguments: Any) -> None:
        """Writes nothing."""

    def do_GET(self) -> None:
        answers = {"/v1/models": {"data": [{"id": self.server.name}]}, "/version": {"version": __version__}}
        self._send(200 if self.path in answers else 404, json.dumps(answers.get(self.path, {})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body.get("prompt")
        if self.path != "/v1/completions" or body.get("echo"):
            self._send(400, json.dumps({"error": {"message": "only completions, without echo", "param": "echo"}}))
            return
        ids = self.server.decoder.encode(prompt)
        events = []
        for chunk in self.server.chunks(ids, body):
            tokens = [f"token_id:{token}" for token in chunk.tokens]
            scores = chunk.logprobs or []
            top = []
            for token, score in zip(chunk.tokens, scores, strict=True):
                top.append({f"token_id:{likely}": value for likely, value in [*score.top, (token, score.logprob)]})
            logprobs = {"tokens": tokens, "token_logprobs": [score.logprob for score in scores], "top_logprobs": top}
            choice = {"text": chunk.text, "logprobs": logprobs, "prompt_token_ids": ids}
            events.append(f"data: {json.dumps({'model': self.server.name, 'choices': [choice]})}\n\n")
        self._send(200, "".join([*events, "data: [DONE]\n\n"]))

    def _send(self, status: int, text: str) -> None:
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
