"""A local server with OpenAI's completions and chat over a ``FaultySampler``, and bad manners."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import itertools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from faulty_sampler import FaultySampler

MODEL = "fake"
END = 0  # the token that ends a text, unless `ignore_eos`
# What is reported in place of a token's numbers.
UNREADABLE: dict[str, dict[str, Any]] = {
    "null": {"logprob": None, "top": None},
    "missing": {},
    "NaN": {"logprob": math.nan, "top": {1: math.nan}},
    "Infinity": {"logprob": math.inf, "top": {1: math.inf}},
    "text": {"logprob": "-1", "top": {1: "-1"}},
    "empty": {"logprob": 0.0, "top": {}},
}
_NEUTRAL = {
    "top_k": -1,
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}


@dataclasses.dataclass
class Manners:
    """How the server answers apart from its texts; tests change these.

    Attributes:
        refusals: Status codes of the next answers, before the server answers rightly.
        retry_after: What these say about the time of the next try; ``None`` for nothing.
        key: The key that it wants.
        reports: Whether it reports log-probabilities.
        most_reported: Most log-probabilities of a position.
        echoes: Whether it scores prompts.
        form: ``completions`` (ids as texts), ``texts`` (texts alone), ``content`` (as in chats) or
            ``llama.cpp``, which reports nothing about drafted tokens.
        chat_tokens: How chats name tokens, by a text that all share and ``ids`` or ``bytes``; or by
            ``texts`` alone.
        writes_texts: Whether answers have texts, as a server without a tokenizer has not.
        leaves_out: Whether tokens behind drafts are missing in the report.
        unreadable: What is reported of drafted tokens, of ``UNREADABLE``; empty for their numbers.
        counts: Whether it tells how many tokens it wrote.
        models: Models that it answers as, in turns.
        lists_models: Whether it has ``/v1/models``.
        completes: Whether it has ``/v1/completions``.
        reasons: Whether its chats begin with a text of reasoning.
        seconds: Time of an answer.
        drip: Seconds between two bytes of an answer.
        cut_every: Every how manieth stream is cut in its middle; 0 for none.
        redirect: Address that it redirects to.
        mangle: Changes the bytes of an answer.
        refused_fields: Fields that it refuses requests for.
        ignored_fields: Fields that it does not read.
        wrong_greedy: Position whose greedy token is the second likeliest.
        wrong_when: When it is: ``always``, ``again`` (at every second time of its prompt),
            ``crowded`` (another request is answered at the same time) or ``long`` (the prompt has
            more than 256 tokens).
        stale_prefixes: Whether a prompt that extends an answer is read as if its last token were
            another.
        penalized: Share of the penalties that it applies.
        penalized_rounds: Whether penalties count the tokens of earlier rounds only.
        processed: Whether it reports log-probabilities after all that changes them.
        overshoot: Tokens that it writes beyond ``max_tokens``.
        stop_delay: Characters that it writes behind a stop text, or, if below 0, leaves out before
            it.
        constrained: How it writes what a grammar constrains: ``right``, ``broken``, ``cut`` off by
            the length, or ``empty``.
        fixed_seed: Seed that it uses in place of the request's.
        shift: What it adds to log-probabilities of every eighth token that are scored by force,
            behind the first.
    """

    refusals: list[int] = dataclasses.field(default_factory=list)
    retry_after: str | None = "0"
    key: str = ""
    reports: bool = True
    most_reported: int = 20
    echoes: bool = True
    form: str = "completions"
    chat_tokens: str = "ids"
    writes_texts: bool = True
    leaves_out: bool = False
    unreadable: str = ""
    counts: bool = True
    models: list[str] = dataclasses.field(default_factory=lambda: [MODEL])
    lists_models: bool = True
    completes: bool = True
    reasons: bool = False
    seconds: float = 0.0
    drip: float = 0.0
    cut_every: int = 0
    redirect: str = ""
    mangle: Callable[[bytes], bytes] = bytes
    refused_fields: set[str] = dataclasses.field(default_factory=set)
    ignored_fields: set[str] = dataclasses.field(default_factory=set)
    wrong_greedy: int | None = None
    wrong_when: str = "always"
    stale_prefixes: bool = False
    penalized: float = 1.0
    penalized_rounds: bool = False
    processed: bool = False
    overshoot: int = 0
    stop_delay: int = 0
    constrained: str = "right"
    fixed_seed: int | None = None
    shift: float = 0.0


class FakeServer(http.server.ThreadingHTTPServer):
    """The server; a prompt is ``[p]``, the number of a prompt, or the text of that number.

    Attributes:
        requests: The body of each request that it was sent.
        keys: The key of each request.
        answered: Number of answers.
        rounds: Number of tokens of each round of speculation.
        seen: Prompts that were sent, with how often.
        written: Texts of ids, each a prompt with its answer.
        pending: Number of requests that are being answered.
    """

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, sampler: FaultySampler) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.sampler = sampler
        self.manners = Manners()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.answered = 0
        self.rounds: list[int] = []
        self.seen: Counter[str] = Counter()
        self.written: set[tuple[int, ...]] = set()
        self.pending = 0
        self.url = f"http://127.0.0.1:{self.server_port}"

    def start(self) -> None:
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def restart(self, seconds: float) -> None:
        """Refuses connections for a while."""
        self.stop()
        threading.Timer(seconds, self._start_again).start()

    def _start_again(self) -> None:
        http.server.ThreadingHTTPServer.__init__(self, self.server_address[:2], _Handler)  # type: ignore[arg-type]
        self.start()


@contextlib.contextmanager
def serving(sampler: FaultySampler) -> Iterator[FakeServer]:
    """Serves until the context ends."""
    server = FakeServer(sampler)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@dataclasses.dataclass(frozen=True)
class _Written:
    """One answer: its text, tokens, the position of each in its chunk, and why it ends."""

    text: str
    tokens: list[int]
    chunk_index: list[int]
    finish_reason: str


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *arguments: Any) -> None:
        """Writes nothing."""

    def do_GET(self) -> None:
        manners = self.server.manners
        if self._refuses():
            pass
        elif self.path == "/v1/models" and manners.lists_models:
            self._answer(200, {"data": [{"id": MODEL, "max_model_len": 1024}]})
        elif self.path == "/props" and manners.form == "llama.cpp":
            settings = {"n_ctx": 512, "model_path": "/home/someone/model.gguf"}
            self._answer(200, {"build_info": "b1-fake", "default_generation_settings": settings})
        elif self.path == "/version":
            self._answer(200, {"version": "0.0.fake"})
        elif self.path == "/metrics":
            self._send(200, self._metrics().encode())
        else:
            self._answer(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        manners = self.server.manners
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        is_chat = self.path == "/v1/chat/completions"

        if self._refuses():
            pass
        elif self.path == "/tokenize" and manners.form == "llama.cpp":
            text = body["content"]
            self._answer(
                200, {"tokens": [int(word) for word in text.split() if word.isdecimal()] or [5]}
            )
        elif not is_chat and (self.path != "/v1/completions" or not manners.completes):
            self._answer(404, {"error": {"message": "not found"}})
        elif manners.refusals:
            retry_after = (
                {} if manners.retry_after is None else {"Retry-After": manners.retry_after}
            )
            self._answer(manners.refusals.pop(0), {"error": {"message": "busy"}}, **retry_after)
        elif manners.refused_fields & body.keys():
            self._answer(
                400, {"error": {"message": f"unknown: {min(manners.refused_fields & body.keys())}"}}
            )
        elif body.get("echo") and not manners.echoes:
            self._answer(400, {"error": {"message": "echo is not supported"}})
        else:
            self.server.pending += 1
            time.sleep(manners.seconds)
            self.server.answered += 1
            self._complete(
                {name: body[name] for name in body if name not in manners.ignored_fields}, is_chat
            )
            self.server.pending -= 1

    def _refuses(self) -> bool:
        """Answers a request without the key, or for another server."""
        manners = self.server.manners
        key = self.headers.get("Authorization")
        self.server.keys.append(key)
        if manners.key and key != f"Bearer {manners.key}":
            self._answer(401, {"error": {"message": f"no key but {key}"}})
            return True
        if manners.redirect:
            self._send(302, b"", Location=manners.redirect + self.path)
            return True
        return False

    def _complete(self, body: dict[str, Any], is_chat: bool) -> None:
        manners = self.server.manners
        prompt = body["messages"][-1]["content"] if is_chat else body["prompt"]
        if isinstance(prompt, str):
            ids = [int(word) for word in prompt.split() if word.isdecimal()] or [0]
        else:
            ids = prompt
        number = body.get("top_logprobs", 0) if is_chat else body.get("logprobs") or 0

        self.is_wrong = self._has_reason_to_err(ids)
        self.is_stale = (
            manners.stale_prefixes and not body.get("cache_salt") and self._extends_an_answer(ids)
        )
        answers = [self._write(ids, body, index) for index in range(body.get("n", 1))]
        self.server.seen[str(ids)] += not body.get("echo")
        self.server.written |= {
            (*ids, *answer.tokens) for answer in answers if any(answer.chunk_index)
        }

        chunks: list[list[dict[str, Any]]] = []
        for index, answer in enumerate(answers):
            entries = self._entries(ids, answer, number, body)
            if body.get("echo"):
                entries = self._echoed(ids, answer.tokens, number)
            starts = [
                position
                for position, index_in_chunk in enumerate(answer.chunk_index)
                if index_in_chunk == 0
            ]
            if not body.get("stream") or manners.form == "llama.cpp":
                starts = [0]
            rows = [
                entries[start:stop] for start, stop in zip(starts, [*starts[1:], None], strict=True)
            ]
            texts = self._texts(answer, rows)

            if manners.leaves_out:
                rows = [row[:1] for row in rows]
            of_choice = [
                self._choice(index, row, text, body) for row, text in zip(rows, texts, strict=True)
            ]
            of_choice[-1]["finish_reason"] = answer.finish_reason
            if manners.form not in ("texts", "llama.cpp") and body.get("return_token_ids"):
                of_choice[0]["prompt_token_ids"] = ids
            chunks.append(of_choice)

        num_tokens = sum(len(answer.tokens) for answer in answers)
        usage = {"completion_tokens": num_tokens} if manners.counts else {}
        if body.get("stream") and manners.form != "llama.cpp":
            rounds = itertools.zip_longest(*chunks)  # the choices' chunks take turns
            events = [self._event([choice]) for row in rounds for choice in row if choice]
            if body.get("stream_options"):
                events.append(self._event([]) | {"usage": usage})
            self._stream(events)
            return

        event = self._event([*itertools.chain(*chunks)]) | {"usage": usage}
        if manners.form == "llama.cpp":
            drafted = int(np.count_nonzero(answers[0].chunk_index))
            event |= {"__verbose": {"tokens": answers[0].tokens}, "timings": {"draft_n": drafted}}
        self._answer(200, event)

    def _has_reason_to_err(self, ids: list[int]) -> bool:
        """Returns whether ``wrong_greedy`` shows in this answer."""
        match self.server.manners.wrong_when:
            case "again":
                return self.server.seen[str(ids)] % 2 > 0
            case "crowded":
                return self.server.pending > 1
            case "long":
                return len(ids) > 256
            case _:
                return True

    def _extends_an_answer(self, ids: list[int]) -> bool:
        return any(tuple(ids[:length]) in self.server.written for length in range(2, len(ids) + 1))

    def _texts(self, answer: _Written, rows: list[list[dict[str, Any]]]) -> list[str]:
        """Returns the text of each chunk; one that a stop ended may be shorter than its tokens'."""
        texts = []
        remaining = answer.text
        for row in rows:
            length = len("".join(f" {entry['id']}" for entry in row))
            texts.append(remaining[:length] if row is not rows[-1] else remaining)
            remaining = remaining[length:]
        return texts

    def _write(self, ids: list[int], body: dict[str, Any], index: int) -> _Written:
        """Returns an answer, ended as the request says."""
        tokens, chunk_index = self._tokens(ids, body, index)
        if body.keys() & {
            "response_format",
            "json_schema",
            "structured_outputs",
            "regex",
            "grammar",
        }:
            return self._constrained(tokens, chunk_index, body, index)
        delay = self.server.manners.stop_delay
        stops = body.get("stop") or []
        stops = [stops] if isinstance(stops, str) else stops

        text = ""
        for position, token in enumerate(tokens):
            length = position + 1
            if (
                token == END
                and not body.get("ignore_eos")
                and self.server.manners.form != "llama.cpp"
            ):
                return _Written(text, tokens[:length], chunk_index[:length], "stop")
            text += f" {token}"
            starts = [text.index(stop) for stop in stops if stop in text]
            if starts:
                end = min(starts)
                end += delay + len(stops[0]) if delay > 0 else delay
                text += "".join(f" {token}" for token in tokens[length:]) if delay > 0 else ""
                return _Written(text[:end], tokens[:length], chunk_index[:length], "stop")
        return _Written(text, tokens, chunk_index, "length")

    def _constrained(
        self, tokens: list[int], chunk_index: list[int], body: dict[str, Any], index: int
    ) -> _Written:
        """Returns an answer that a grammar constrains; its tokens are not those of its text."""
        rng = np.random.default_rng(body.get("seed", 0) + index)
        is_object = body.keys() & {"response_format", "json_schema"}
        values = (["true", "false"][rng.integers(2)], "xy"[rng.integers(2)])
        digits = "".join(map(str, rng.integers(0, 10, 16)))
        number = (
            "-".join(digits[start : start + 3] for start in range(0, 12, 3)) + f"-{digits[12:]}"
        )
        text = '{{"a": {}, "b": "{}"}}'.format(*values) if is_object else number

        if self.server.manners.constrained == "broken":
            text = text[:5] + text[7:]
        if self.server.manners.constrained in ("cut", "empty"):
            text = text[:7] if self.server.manners.constrained == "cut" else ""
            return _Written(text, tokens, chunk_index, "length")
        return _Written(text, tokens, chunk_index, "stop")

    def _tokens(
        self, ids: list[int], body: dict[str, Any], index: int
    ) -> tuple[list[int], list[int]]:
        """Returns tokens to the limit, and the position of each in its chunk."""
        manners = self.server.manners
        sampler = self.server.sampler
        number = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        number += manners.overshoot if number > 1 else 0
        seed = int(body.get("seed", np.random.default_rng().integers(2**31))) + index
        seed = seed if manners.fixed_seed is None else manners.fixed_seed
        sampling = sampler.sampling
        is_usual = (body.get("temperature", 1), body.get("top_p", 1)) == (
            sampling.temperature,
            sampling.top_p,
        )
        is_usual &= all(body.get(name, value) == value for name, value in _NEUTRAL.items())

        if is_usual and not body.get("logit_bias") and not body.get("min_tokens"):
            start = None  # the first token of an answer comes from the prompt
            if len(ids) > 1:
                p = self._sampled_from(ids, [], body, 0)
                start = int(np.random.default_rng([seed, 7]).choice(len(p), p=p))
            answers, chunk_index = sampler.answer(np.array(ids[:1]), number, seed=seed, start=start)
            starts = np.flatnonzero(chunk_index[0] == 0)
            self.server.rounds += np.diff([*starts[1:], number]).tolist()
            return answers[0].tolist(), chunk_index[0].tolist()

        rng = np.random.default_rng(seed)
        tokens: list[int] = []
        has_penalty = body.get("presence_penalty") or body.get("frequency_penalty")
        # Rounds of tokens that follow from the text alone, whatever is drafted.
        length = 3 if has_penalty else 1 if body.get("temperature", 1) else 4
        chunk_index = [0, *(position % length for position in range(number))][:number]
        if length > 1 and number > 1:
            self.server.rounds += [length] * ((number - 1) // length)

        for position in range(number):
            p = self._sampled_from(ids, tokens, body, chunk_index[position])
            if body.get("temperature", 1):
                tokens.append(int(rng.choice(len(p), p=p)))
            else:
                rank = 1 if position == manners.wrong_greedy and number > 1 and self.is_wrong else 0
                tokens.append(int(np.argsort(-p)[rank]))
        return tokens, chunk_index

    def _sampled_from(
        self, ids: list[int], tokens: list[int], body: dict[str, Any], in_chunk: int
    ) -> np.ndarray:
        """Returns the distribution of the next token after all that changes it, in vLLM's order."""
        manners = self.server.manners
        logits = np.log(self._distribution(ids[0], [*ids[1:], *tokens]))

        counted = tokens[: len(tokens) - in_chunk] if manners.penalized_rounds else tokens
        counts = np.bincount(counted, minlength=len(logits))
        repetition = body.get("repetition_penalty", 1)
        logits = np.where(
            counts > 0, np.where(logits > 0, logits / repetition, logits * repetition), logits
        )
        penalties = body.get("frequency_penalty", 0) * counts + body.get("presence_penalty", 0) * (
            counts > 0
        )
        logits = logits - manners.penalized * penalties

        bias = body.get("logit_bias") or {}
        for token, value in bias.items() if isinstance(bias, dict) else bias:
            logits[int(token)] += value
        if len(tokens) < body.get("min_tokens", 0):
            logits[END] = -np.inf

        p = np.exp((logits - logits.max()) / (body.get("temperature", 1) or 1))
        p /= p.sum()
        p = np.where(p < body.get("min_p", 0) * p.max(), 0, p)
        order = np.argsort(-p)
        top_k = body.get("top_k", -1)
        if top_k > 0:
            p[order[top_k:]] = 0
        ranked = p[order] / p.sum()
        p[order[ranked.cumsum() - ranked >= body.get("top_p", 1)]] = 0
        return p / p.sum()

    def _distribution(self, prompt: int, before: list[int]) -> np.ndarray:
        sampler = self.server.sampler
        return (
            sampler.target[prompt, before[-1] - self.is_stale] if before else sampler.first[prompt]
        )

    def _entry(
        self, prompt: int, before: list[int], token: int, number: int, shift: float = 0.0
    ) -> dict[str, Any]:
        """Returns a token with the likeliest tokens of its position."""
        log_probs = np.log(self._distribution(prompt, before)) + shift
        most = min(number, self.server.manners.most_reported)
        return _reported(token, log_probs, np.argsort(-log_probs)[:most])

    def _entries(
        self, ids: list[int], answer: _Written, number: int, body: dict[str, Any]
    ) -> list[dict[str, Any]]:
        manners = self.server.manners
        unreadable = "empty" if manners.form == "llama.cpp" else manners.unreadable
        entries = []
        for position, token in enumerate(answer.tokens):
            entry = self._entry(ids[0], [*ids[1:], *answer.tokens[:position]], token, number)

            if manners.processed:
                before = answer.tokens[:position]
                p = self._sampled_from(ids, before, body, answer.chunk_index[position])
                with np.errstate(divide="ignore"):
                    entry = _reported(token, np.log(p), np.flatnonzero(p))
            if unreadable and answer.chunk_index[position] > 0:
                entry = {"id": token} | UNREADABLE[unreadable]
            entries.append(entry)
        return entries

    def _echoed(self, ids: list[int], answer: list[int], number: int) -> list[dict[str, Any]]:
        tokens = [*ids[1:], *answer]
        shift = self.server.manners.shift
        return [
            self._entry(
                ids[0], tokens[:index], token, number, shift if index and token % 8 == 0 else 0.0
            )
            for index, token in enumerate(tokens)
        ]

    def _choice(
        self, index: int, entries: list[dict[str, Any]], text: str, body: dict[str, Any]
    ) -> dict[str, Any]:
        manners = self.server.manners
        text = text if manners.writes_texts else ""
        is_chat = "messages" in body

        choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": None}
        if is_chat:
            reasoning = {"reasoning_content": "Hm."} if manners.reasons else {}
            choice["delta" if body.get("stream") else "message"] = {"content": text} | reasoning
        else:
            choice["text"] = text

        if manners.reports and body.get("logprobs"):
            is_list = is_chat or manners.form in ("content", "llama.cpp")
            as_ids = manners.form == "completions" and body.get("return_tokens_as_token_ids")
            choice["logprobs"] = (
                self._listed(entries)
                if is_list
                else _columns(entries, "token_id:" if as_ids else " ")
            )
        return choice

    def _listed(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns log-probabilities in the form of chats."""
        listed = []
        for entry in entries:
            values = self._named(entry["id"])
            if "logprob" in entry:
                values["logprob"] = entry["logprob"]
                top = entry["top"]
                values["top_logprobs"] = top and [
                    self._named(key) | {"logprob": top[key]} for key in top
                ]
            listed.append(values)
        return {"content": listed}

    def _named(self, token: int) -> dict[str, Any]:
        names = self.server.manners.chat_tokens
        if names == "texts":
            return {"token": f" {token}"}
        return (
            {"token": "x", "id": token}
            if names == "ids"
            else {"token": "x", "bytes": list(f" {token}".encode())}
        )

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        models = self.server.manners.models
        return {"model": models[self.server.answered % len(models)], "choices": choices}

    def _metrics(self) -> str:
        rounds = self.server.rounds
        length = self.server.sampler._length
        accepted = [sum(count > position + 1 for count in rounds) for position in range(length)]
        counts = {
            "drafts": len(rounds),
            "draft_tokens": length * len(rounds),
            "accepted_tokens": sum(accepted),
        }

        lines = [
            f'vllm:spec_decode_num_{name}_total{{engine="0"}} {count}.0'
            for name, count in counts.items()
        ]
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [
            f'{name}{{engine="0",position="{position}"}} {count}.0'
            for position, count in enumerate(accepted)
        ]
        return "\n".join([*lines, ""])

    def _stream(self, events: list[dict[str, Any]]) -> None:
        """Writes events; the end of the connection is that of the stream."""
        data = (
            b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
            + b"data: [DONE]\n\n"
        )
        cut_every = self.server.manners.cut_every
        if cut_every and self.server.answered % cut_every == 0:
            data = (
                data[: data.index(b"\n\n", len(data) // 2) + 2] if len(events) > 2 else b"data: {"
            )
        self._send(200, data)

    def _answer(self, status: int, values: dict[str, Any], **headers: str) -> None:
        self._send(status, json.dumps(values).encode(), **headers)

    def _send(self, status: int, data: bytes, **headers: str) -> None:
        manners = self.server.manners
        if self.command == "POST" and status == 200:
            data = manners.mangle(data)

        with contextlib.suppress(OSError):  # the client has gone
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if not manners.drip:
                self.wfile.write(data)
                return
            for byte in data:
                self.wfile.write(bytes([byte]))
                time.sleep(manners.drip)


def _reported(token: int, log_probs: np.ndarray, likeliest: np.ndarray) -> dict[str, Any]:
    """Returns a token with log-probabilities of its position."""
    top = {listed: float(log_probs[listed]) for listed in {*likeliest.tolist(), token}}
    return {"id": token, "logprob": top[token], "top": top}


def _columns(entries: list[dict[str, Any]], mark: str) -> dict[str, Any]:
    """Returns log-probabilities in the form of completions."""
    tops = [entry.get("top") for entry in entries]
    return {
        "tokens": [f"{mark}{entry['id']}" for entry in entries],
        "token_logprobs": [entry.get("logprob") for entry in entries],
        "top_logprobs": [
            top if top is None else {f"{mark}{key}": top[key] for key in top} for top in tops
        ],
    }
