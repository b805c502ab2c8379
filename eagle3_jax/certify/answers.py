"""Reads answers of servers that speak OpenAI's completions or chat.

An answer is complete, or an error of one line.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

from eagle3_jax.certify.source import Refused, Report, ServerError

REFUSALS = (400, 422)  # status codes of requests that are understood and refused
_ID = re.compile(r"token_id:([0-9]{1,9})")
_NO_DATA = (b":", b"event:", b"id:", b"retry:")  # lines of a stream that have no data
_T = TypeVar("_T")


class CutOff(ServerError):
    """An answer has no end."""


def excerpt(text: str, length: int) -> str:
    """Returns the first characters of a text, on one line."""
    return " ".join(text.split())[:length]


def reason_in(text: str) -> str:
    """Returns the message of an error in JSON, of OpenAI's form or FastAPI's; else the text."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return text
    for name in ("error", "message", "detail"):
        if isinstance(values, dict):
            values = values.get(name, values)
    return values if isinstance(values, str) else text


def parse_object(data: bytes, address: str) -> dict[str, Any]:
    """Returns the JSON object that an address answered with.

    Raises:
        ServerError: The data is something else.
    """
    text = data.decode(errors="replace")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ServerError(
            f"{address} does not answer in JSON but {excerpt(text, 80)!r}; is this a server with"
            " OpenAI's protocol?"
        ) from None
    if not isinstance(values, dict):
        raise ServerError(f"{address} answered {excerpt(text, 80)}; expected a JSON object")
    return values


class Answer:
    """What one answer says, read event by event.

    Attributes:
        reports: The reports of the first choice's tokens.
        chunk_index: Position of each of these tokens in the chunk that it came in, from 0.
        prompt_ids: The prompt's token ids, if they are told.
        tokens: The answer's token ids, from llama.cpp.
        num_drafted: Number of drafted tokens, if it is told.
        num_tokens: Number of tokens of all choices, if it is told.
        has_reasoning: Whether a text of reasoning came with the answer.
        is_marked: Whether a stream ended with the mark ``[DONE]``.
    """

    def __init__(self, data: bytes, *, address: str, model: str) -> None:
        """Reads the body of an answer: events, or one JSON object.

        Args:
            data: The body.
            address: The server, for messages.
            model: The model that must have answered.

        Raises:
            Refused: The server refuses the request within its answer.
            CutOff: A stream has no end.
            ServerError: The answer is not JSON, has an error, is another model's, or cannot be
                read.
        """
        self._address = address
        self._model = model
        self._texts: dict[int, list[str]] = defaultdict(list)
        self._reasons: dict[int, str] = {}
        self.reports: list[Report] = []
        self.chunk_index: list[int] = []
        self.prompt_ids: list[int] | None = None
        self.tokens: list[int] = []
        self.num_drafted: int | None = None
        self.num_tokens: int | None = None
        self.has_reasoning = False
        self.is_marked = False

        lines = [line.strip() for line in data.split(b"\n")]  # a text may hold other ends of lines
        events = [
            line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")
        ]
        if events:
            self._read_stream(lines, events)
        else:
            self._read_object(data)

    def _read_object(self, data: bytes) -> None:
        """Reads an answer that is not a stream."""
        self._add(parse_object(data, self._address))
        self.chunk_index = [0] * len(self.reports)  # it did not come in chunks
        if not self._reasons:
            shown = excerpt(data.decode(errors="replace"), 80)
            raise ServerError(
                f"{self._address} answered {shown}; expected choices with a finish_reason"
            )

    def _read_stream(self, lines: list[bytes], events: list[bytes]) -> None:
        """Reads the events of a stream."""
        strange = [line for line in lines if line and not line.startswith((b"data:", *_NO_DATA))]
        if strange:
            shown = excerpt(strange[0].decode(errors="replace"), 80)
            raise ServerError(f"{self._address} answered {shown!r} in a stream")
        for event in events:
            if event == b"[DONE]":
                self.is_marked = True
            else:
                self._add(parse_object(event, self._address))

        # Every choice that was begun must have said why it ends.
        if not self._reasons.keys() >= self._texts.keys() or not self._reasons:
            raise CutOff(f"{self._address} cut off a stream before its end")

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return "".join(self._texts[0])

    @property
    def more_texts(self) -> tuple[str, ...]:
        """The texts of the other choices."""
        return tuple("".join(self._texts[index]) for index in sorted(self._texts) if index > 0)

    @property
    def finish_reason(self) -> str:
        """Why the first choice ends; empty if that is not told."""
        return self._reasons.get(0, "")

    def _add(self, event: dict[str, Any]) -> None:
        error = event.get("error")
        if error:
            is_refusal = isinstance(error, dict) and error.get("code") in REFUSALS
            kind = Refused if is_refusal else ServerError
            raise kind(f"{self._address} failed: {excerpt(json.dumps(error), 300)}")

        # A gateway may send some requests to another model.
        answered = event.get("model") or self._model
        if answered != self._model:
            shown = excerpt(str(answered), 80)
            raise ServerError(
                f"{self._address} answered as {shown}, not as {self._model}; nothing can be"
                " compared"
            )

        self.num_tokens = self._count(event, "usage", "completion_tokens", self.num_tokens)
        self.num_drafted = self._count(event, "timings", "draft_n", self.num_drafted)
        self.tokens += self._ids(self._field(event, "__verbose", {}), "tokens")
        for choice in self._field(event, "choices", []):
            if not isinstance(choice, dict):
                raise self._unreadable("a choice", choice, "an object")
            self._add_choice(choice)

    def _add_choice(self, choice: dict[str, Any]) -> None:
        index = self._field(choice, "index", 0)
        message = self._field(choice, "delta", {}) or self._field(choice, "message", {})
        self._texts[index].append(
            self._field(choice, "text", "") or self._field(message, "content", "")
        )
        self.has_reasoning |= bool(message.get("reasoning_content") or message.get("reasoning"))
        reason = self._field(choice, "finish_reason", "")
        if reason:
            self._reasons[index] = reason

        # Only the first choice is judged.
        if index == 0:
            self.prompt_ids = self.prompt_ids or self._ids(choice, "prompt_token_ids") or None
            reports = self._reports(self._field(choice, "logprobs", {}))
            self.reports += reports
            self.chunk_index += range(len(reports))

    def _reports(self, listed: dict[str, Any]) -> list[Report]:
        """Returns reports that are listed in the form of chats, or of completions."""
        content = self._field(listed, "content", [])
        if content:
            return [self._chat_report(entry) for entry in content]

        reports = []
        tokens = self._field(listed, "tokens", [])
        columns = (
            _column(listed, name, len(tokens)) for name in ("token_logprobs", "top_logprobs")
        )
        for token, log_prob, likely in zip(tokens, *columns, strict=True):
            entries = likely.items() if isinstance(likely, dict) else ()
            top = {self._token({"token": name}): _number(value) for name, value in entries}
            reports.append(_report(self._token({"token": token}), log_prob, top))
        return reports

    def _chat_report(self, entry: Any) -> Report:
        likely = entry.get("top_logprobs") if isinstance(entry, dict) else None
        candidates = likely if isinstance(likely, list) else []
        if not all(isinstance(candidate, dict) for candidate in candidates):
            candidates = []
        top = {
            self._token(candidate): _number(candidate.get("logprob")) for candidate in candidates
        }
        return _report(self._token(entry), entry.get("logprob"), top)

    def _token(self, entry: Any) -> int:
        """Returns the id of a token; without one, a negative number that stands for its bytes."""
        if not isinstance(entry, dict):
            raise self._unreadable("a token", entry, "an object")
        number = entry.get("id")
        if _is_id(number):
            return number

        text = entry.get("token")
        if isinstance(text, str):
            named = _ID.fullmatch(text)
            if named:
                return int(named[1])
            text = text.encode(errors="surrogatepass")

        # Parts of characters may have equal texts, but not equal bytes.
        data = entry.get("bytes")
        if isinstance(data, list) and data and all(map(_is_byte, data)):
            text = bytes(data)
        if not isinstance(text, bytes):
            raise self._unreadable("a token", text, "a text")
        return -2 - int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())

    def _ids(self, values: dict[str, Any], name: str) -> list[int]:
        """Returns a list of token ids; empty if there is none."""
        ids = self._field(values, name, [])
        if not all(map(_is_id, ids)):
            raise self._unreadable(name, ids, "token ids")
        return ids

    def _count(
        self, event: dict[str, Any], name: str, field: str, default: int | None
    ) -> int | None:
        """Returns a number in an object of an event; the default if it is not there."""
        number = self._field(event, name, {}).get(field)
        return number if type(number) is int else default

    def _field(self, values: dict[str, Any], name: str, default: _T) -> _T:
        """Returns a field, or the default if it is absent or null."""
        value = values.get(name)
        if value is None:
            return default
        if type(value) is not type(default):
            raise self._unreadable(name, value, type(default).__name__)
        return value

    def _unreadable(self, name: str, value: Any, expected: str) -> ServerError:
        return ServerError(
            f"{self._address} answered {excerpt(repr(value), 80)} as {name}; expected {expected}"
        )


def _is_id(value: Any) -> TypeGuard[int]:
    """Whether a value of JSON is the id of a token; ``True`` is not a number."""
    return type(value) is int and 0 <= value < 2**31


def _is_byte(value: Any) -> bool:
    return type(value) is int and 0 <= value < 256


def _report(token: int, log_prob: Any, top: dict[int, float]) -> Report:
    """Returns a report.

    One that cannot be read has no numbers, so that it is counted and not judged.
    """
    if top:
        top.setdefault(token, _number(log_prob))
    report = Report(token, _number(log_prob), top)
    return report if report.is_readable else Report(token, math.nan, {})


def _number(value: Any) -> float:
    """Returns a number of JSON; not a number for everything else."""
    try:
        return float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        return math.nan


def _column(listed: dict[str, Any], name: str, length: int) -> Sequence[Any]:
    """Returns a list with a value for each token, ``None`` where there is none."""
    values = listed.get(name)
    values = values[:length] if isinstance(values, list) else []
    return [*values, *[None] * (length - len(values))]
