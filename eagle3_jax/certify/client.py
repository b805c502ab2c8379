"""A client of servers that speak OpenAI's completions: tokens with log-probabilities, and forced scoring."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import math
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_RETRIES = 5
_LONGEST_WAIT = 10.0  # seconds between two tries
_COUNTER = re.compile(r"^(?:vllm|llamacpp):spec_decode_(\w+?)_total(?:\{([^}]*)\})? ([\d.e+]+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_NEUTRAL = {  # what makes answers equally long, and tokens readable
    "ignore_eos": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}
_LLAMA_CPP = {  # its stream has no ids; with ignore_eos it does not write the end of text, but still reports it
    "stream": False,
    "verbose": True,
    "return_tokens": True,
    "response_fields": ["tokens"],
    "samplers": ["temperature", "top_k", "top_p"],  # else min-p, and what the server was started with
}
_FORCED = 1e4  # bias of a token that is always written


class ServerError(ValueError):
    """A server does not answer, or not as is needed; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Report:
    """A token with the log-probabilities that the server reports for its position.

    Attributes:
        token: Its id; a negative number stands for the text of a token from a server that does not tell ids.
        log_prob: Its log-probability; not a number where the server does not tell it.
        top: Log-probabilities of the likeliest tokens, and of this one.
    """

    token: int
    log_prob: float
    top: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes:
        text: The answer.
        reports: One per token; empty if the server reports nothing.
        chunk_index: Position of each token in the chunk that it came in, from 0.
        prompt_ids: The prompt's token ids, if the server tells them.
    """

    text: str
    reports: list[Report]
    chunk_index: list[int]
    prompt_ids: list[int] | None = None


class Client:
    """One server.

    Attributes:
        url: Its address, without ``/v1``.
        model: The model that it is asked for.
        facts: What it says about itself: models, version, build, counters of speculation.
        scoring: How it scores given tokens: ``echo``, or ``prefixes``, one request for each; empty before the first.
        is_llama_cpp: Whether it is llama.cpp's server, which reports nothing about tokens behind drafts.
    """

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, timeout: float = 120.0) -> None:
        """Asks the server who it is.

        Raises:
            ServerError: Nothing answers there, it wants a key, or it is another kind of server.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        if urllib.parse.urlsplit(self.url).scheme not in ("http", "https"):
            raise ServerError(f"{url!r} is not the address of a server; expected something like http://localhost:8000")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout = timeout
        # A proxy of the environment must not be asked for a server on this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._ids: dict[str, int] = {}
        models = self.get("/v1/models")
        entries = models.get("data") if isinstance(models, dict) else None
        if not entries:
            raise ServerError(f"{self.url}/v1/models lists no model; is this a server with OpenAI's protocol?")
        served = [entry["id"] for entry in entries]
        if model is not None and model not in served:
            raise ServerError(f"{self.url} serves {', '.join(served)}, not {model}; name one of these with --model")
        self.model: str = model or served[0]
        # Without directories of the server's machine, so that a certificate may be published.
        name = Path(self.model).name if self.model.startswith("/") else self.model
        self.facts: dict[str, Any] = {"model": name, "root": Path(entries[0].get("root") or "").name}
        for path, field in (
            ("/version", "version"),
            ("/props", "build_info"),
            ("/get_server_info", "speculative_algorithm"),
        ):
            with contextlib.suppress(ServerError, AttributeError):  # each is one server's own
                self.facts[field] = self.get(path).get(field)
        self.facts = {name: value for name, value in self.facts.items() if value}
        self.is_llama_cpp = "build_info" in self.facts
        # llama.cpp reports nothing about a token that is only a part of a character, so another is written instead.
        self._harmless: int | None = (self._tokenize("a") or [None])[-1] if self.is_llama_cpp else None
        self.scoring = ""

    def counters(self) -> dict[str, Any]:
        """Returns the counters of speculation since the server started; empty where there are none.

        vLLM has them, and llama.cpp with ``--metrics``.
        """
        try:
            return parse_counters(self.send("/metrics").decode(errors="replace"))
        except ServerError:
            return {}

    def complete(self, prompt: str | Sequence[int], *, num_reported: int, **fields: Any) -> Completion:
        """Continues a prompt, streamed.

        llama.cpp's answers are not streamed, and what it does not report is asked for behind each prefix.

        Args:
            prompt: Text or token ids.
            num_reported: Number of log-probabilities of each position.
            fields: Further fields of the request: ``max_tokens``, ``temperature`` and others.

        Raises:
            ServerError: The server refuses it, fails, is slow, answers as another model, or leaves tokens unreported.
        """
        body = {"stream": True} | self._body(prompt, num_reported, fields)
        texts = []
        reports: list[Report] = []
        chunk_index: list[int] = []
        prompt_ids = None
        tokens: list[int] = []
        reason = ""
        for event in self._events(body):
            choice = self._choice(event)
            if choice is None:
                continue
            texts.append(choice.get("text") or "")
            reason = choice.get("finish_reason") or reason
            prompt_ids = prompt_ids or choice.get("prompt_token_ids")
            tokens += event.get("__verbose", {}).get("tokens") or []
            chunk = self._reports(choice)
            reports += chunk
            chunk_index += range(len(chunk))
        if self.is_llama_cpp and reports:
            reports = self._complete_reports(prompt, tokens, reports, num_reported)
            chunk_index = [0] * len(reports)
        if reports and reason == "length" and len(reports) != body["max_tokens"]:
            raise ServerError(
                f"{self.url} reports {len(reports)} of the {body['max_tokens']} tokens of an answer; the others cannot "
                "be judged"
            )
        return Completion("".join(texts), reports, chunk_index, prompt_ids)

    def _complete_reports(
        self, prompt: str | Sequence[int], tokens: list[int], reports: list[Report], num_reported: int
    ) -> list[Report]:
        """Asks llama.cpp for the reports that it withholds.

        They come from the keys and values that are cached, which may be those that speculation left.
        """
        tokens = tokens or [report.token for report in reports]
        # Parts of characters have no entry, so it is not known whose entries the others are.
        known = reports if len(reports) == len(tokens) else [Report(token, math.nan, {}) for token in tokens]
        if all(report.top for report in known):
            return known
        ids = self._tokenize(prompt)
        if ids is None:
            raise ServerError(f"{self.url} reports nothing about drafted tokens, and has no /tokenize to ask for them")
        return [
            report if report.top else self._behind([*ids, *tokens[:position]], tokens[position], num_reported)
            for position, report in enumerate(known)
        ]

    def score(self, prompt: str | Sequence[int], completion: Completion, *, num_reported: int) -> list[Report]:
        """Scores the tokens of an answer behind their own prefixes, without drafts.

        A prompt is scored in one pass (``echo``). A server that has no such request is asked for the first token behind
        each prefix, which no draft reaches.

        Raises:
            ServerError: The server does neither.
        """
        answer = [report.token for report in completion.reports]
        ids = completion.prompt_ids or self._tokenize(prompt)
        has_ids = ids is not None and all(token >= 0 for token in answer)
        if self.scoring != "prefixes":
            text: Any = [*(ids or ()), *answer] if has_ids else f"{prompt}{completion.text}"
            echoed = self._echo(text, num_reported)
            # The token that the request must write comes last.
            scored = echoed[-len(answer) - 1 : -1]
            if [report.token for report in scored] == answer:
                self.scoring = "echo"
                return scored
            if self.scoring == "echo":
                return []  # the text of this answer is read as other tokens
        if not has_ids:
            raise ServerError(
                f"{self.url} neither scores a prompt (echo with logprobs) nor tells token ids; nothing can be compared"
            )
        self.scoring = "prefixes"
        scored = []
        for position, token in enumerate(answer):
            # llama.cpp's cache may hold what speculation left.
            fields = {"cache_prompt": False} if self.is_llama_cpp else {}
            scored.append(self._behind([*(ids or ()), *answer[:position]], token, num_reported, **fields))
        return scored

    def _behind(self, prefix: Sequence[int], token: int, num_reported: int, **fields: Any) -> Report:
        """Returns the report of a token behind a prefix, where no draft reaches."""
        if self._harmless is not None:
            fields["logit_bias"] = [[self._harmless, _FORCED]]  # reports are without it
        first = self.complete(prefix, num_reported=num_reported, max_tokens=1, temperature=0.0, **fields).reports[0]
        return Report(token, first.top.get(token, math.nan), first.top)

    def _echo(self, prompt: str | Sequence[int], num_reported: int) -> list[Report]:
        body = self._body(prompt, num_reported, {"max_tokens": 1, "temperature": 0.0}) | {"echo": True}
        try:
            answer = json.loads(self.send("/v1/completions", body))
        except ServerError:
            if self.scoring == "echo":
                raise
            return []
        return self._reports(self._choice(answer) or {})

    def _tokenize(self, prompt: str | Sequence[int]) -> list[int] | None:
        """Returns the prompt's token ids, as llama.cpp tells them; ``None`` where there is no such request."""
        if not isinstance(prompt, str):
            return list(prompt)
        try:
            tokens = json.loads(self.send("/tokenize", {"content": prompt, "add_special": True})).get("tokens")
        except (ServerError, ValueError, AttributeError):
            return None
        return tokens if tokens and all(isinstance(token, int) for token in tokens) else None

    def _body(self, prompt: str | Sequence[int], num_reported: int, fields: dict[str, Any]) -> dict[str, Any]:
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        neutral = _LLAMA_CPP if self.is_llama_cpp else _NEUTRAL
        return {"model": self.model, "prompt": prompt, "logprobs": num_reported} | neutral | fields

    def _choice(self, event: dict[str, Any]) -> dict[str, Any] | None:
        if event.get("error"):
            raise ServerError(f"{self.url} failed: {json.dumps(event['error'])[:300]}")
        answered = event.get("model") or self.model
        if answered != self.model:
            raise ServerError(f"{self.url} answered as {answered}, not as {self.model}; nothing can be compared")
        choices = event.get("choices")
        return choices[0] if choices else None

    def _reports(self, choice: dict[str, Any]) -> list[Report]:
        """Returns the reports of a choice, in the form of OpenAI's completions or of its chat (llama.cpp)."""
        listed = choice.get("logprobs") or {}
        reports = []
        for entry in listed.get("content") or []:
            top = {self._id(likely): likely["logprob"] for likely in entry.get("top_logprobs") or []}
            reports.append(Report(self._id(entry), entry["logprob"], top))
        columns = [listed.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs")]
        for token, log_prob, likeliest in zip(*columns, strict=True) if all(columns) else ():
            top = {self._id(likely): value for likely, value in (likeliest or {}).items()}
            reports.append(Report(self._id(token), math.nan if log_prob is None else log_prob, top))
        return reports

    def _id(self, token: Any) -> int:
        """Returns the id of a token; a text that is no id has a negative number of its own."""
        if isinstance(token, dict):
            if isinstance(token.get("id"), int):
                return token["id"]
            token = token.get("token")
        number = str(token).removeprefix("token_id:")
        if number != token and number.isdecimal():
            return int(number)
        return self._ids.setdefault(str(token), -2 - len(self._ids))

    def get(self, path: str) -> Any:
        """Returns the JSON of a path."""
        answer = self.send(path)
        try:
            return json.loads(answer)
        except ValueError:
            raise ServerError(
                f"{self.url}{path} does not answer in JSON; is this a server with OpenAI's protocol?"
            ) from None

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the events of a stream; a server that does not stream answers in one."""
        data = self.send("/v1/completions", body)
        lines = data.decode().split("\n")  # a text may hold other ends of lines
        if not any(line.startswith("data:") for line in lines):
            yield json.loads(data)
            return
        for line in lines:
            event = line.removeprefix("data:").strip()
            if line.startswith("data:") and event != "[DONE]":
                yield json.loads(event)

    def send(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Returns the answer to a request, a POST if it has a body.

        Raises:
            ServerError: The server refuses it, or does not answer in time.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        for attempt in range(_RETRIES + 1):
            try:
                with self._opener.open(request, timeout=self._timeout) as response:
                    return response.read()
            except urllib.error.HTTPError as error:
                if error.code not in (429, 503) or attempt == _RETRIES:
                    raise ServerError(self._refusal(path, error)) from None
                time.sleep(_wait(error.headers.get("Retry-After"), attempt))
            except (TimeoutError, http.client.HTTPException, OSError) as error:
                reason = getattr(error, "reason", None) or error
                if isinstance(reason, TimeoutError):
                    reason = f"no answer in {self._timeout:g} s; raise --timeout"
                raise ServerError(f"no server answers at {self.url}{path} ({reason})") from None
        raise AssertionError

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> str:
        text = " ".join(error.read().decode(errors="replace").split())[:300]
        if error.code in (401, 403):
            return f"{self.url} wants a key: give one to --key or EAGLE3_API_KEY ({error.code}: {text})"
        return f"{self.url}{path} answered {error.code}: {text}"


def _wait(retry_after: str | None, attempt: int) -> float:
    """Returns the seconds before the next try."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        seconds = 0.5 * 2**attempt
    return min(max(seconds, 0.0), _LONGEST_WAIT)


def parse_counters(text: str) -> dict[str, Any]:
    """Returns the counters of speculation in Prometheus' text format, under the names of ``SpeculationStats``."""
    counters: Counter[str] = Counter()
    per_position: Counter[int] = Counter()
    for name, labels, value in _COUNTER.findall(text):
        position = _POSITION.search(labels)
        if position is None:
            counters[name] += int(float(value))
        else:
            per_position[int(position[1])] += int(float(value))
    if not per_position:
        return dict(counters)
    return {**counters, "num_accepted_tokens_per_pos": [count for _, count in sorted(per_position.items())]}
