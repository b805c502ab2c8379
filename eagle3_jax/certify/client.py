"""A client of servers that speak OpenAI's completions or chat.

It asks for tokens with log-probabilities, and for the scores of given tokens.
"""

from __future__ import annotations

import contextlib
import datetime
import email.utils
import json
import math
import re
import secrets
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx

from eagle3_jax.certify.answers import REFUSALS, Answer, CutOff, excerpt, parse_object, reason_in
from eagle3_jax.certify.source import Completion, Refused, Report, ServerError

_RETRIES = 5
_FIRST_WAIT = 0.5  # seconds; each further wait is twice as long
_LONGEST_WAIT = 10.0  # seconds between two tries
_PASSING = (429, 502, 503, 529)  # status codes of a server that is busy or restarts
_KEY = re.compile(r"[!-~]+")  # what a header can carry
_COUNTER = re.compile(
    r"^(?:vllm|llamacpp):spec_decode_(\w+?)_total(?:\{([^}]*)\})? ([\d.e+]+)$", re.MULTILINE
)
_SGLANG_ROUNDS = re.compile(
    r"^sglang:spec_verify_calls_total(?:\{[^}]*\})? ([\d.e+]+)$", re.MULTILINE
)
_POSITION = re.compile(r'position="(\d+)"')
# Without these a server's defaults count.
_NEUTRAL = {"top_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# Fields that are not OpenAI's own, in groups that a server refuses together.
_SHAPE = {"return_token_ids": True, "return_tokens_as_token_ids": True}
_STREAM = {"stream_options": {"include_usage": True}}
_LENGTH = {"ignore_eos": True, "min_tokens": 0}
_SAMPLERS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_GROUPS: tuple[Collection[str], ...] = (
    _SHAPE,
    _STREAM,
    ("cache_salt",),
    _LENGTH,
    _SAMPLERS,
    ("max_tokens",),
)
# Its stream has no ids. Without `samplers` it has those that it was started with. It is not sent
# `ignore_eos`, with which it does not write the end of a text but still reports it.
_LLAMA_CPP = {
    "stream": False,
    "verbose": True,
    "return_tokens": True,
    "response_fields": ["tokens"],
    "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],
    "mirostat": 0,
    "dynatemp_range": 0.0,
}
_FORCED = 1e4  # bias of a token that is always written
_T = TypeVar("_T")


class _Passing(ServerError):
    """What may be over at the next try.

    Attributes:
        retry_after: When the server wants that, as it writes it.
    """

    def __init__(self, message: str, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class _Missing(ServerError):
    """The server has no such path."""


class Client:
    """One server. Threads may share it.

    Attributes:
        url: Its address, without ``/v1``.
        model: The model that it is asked for.
        api: ``completions`` or ``chat``.
        facts: What it says about itself: model, version, build, longest text, method of
            speculation. And what was seen: ``refused_fields``, which are not sent any more, and
            whether there was ``reasoning``.
        scoring: How it scores given tokens: ``echo``, or ``prefixes``, one request for each, or
            ``none``; empty before the first.
        is_llama_cpp: Whether it is llama.cpp's server, which reports nothing about tokens behind
            drafts.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        timeout: float = 120.0,
        api: Literal["completions", "chat"] = "completions",
        key_variable: str = "EAGLE3_API_KEY",
    ) -> None:
        """Asks the server who it is.

        Args:
            url: Its address, with or without ``/v1``.
            model: Its name there. Default: the first that the server lists.
            key: The server's key.
            timeout: Seconds for each request with its whole answer; a silence of the server may
                last as long again.
            api: ``chat`` sends a text as the message of a user. Token ids cannot be sent, and
                nothing can be scored.
            key_variable: The variable of the environment that the key comes from, for messages.

        Raises:
            ServerError: Nothing answers there, it wants a key, or it is another kind of server.
        """
        self.url = _address(url)
        self.api = api
        self.scoring = "none" if api == "chat" else ""
        self.facts: dict[str, Any] = {}
        self._path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
        self._timeout = timeout
        self._key = key or ""
        self._key_variable = key_variable

        headers = {"Content-Type": "application/json"}
        if key:
            if not _KEY.fullmatch(key):
                raise ServerError(
                    f"the key in {key_variable} has a space, a line break or a letter that no"
                    " key has"
                )
            headers["Authorization"] = f"Bearer {key}"
        context = ssl.create_default_context()  # the certificates of the system
        limits = httpx.Limits(max_connections=None)
        # A proxy of the environment must not be asked for a server on this machine.
        self._http = httpx.Client(
            headers=headers, trust_env=False, timeout=timeout, limits=limits, verify=context
        )

        self._has_answered = False
        self._has_marks = False
        self._lock = threading.Lock()
        # Sets are replaced, not changed, so that threads may read them without the lock.
        self._refused: frozenset[str] = frozenset()
        self._accepted: frozenset[str] = frozenset()

        self.model = self._find_model(model)
        self._ask_who_it_is()
        self.is_llama_cpp = "build_info" in self.facts
        self._harmless = (self._tokenize("a") or [None])[-1]

    def _find_model(self, model: str | None) -> str:
        """Returns the name of the model, and notes what the server says about it."""
        entry: dict[str, Any] = {}
        try:
            listed = self.get("/v1/models").get("data")
            entries = [
                entry
                for entry in (listed if isinstance(listed, list) else [])
                if isinstance(entry, dict) and isinstance(entry.get("id"), str)
            ]
            if not entries:
                raise ServerError(
                    f"{self.url}/v1/models lists no model; is this a server with OpenAI's protocol?"
                )
            named = [entry for entry in entries if model in (None, entry["id"])]
            if not named:
                served = excerpt(", ".join(entry["id"] for entry in entries), 200)
                raise ServerError(
                    f"{self.url} serves {served}, not {model}; name one of these with --model"
                )
            entry = named[0]
        except _Missing as error:
            if model is None:
                raise ServerError(f"{error}; name the model with --model") from None

        name: str = model or entry["id"]
        # Without directories of the server's machine, so that a certificate may be published.
        self._note("model", Path(name).name if name.startswith("/") else name)
        root = entry.get("root")
        self._note("root", Path(root).name if isinstance(root, str) else None)
        self._note("max_model_len", entry.get("max_model_len"))
        return name

    def _ask_who_it_is(self) -> None:
        # Of vLLM, llama.cpp and SGLang; each server has one of them.
        paths = {
            "/version": "version",
            "/props": "build_info",
            "/get_server_info": "speculative_algorithm",
        }
        for path, field in paths.items():
            with contextlib.suppress(ServerError):
                values = self.get(path)
                self._note(field, values.get(field))
                settings = values.get("default_generation_settings")
                if isinstance(settings, dict):
                    self._note("max_model_len", settings.get("n_ctx"))

    def _note(self, name: str, value: Any) -> None:
        if value and isinstance(value, str | int):
            self.facts[name] = value

    def counters(self) -> dict[str, Any]:
        """Returns the counters of speculation since the server started; empty where there are none.

        vLLM has them, llama.cpp with ``--metrics``, and SGLang with ``--enable-metrics``, which
        counts rounds only.
        """
        try:
            return parse_counters(self.send("/metrics").decode(errors="replace"))
        except ServerError:
            return {}

    def complete(
        self, prompt: str | Sequence[int], *, num_reported: int, **fields: Any
    ) -> Completion:
        """Continues a prompt, streamed.

        llama.cpp's answers are not streamed, and what it does not report is asked for behind each
        prefix.

        Args:
            prompt: Text or token ids.
            num_reported: Number of log-probabilities of each position.
            fields: Further fields of the request: ``max_tokens``, ``temperature`` and others. They
                replace the neutral values that are sent otherwise.

        Raises:
            Refused: The server refuses a field or its value.
            ServerError: The server fails, is slow, answers as another model, or leaves tokens
                unreported.
        """
        body = self._body(prompt, num_reported, {"stream": True} | _STREAM, fields)
        answer = self._ask(body, fields)
        reports = answer.reports
        chunk_index = answer.chunk_index
        if self.is_llama_cpp and self.api == "completions" and reports:
            reports = self._complete_reports(prompt, answer.tokens, reports, num_reported)
            chunk_index = [0] * len(reports)

        # The number of tokens is told, or known from the limit that ended the answer. It is not
        # that of the first choice where there are several, and llama.cpp counts accepted drafts
        # behind the end of a text, too.
        numbers = []
        if not self.is_llama_cpp and not answer.more_texts:
            numbers.append(answer.num_tokens)
        if answer.finish_reason == "length":
            numbers.append(fields.get("max_tokens"))
        expected = max((number for number in numbers if number is not None), default=0)
        if reports and expected > len(reports):
            raise ServerError(
                f"{self.url} reports {len(reports)} of the {expected} tokens of an answer; the"
                " others cannot be judged"
            )
        return Completion(
            text=answer.text,
            reports=reports,
            chunk_index=chunk_index,
            prompt_ids=answer.prompt_ids,
            finish_reason=answer.finish_reason,
            num_drafted=answer.num_drafted,
            more_texts=answer.more_texts,
        )

    def _complete_reports(
        self,
        prompt: str | Sequence[int],
        tokens: list[int],
        reports: list[Report],
        num_reported: int,
    ) -> list[Report]:
        """Asks llama.cpp for the reports that it withholds.

        They come from the keys and values that are cached, which may be those that speculation
        left.
        """
        tokens = tokens or [report.token for report in reports]
        # Parts of characters have no entry, so it is not known whose entries the others are.
        known = (
            reports
            if len(reports) == len(tokens)
            else [Report(token, math.nan, {}) for token in tokens]
        )
        if all(report.top for report in known):
            return known

        ids = self._tokenize(prompt)
        if ids is None:
            raise ServerError(
                f"{self.url} reports nothing about drafted tokens, and has no /tokenize to ask for"
                " them"
            )
        return [
            report
            if report.top
            else self._behind([*ids, *tokens[:position]], tokens[position], num_reported)
            for position, report in enumerate(known)
        ]

    def score(
        self, prompt: str | Sequence[int], completion: Completion, *, num_reported: int
    ) -> list[Report]:
        """Scores the tokens of an answer behind their own prefixes, without drafts.

        A prompt is scored in one pass (``echo``). A server that has no such request is asked for
        the first token behind each prefix, which no draft reaches. Neither reads what speculation
        left in a cache of prefixes.

        Returns:
            A report of each token. Its log-probability is not a number if only likelier tokens are
            reported there. No report if the server reads the answer's text as other tokens.

        Raises:
            Refused: The server only chats.
            ServerError: The server does neither.
        """
        if self.api == "chat":
            raise Refused("a chat cannot be continued from given tokens; use --api completions")
        answer = completion.tokens
        if not answer:
            return []

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
                return []

        if not has_ids:
            raise ServerError(
                f"{self.url} neither scores a prompt (echo with logprobs) nor tells token ids;"
                " nothing can be compared"
            )
        self.scoring = "prefixes"
        return [
            self._behind([*(ids or ()), *answer[:position]], token, num_reported, **self.apart())
            for position, token in enumerate(answer)
        ]

    def _behind(self, prefix: Sequence[int], token: int, num_reported: int, **cache: Any) -> Report:
        """Returns the report of a token behind a prefix, where no draft reaches."""
        # llama.cpp reports nothing about a part of a character, so another token is written instead
        # of it. The bias that writes it is not in the reports.
        for written in (token, self._harmless) if self.is_llama_cpp else (None,):
            fields: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
            if written is not None:
                fields["logit_bias"] = [[written, _FORCED]]
            body = self._body(prefix, num_reported, {"stream": False}, fields | cache)
            reports = self._ask(body, fields).reports
            if reports:
                top = reports[0].top
                return Report(token, top.get(token, math.nan), top)
        raise ServerError(
            f"{self.url} reports nothing about the token behind a prefix; nothing can be compared"
        )

    def _echo(self, prompt: str | Sequence[int], num_reported: int) -> list[Report]:
        fields = {"max_tokens": 1, "temperature": 0.0, "echo": True, "stream": False}
        body = self._body(prompt, num_reported, fields, self.apart())
        try:
            return self._ask(body, fields).reports
        except ServerError:
            if self.scoring == "echo":
                raise
            return []

    def apart(self) -> dict[str, Any]:
        """Returns the fields of a request that reads nothing that speculation left in a cache."""
        if self.is_llama_cpp:
            return {"cache_prompt": False}
        return {} if "cache_salt" in self._refused else {"cache_salt": secrets.token_hex(8)}

    def _tokenize(self, prompt: str | Sequence[int]) -> list[int] | None:
        """Returns the prompt's token ids, as llama.cpp tells them; ``None`` for other servers."""
        if not isinstance(prompt, str):
            return list(prompt)
        if not self.is_llama_cpp:
            return None

        body = {"content": prompt, "add_special": True}
        try:
            data = self.send("/tokenize", body)
            tokens = parse_object(data, f"{self.url}/tokenize").get("tokens")
        except ServerError:
            return None
        is_readable = isinstance(tokens, list) and all(type(token) is int for token in tokens)
        return tokens or None if is_readable else None

    def _body(
        self,
        prompt: str | Sequence[int],
        num_reported: int,
        manner: dict[str, Any],
        fields: dict[str, Any],
    ) -> dict[str, Any]:
        """Returns a request with neutral values of all fields that are not given."""
        body: dict[str, Any] = {"model": self.model}
        if self.api == "completions":
            body |= {
                "prompt": prompt if isinstance(prompt, str) else list(prompt),
                "logprobs": num_reported,
            }
        elif isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
            body |= {"messages": messages, "logprobs": True, "top_logprobs": num_reported}
        else:
            raise ServerError(
                "a chat takes texts, not token ids; give prompts as texts or use --api completions"
            )

        body |= _NEUTRAL | _SAMPLERS | manner
        if not self.is_llama_cpp:
            return body | _SHAPE | _LENGTH | fields
        body |= _LLAMA_CPP | fields
        return body | {"repeat_penalty": body["repetition_penalty"]}

    def _ask(self, body: dict[str, Any], fields: Collection[str]) -> Answer:
        """Sends a request without the fields that the server refuses.

        Args:
            body: The request.
            fields: Those of its fields that must not be left out.
        """
        # `max_tokens` has another name where it is refused.
        refused = self._refused.intersection(fields) - {"max_tokens"}
        if refused:
            raise Refused(f"{self.url} refuses {', '.join(sorted(refused))}")
        try:
            return self._answer(body)
        except Refused:
            with self._lock:
                return self._find_refused(body, fields)

    def _find_refused(self, body: dict[str, Any], fields: Collection[str]) -> Answer:
        """Leaves out group after group of fields until a request is answered, and notes these."""
        known = self._accepted | self._refused
        fixed = set(fields) - ({"max_tokens"} if self.api == "chat" else set())
        groups = [{name for name in group if name in body} - fixed - known for group in _GROUPS]
        groups = [group for group in groups if group]

        for number in range(len(groups) + 1):
            try:
                answer = self._answer(body, set().union(*groups[:number]))
                break
            except Refused:
                if number == len(groups):
                    raise

        # The last group had to be left out; each of those before it may not have been refused.
        refused = groups[:number]
        for group in refused[:-1]:
            fewer = [other_group for other_group in refused if other_group is not group]
            with contextlib.suppress(Refused):
                answer = self._answer(body, set().union(*fewer))
                refused = fewer

        if refused:
            self._refused |= set().union(*refused)
            self.facts["refused_fields"] = sorted(self._refused)
        return answer

    def _answer(self, body: dict[str, Any], without: Collection[str] = ()) -> Answer:
        """Returns the answer to a request without some fields, and without refused ones."""
        dropped = {*without, *self._refused}
        sent = {name: value for name, value in body.items() if name not in dropped}
        if "max_tokens" in dropped:
            sent["max_completion_tokens"] = body["max_tokens"]

        answer = self._request(self._path, sent, self._read)
        self._accepted |= sent.keys()
        if answer.has_reasoning:
            self.facts["reasoning"] = True
        return answer

    def _read(self, data: bytes) -> Answer:
        try:
            answer = Answer(data, address=self.url, model=self.model)
        except CutOff as error:
            raise _Passing(str(error)) from None

        # A server that once ended a stream with [DONE] always does.
        if self._has_marks and data.startswith(b"data:") and not answer.is_marked:
            raise _Passing(f"{self.url} cut off a stream before its end")
        self._has_marks |= answer.is_marked
        return answer

    def get(self, path: str) -> dict[str, Any]:
        """Returns the JSON object of a path."""
        return parse_object(self.send(path), f"{self.url}{path}")

    def send(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Returns the answer to a request, a POST if it has a body.

        Raises:
            Refused: The server refuses it.
            ServerError: The server fails, or does not answer in time.
        """
        return self._request(path, body, bytes)

    def _request(self, path: str, body: dict[str, Any] | None, read: Callable[[bytes], _T]) -> _T:
        """Returns what is read from an answer; asks again after what may pass."""
        for attempt in range(_RETRIES):
            try:
                return read(self._send_once(path, body))
            except _Passing as error:
                time.sleep(_wait(error.retry_after, attempt))
        return read(self._send_once(path, body))

    def _send_once(self, path: str, body: dict[str, Any] | None) -> bytes:
        method = "GET" if body is None else "POST"
        content = None if body is None else json.dumps(body).encode()
        end = time.monotonic() + self._timeout
        try:
            with self._http.stream(method, self.url + path, content=content) as response:
                data = bytearray()
                for piece in response.iter_bytes():
                    data += piece
                    # The timeouts of httpx are those of one read.
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("the answer is not complete")
        except httpx.TimeoutException:
            raise ServerError(
                f"no server answers at {self.url}{path} (no answer in {self._timeout:g} s; raise"
                " --timeout)"
            ) from None
        except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
            kind = _Passing if self._has_answered else ServerError
            raise kind(
                f"no server answers at {self.url}{path} ({excerpt(str(error), 200)})"
            ) from None
        except httpx.HTTPError as error:
            raise ServerError(
                f"{self.url}{path} cannot be read ({excerpt(str(error), 200)})"
            ) from None

        self._has_answered = True
        if not response.is_success:
            raise self._failure(path, response, data.decode(errors="replace"))
        return bytes(data)

    def _failure(self, path: str, response: httpx.Response, text: str) -> ServerError:
        """Returns the error of an answer, as one line without the key."""
        status = response.status_code
        location = response.headers.get("Location", "")
        if self._key:
            text = text.replace(self._key, "(key)")
            location = location.replace(self._key, "(key)")
        text = excerpt(reason_in(text), 300)
        message = f"{self.url}{path} answered {status}: {text}"

        if 300 <= status < 400:
            address = excerpt(location, 200).partition("?")[0].removesuffix(path)
            return ServerError(
                f"{self.url} redirects to {address}; give that address, the key is not sent on"
            )
        if status in (401, 403):
            return ServerError(
                f"{self.url} wants a key: put it into the environment variable"
                f" {self._key_variable}, or name another with --api-key-env ({status}: {text})"
            )
        if status in (404, 405):
            if path == self._path:
                api = "completions" if self.api == "chat" else "chat"
                message = f"{self.url} has no {path}; try --api {api} ({status}: {text})"
            return _Missing(message)
        if status in _PASSING:
            return _Passing(message, response.headers.get("Retry-After"))
        return Refused(message) if status in REFUSALS else ServerError(message)


def _address(url: str) -> str:
    """Returns the address of a server, without ``/v1``."""
    try:
        parts = httpx.URL(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.host)
        is_address &= not (parts.userinfo or parts.query or parts.fragment)
    except (httpx.InvalidURL, ValueError):
        is_address = False

    if not is_address:
        # A name and a password in it are not repeated.
        shown = excerpt(url.rpartition("@")[2], 200)
        raise ServerError(
            f"{shown!r} is not the address of a server; expected something like"
            " http://localhost:8000"
        )
    return url.rstrip("/").removesuffix("/v1")


def _wait(retry_after: str | None, attempt: int) -> float:
    """Returns the seconds before the next try: those that the server wants, if it tells."""
    seconds = math.nan
    with contextlib.suppress(ValueError, TypeError):
        seconds = float(retry_after or "")
    if math.isnan(seconds):
        with contextlib.suppress(ValueError, TypeError):
            date = email.utils.parsedate_to_datetime(retry_after or "")
            seconds = (date - datetime.datetime.now(datetime.UTC)).total_seconds()
    if math.isnan(seconds):
        seconds = _FIRST_WAIT * 2**attempt
    return min(max(seconds, 0.0), _LONGEST_WAIT)


def parse_counters(text: str) -> dict[str, Any]:
    """Returns the counters in a text of Prometheus, under the names of ``SpeculationStats``."""
    counters: Counter[str] = Counter()
    per_position: Counter[int] = Counter()

    # Each engine of a server has counters of its own, which are added.
    for name, labels, value in _COUNTER.findall(text):
        position = _POSITION.search(labels)
        if position is None:
            counters[name] += int(float(value))
        else:
            per_position[int(position[1])] += int(float(value))
    for value in _SGLANG_ROUNDS.findall(text):
        counters["num_drafts"] += int(float(value))

    if not per_position:
        return dict(counters)
    return {
        **counters,
        "num_accepted_tokens_per_pos": [count for _, count in sorted(per_position.items())],
    }
