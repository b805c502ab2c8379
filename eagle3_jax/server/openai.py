"""OpenAI's completions and chat completions: requests as read, answers as written."""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.engine.engine import Event
from eagle3_jax.files.jsonl import parse_json
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.prompts.request import Request
from eagle3_jax.stats import TokenLogProb
from eagle3_jax.text.stops import StoppedText
from eagle3_jax.text.tokens import Pieces
from eagle3_jax.types import FinishReason

MOST_STOPS = 4
LONGEST_STOP = 64  # characters
_DEFAULT_LIMIT = 16  # OpenAI's, of completions
_HOTTEST = 1e6  # temperature; larger ones overflow float32
_LEAST_LOGPROB = -9999.0  # minus infinity is not a number of JSON
# Fields of other servers, with the values that change nothing; `None` is any value.
_NEUTRAL: Mapping[str, tuple[Any, ...] | None] = {
    "n": (1,), "best_of": (1,), "min_p": (0,), "min_tokens": (0,), "length_penalty": (1,),
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "logit_bias": ({},), "suffix": ("",), "tools": ([],), "tool_choice": ("none",),
    "parallel_tool_calls": None, "response_format": ({"type": "text"},), "stop_token_ids": ([],),
    "use_beam_search": (False,), "skip_special_tokens": (True,), "store": (False,), "user": None,
    "request_id": None, "metadata": None,
}  # fmt: skip
FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CAPACITY: "length",
}


class BadRequest(ValueError):
    """A request that cannot be answered.

    Attributes:
        param: The name of its field, if it is about one.
        status: Status code of HTTP.
    """

    def __init__(self, message: str, param: str | None = None, *, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """A request of a client.

    Attributes:
        request: The prompt, its limit, its sampling and its stop texts. The limit is 0 if only the
            prompt is echoed.
        is_chat: Whether it is a chat completion.
        prompt_text: The prompt as text; ``None`` if it came as token ids.
        stream: Whether the answer comes in chunks.
        include_usage: Whether a last chunk has the usage.
        logprobs: Number of likeliest tokens with log-probabilities at each position; ``None`` for
            no log-probabilities.
        echo: Whether the answer begins with the prompt.
        with_ids: Whether token ids are returned.
        tokens_as_ids: Whether tokens in log-probabilities are ids (``token_id:7``) and not texts.
    """

    request: Request
    is_chat: bool
    prompt_text: str | None
    stream: bool
    include_usage: bool
    logprobs: int | None
    echo: bool
    with_ids: bool
    tokens_as_ids: bool


@dataclasses.dataclass(frozen=True)
class Offer:
    """What a server offers.

    Attributes:
        decoder: Its target encodes prompts.
        model: Name of the model.
        room: Most tokens of a prompt and its answer together.
        num_logprobs: ``L``, most log-probabilities of a position; ``None`` for none.
    """

    decoder: SpeculativeDecoder
    model: str
    room: int
    num_logprobs: int | None


def wrong_model(name: str, offer: Offer) -> BadRequest:
    """Returns the refusal of a model that the server does not have."""
    return BadRequest(
        f"model is {name!r:.80}; this server has {offer.model!r}", "model", status=404
    )


def parse_body(body: bytes) -> dict[str, Any]:
    """Parses the body of a request.

    Raises:
        BadRequest: It is not an object in strict JSON, or one of its texts has half of a
            surrogate pair.
    """
    try:
        values = parse_json(body.decode())
        json.dumps(values, ensure_ascii=False).encode()
    except ValueError as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadRequest("the body is not a JSON object")
    return values


def read_request(values: Mapping[str, Any], offer: Offer, *, is_chat: bool) -> CompletionRequest:
    """Reads a request. One without a seed gets a random seed.

    Args:
        values: The fields of the body.
        offer: The server's model and limits.
        is_chat: Whether it is a chat completion.

    Raises:
        BadRequest: A field is malformed, or the server cannot do what it asks for.
    """
    target = offer.decoder.target
    fields = _Fields(values)
    model = fields.take("model", str, offer.model)
    if model != offer.model:
        raise wrong_model(model, offer)
    logprobs = _read_logprobs(fields, offer, is_chat=is_chat)
    stops = _read_stops(fields, offer)
    stream = fields.take("stream", bool, False)
    stream_options = fields.take("stream_options", dict, None)
    if stream_options is not None and not stream:
        raise BadRequest("stream_options needs stream", "stream_options")
    of_stream = _Fields(stream_options or {})
    include_usage = of_stream.take("include_usage", bool, False)
    # Clients ask for more numbers in each chunk and for padding, and do without them.
    for name in ("continuous_usage_stats", "include_obfuscation"):
        of_stream.take(name, bool, False)
    of_stream.refuse_unread()
    echo = False if is_chat else fields.take("echo", bool, False)

    # The limit depends on the length of the prompt in tokens.
    unlimited = _read_prompt(fields, target, is_chat=is_chat)
    try:
        encoded = unlimited.encoded(target)
    except ValueError as error:
        raise BadRequest(str(error), "messages" if is_chat else "prompt") from None
    least = 0 if echo else 1
    limit = _read_limit(fields, offer.room, len(encoded.tokens), least=least, is_chat=is_chat)

    request = dataclasses.replace(
        encoded,
        max_new_tokens=limit,
        temperature=fields.number("temperature", 1.0, least=0.0, most=_HOTTEST),
        top_k=min(max(0, fields.take("top_k", int, 0)), target.vocab_size),
        top_p=fields.number("top_p", 1.0, least=1e-9, most=1.0),
        seed=fields.take("seed", int, secrets.randbits(32)) % 2**32,
        stops=stops,
        ignore_stop=fields.take("ignore_eos", bool, False),
    )
    prompt_text = unlimited.prompt if isinstance(unlimited.prompt, str) and not is_chat else None
    completion = CompletionRequest(
        request=request,
        is_chat=is_chat,
        prompt_text=prompt_text,
        stream=stream,
        include_usage=include_usage,
        logprobs=logprobs,
        echo=echo,
        with_ids=fields.take("return_token_ids", bool, False),
        tokens_as_ids=fields.take("return_tokens_as_token_ids", bool, False),
    )

    fields.refuse_unread()
    return completion


class _Fields:
    """The fields of a body that have not been read yet."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._unread = dict(values)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Returns a field, or the default where it is absent or null."""
        value = self._unread.pop(name, None)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(expected.__name__ for expected in kinds)
            raise BadRequest(f"{name} is {value!r:.80}; expected {names}", name)
        return value

    def number(self, name: str, default: float, *, least: float, most: float) -> float:
        """Returns a number in a range."""
        value = self.take(name, (int, float), default)
        if not least <= value <= most:
            raise BadRequest(f"{name} is {value!r:.40}; expected {least:g} to {most:g}", name)
        return float(value)

    def refuse_unread(self) -> None:
        """Refuses every field that has not been read and might change the answer."""
        for name, value in self._unread.items():
            neutral = _NEUTRAL.get(name, ())
            if value is None or neutral is None:
                continue
            # Python's `True` equals 1.
            if value in neutral and isinstance(value, bool) == isinstance(neutral[0], bool):
                continue
            raise BadRequest(f"{name!r:.80} is not supported by this server; leave it out", name)


def _read_logprobs(fields: _Fields, offer: Offer, *, is_chat: bool) -> int | None:
    """Returns the number of log-probabilities of a position."""
    param = "logprobs"
    count = fields.take("logprobs", bool if is_chat else int, None)
    if is_chat:
        most_likely = fields.take("top_logprobs", int, None)
        if most_likely is not None and not count:
            raise BadRequest("top_logprobs needs logprobs: true", "top_logprobs")
        count = (most_likely or 0) if count else None
        param = "top_logprobs" if most_likely else param
    if count is None:
        return None

    if count < 0:
        raise BadRequest(f"{param} is {count}; expected 0 or more", param)
    if offer.num_logprobs is None or count > offer.num_logprobs:
        recorded = "none" if offer.num_logprobs is None else f"up to {offer.num_logprobs}"
        raise BadRequest(
            f"{count} log-probabilities were requested and this server records {recorded}; start it"
            f" with --logprobs {count}",
            param,
        )
    return count


def _read_stops(fields: _Fields, offer: Offer) -> tuple[str, ...]:
    """Returns the texts that end the answer."""
    stop = fields.take("stop", (str, list), None)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())

    are_texts = all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in stops)
    if len(stops) > MOST_STOPS or not are_texts:
        raise BadRequest(
            f"stop takes up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters", "stop"
        )

    if stops and offer.decoder.target.tokenizer is None:
        raise BadRequest(f"{offer.model} has no tokenizer, so no text can end an answer", "stop")
    return stops


def _read_limit(fields: _Fields, room: int, num_prompt: int, *, least: int, is_chat: bool) -> int:
    """Returns the number of new tokens. A chat's default is what fits, a completion's OpenAI's."""
    default = max(least, room - num_prompt) if is_chat else _DEFAULT_LIMIT
    limit = fields.take("max_tokens", int, default)
    if is_chat:
        limit = fields.take("max_completion_tokens", int, limit)

    if limit < least:
        raise BadRequest(f"max_tokens is {limit!r:.40}; expected at least {least}", "max_tokens")
    if num_prompt + limit > room:
        raise BadRequest(
            f"the prompt has {num_prompt} tokens and max_tokens is {limit!r:.40}; the server holds"
            f" {room} together, so shorten one of them or start it with a larger --capacity",
            "max_tokens",
        )
    return limit


def _read_prompt(fields: _Fields, target: LoadedTarget, *, is_chat: bool) -> Request:
    """Returns a request with the prompt or the conversation, and nothing else yet."""
    if is_chat:
        if target.chat_template is None:
            raise BadRequest(f"{target.name} has no chat template; use /v1/completions", "messages")
        messages = fields.take("messages", list, [])
        messages = [_read_turn(message, number) for number, message in enumerate(messages, 1)]
        return Request("", 0, messages=messages)

    prompt = fields.take("prompt", (str, list), None)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    is_text = isinstance(prompt, str)
    if not is_text and (prompt is None or not all(type(token) is int for token in prompt)):
        raise BadRequest(
            "prompt is a text or a list of token ids; send one prompt in a request", "prompt"
        )
    return Request(prompt, 0)


def _read_turn(message: Any, number: int) -> Any:
    """Returns a message as templates take it: a list of text parts is joined.

    The role ``developer`` is OpenAI's newer name of ``system``. Fields that are null are absent.
    """
    if not isinstance(message, dict):
        return message
    turn = {name: value for name, value in message.items() if value is not None}
    for name in turn:
        if name not in ("role", "content"):
            raise BadRequest(
                f"message {number} has {name!r:.80}, which is not supported by this server; leave"
                " it out",
                f"messages[{number - 1}].{name}",
            )
    if turn.get("role") == "developer":
        turn["role"] = "system"

    content = turn.get("content")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not all(isinstance(text, str) for text in texts):
            raise BadRequest("content has a part that is not text", "messages")
        turn["content"] = "".join(texts)  # type: ignore[arg-type]
    return turn


class Answer:
    """Writes one answer as JSON: text, token ids, log-probabilities and the reason of its end.

    Attributes:
        num_tokens: Number of new tokens.
        finish_reason: ``stop`` or ``length``; ``None`` until the answer ends.
    """

    def __init__(self, completion: CompletionRequest, offer: Offer) -> None:
        kind = "chatcmpl" if completion.is_chat else "cmpl"
        tokenizer = offer.decoder.target.tokenizer
        self._completion = completion
        self._tokenizer = tokenizer
        self._text = StoppedText(tokenizer, completion.request.stops)

        self._base = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": offer.model,
        }
        # Characters that were written: the end of the text may begin a stop text.
        self._num_written = 0
        # Characters of all tokens so far.
        self._offset = 0
        self._is_first = True
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def add_prompt(self, scores: Sequence[TokenLogProb | None] | None) -> dict[str, Any]:
        """Returns the choice that repeats the prompt.

        Args:
            scores: One entry per token if log-probabilities are wanted. The first token has none.
        """
        request = self._completion.request
        pieces = Pieces(self._tokenizer).decode(request.tokens)
        text = self._completion.prompt_text
        if text is None:
            text = "".join(pieces)
        if request.max_new_tokens == 0:
            self.finish_reason = "length"
        return self._choice(text, request.tokens, pieces, scores)

    def add(self, event: Event) -> dict[str, Any]:
        """Returns the choice for new tokens."""
        pieces = self._text.add(event.tokens, event.finish_reason)
        tokens = event.tokens[: len(pieces)]
        self.num_tokens += len(tokens)
        self.finish_reason = FINISH_REASONS.get(event.finish_reason)
        if self._text.stop is not None:
            self.finish_reason = "stop"

        # What may begin a stop text waits for the next tokens.
        num_held = 0 if self.finish_reason else self._text.num_open
        end = len(self._text.text) - num_held
        new_text = self._text.text[self._num_written : end]
        self._num_written = end
        scores = None if event.logprobs is None else event.logprobs[: len(tokens)]
        return self._choice(new_text, tokens, pieces, scores)

    def _choice(
        self,
        text: str,
        tokens: list[int],
        pieces: list[str],
        scores: Sequence[TokenLogProb | None] | None,
    ) -> dict[str, Any]:
        completion = self._completion
        logprobs = None
        if completion.logprobs is not None and scores is not None:
            if completion.is_chat:
                logprobs = self._chat_logprobs(tokens, scores)
            else:
                logprobs = self._logprobs(tokens, pieces, scores)

        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": logprobs,
            "finish_reason": self.finish_reason,
        }
        if completion.is_chat:
            part = {"role": "assistant", "content": text} if self._is_first else {"content": text}
            choice["delta" if completion.stream else "message"] = part
        else:
            choice["text"] = text
        choice["stop_reason"] = self._text.stop
        if completion.with_ids:
            choice["token_ids"] = list(tokens)
            if self._is_first:
                choice["prompt_token_ids"] = completion.request.tokens

        self._is_first = False
        return choice

    def _logprobs(
        self, tokens: list[int], pieces: list[str], scores: Sequence[TokenLogProb | None]
    ) -> dict[str, list[Any]]:
        """Returns log-probabilities in the form of completions."""
        likeliest: list[dict[str, float] | None] = []
        offsets = []
        for token, piece, score in zip(tokens, pieces, scores, strict=True):
            likeliest.append(None if score is None else dict(self._likeliest(score, token)))
            offsets.append(self._offset)
            self._offset += len(piece)

        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": [
                None if score is None else _finite(score.logprob) for score in scores
            ],
            "top_logprobs": likeliest,
            "text_offset": offsets,
        }

    def _chat_logprobs(
        self, tokens: list[int], scores: Sequence[TokenLogProb | None]
    ) -> dict[str, list[Any]]:
        """Returns log-probabilities in the form of chat completions."""
        content = []
        for token, score in zip(tokens, scores, strict=True):
            # Only a prompt has a token without a log-probability.
            assert score is not None
            likeliest = self._likeliest(score, None)
            entry = _chat_entry(self._name(token), _finite(score.logprob))
            entry["top_logprobs"] = [_chat_entry(name, logprob) for name, logprob in likeliest]
            content.append(entry)
        return {"content": content}

    def _likeliest(self, score: TokenLogProb, token: int | None) -> list[tuple[str, float]]:
        """Returns names and log-probabilities of the tokens that a client wants to see.

        They are the likeliest ones, as many as it asks for, and ``token``.
        """
        logprobs = dict(score.top[: self._completion.logprobs])
        if token is not None:
            logprobs[token] = score.logprob
        return [(self._name(likely), _finite(logprob)) for likely, logprob in logprobs.items()]

    def _name(self, token: int) -> str:
        if self._completion.tokens_as_ids or self._tokenizer is None:
            return f"token_id:{token}"
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def body(self, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        """Returns an answer, or one chunk of it.

        Args:
            choices: One choice, or none in a chunk of usage.
            usage: Whether the numbers of tokens are added.
        """
        kind = "text_completion"
        if self._completion.is_chat:
            kind = "chat.completion.chunk" if self._completion.stream else "chat.completion"
        body = {**self._base, "object": kind, "choices": choices}

        if usage:
            num_prompt = len(self._completion.request.tokens)
            body["usage"] = {
                "prompt_tokens": num_prompt,
                "completion_tokens": self.num_tokens,
                "total_tokens": num_prompt + self.num_tokens,
            }
        return body


def join_choices(choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns one choice for all chunks of an answer.

    Texts and lists are joined; of other values the last counts.
    """
    return functools.reduce(_join, choices)


def _join(first: Any, second: Any) -> Any:
    if second is None:
        return first
    if isinstance(first, dict) and isinstance(second, dict):
        return {name: _join(first.get(name), second.get(name)) for name in [*first, *second]}
    are_joined = isinstance(first, str | list) and type(first) is type(second)
    return first + second if are_joined else second


def _chat_entry(name: str, logprob: float) -> dict[str, Any]:
    """Returns a token in the form of chat completions.

    A part of a character has no bytes of its own.
    """
    is_complete = "\N{REPLACEMENT CHARACTER}" not in name
    return {
        "token": name,
        "logprob": logprob,
        "bytes": list(name.encode()) if is_complete else None,
    }


def _finite(logprob: float) -> float:
    return max(_LEAST_LOGPROB, logprob)  # NaN is not larger
