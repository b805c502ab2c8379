"""OpenAI's completions and chat completions: requests as they are read, answers as they are written."""

from __future__ import annotations

import dataclasses
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_jax.chat.conversation import apply_chat_template
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.results import Pieces
from eagle3_jax.serving.engine import Request
from eagle3_jax.stats import TokenLogProb

_MOST_STOPS = 4
_LONGEST_STOP = 64  # characters
# Fields of other servers with the values that ask for nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...] | None] = {
    "n": (1,), "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "min_p": (0,), "min_tokens": (0,), "logit_bias": ({},), "suffix": ("",), "tools": ([],), "tool_choice": ("none",),
    "response_format": ({"type": "text"},), "use_beam_search": (False,), "skip_special_tokens": (True,),
    "length_penalty": (1,), "user": None, "request_id": None, "store": (False,), "metadata": None,
}  # fmt: skip


class BadRequest(ValueError):
    """A request that is not understood; ``param`` is the name of its field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclasses.dataclass(frozen=True)
class CompletionRequest:
    """What a client asks for.

    Attributes:
        request: The prompt, its limit and its sampling.
        is_chat: Whether it is a chat completion.
        stops: Texts that end the answer.
        stream: Whether the answer comes in chunks.
        include_usage: Whether a last chunk has the usage.
        logprobs: Number of likeliest tokens with log-probabilities at each position; ``None`` for no log-probabilities.
        echo: Whether the answer begins with the prompt, and its log-probabilities.
        with_ids: Whether token ids are returned.
        tokens_as_ids: Whether tokens in log-probabilities are ids (``token_id:7``) and not texts.
    """

    request: Request
    is_chat: bool
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    logprobs: int | None
    echo: bool
    with_ids: bool
    tokens_as_ids: bool


def read(body: Any, decoder: SpeculativeDecoder, *, is_chat: bool, room: int, fresh_seed: int) -> CompletionRequest:
    """Reads a request.

    Args:
        body: The parsed JSON.
        decoder: Its target encodes the prompt.
        is_chat: Whether it is a chat completion.
        room: Tokens of prompt and answer together.
        fresh_seed: Seed of a request that names none.

    Raises:
        BadRequest: A field is malformed, or asks for what this server does not do.
    """
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object")
    fields = _Fields(body)
    fields.take("model", str, None)
    tokens = _prompt(fields, decoder, is_chat=is_chat)
    limit = fields.take("max_completion_tokens", int, None) if is_chat else None
    limit = fields.take("max_tokens", int, limit)
    if limit is None:
        limit = room - len(tokens) if is_chat else 16  # OpenAI's default
    stop = fields.take("stop", (str, list), None)
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > _MOST_STOPS or not all(isinstance(text, str) and 0 < len(text) <= _LONGEST_STOP for text in stops):
        raise BadRequest(f"stop takes up to {_MOST_STOPS} texts of 1 to {_LONGEST_STOP} characters", "stop")
    options = fields.take("stream_options", dict, None)
    stream = fields.take("stream", bool, False)
    if options is not None and not stream:
        raise BadRequest("stream_options needs stream", "stream_options")
    logprobs = fields.take("logprobs", (int, bool), None)
    if is_chat:
        top = fields.take("top_logprobs", int, 0)
        logprobs = top if logprobs else None
    elif isinstance(logprobs, bool):
        raise BadRequest("logprobs is a number of tokens", "logprobs")
    echo = fields.take("echo", bool, False)
    if limit < (0 if echo else 1):
        raise BadRequest(f"max_tokens is {limit}; expected at least 1", "max_tokens")
    if len(tokens) + limit > room:
        raise BadRequest(
            f"the prompt has {len(tokens)} tokens and max_tokens is {limit}; a row holds {room} together", "max_tokens"
        )
    request = Request(
        tokens=tokens,
        max_new_tokens=limit,
        temperature=fields.number("temperature", 1.0, least=0.0),
        top_k=max(0, fields.take("top_k", int, 0)),
        top_p=fields.number("top_p", 1.0, least=1e-9, most=1.0),
        seed=fields.take("seed", int, fresh_seed) % 2**32,
        ignore_stop=fields.take("ignore_eos", bool, False),
    )
    completion_request = CompletionRequest(
        request=request,
        is_chat=is_chat,
        stops=stops,
        stream=stream,
        include_usage=bool((options or {}).get("include_usage")),
        logprobs=logprobs,
        echo=echo,
        with_ids=fields.take("return_token_ids", bool, False),
        tokens_as_ids=fields.take("return_tokens_as_token_ids", bool, False),
    )
    fields.refuse_others()
    return completion_request


class _Fields:
    """The fields of a body that have not been read yet."""

    def __init__(self, body: dict[str, Any]) -> None:
        self._left = dict(body)

    def take(self, name: str, kind: type | tuple[type, ...], default: Any) -> Any:
        """Returns a field, or the default where it is absent or null."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(expected.__name__ for expected in kinds)
            raise BadRequest(f"{name} is {value!r:.80}; expected {names}", name)
        return value

    def number(self, name: str, default: float, *, least: float, most: float = math.inf) -> float:
        """Returns a finite number in a range."""
        value = float(self.take(name, (int, float), default))
        if not least <= value <= most or math.isinf(value):
            raise BadRequest(f"{name} is {value}; expected {least:g} to {most:g}", name)
        return value

    def refuse_others(self) -> None:
        """Refuses every field that would change the answer."""
        for name, value in self._left.items():
            neutral = _NEUTRAL.get(name, ())
            if value is None or neutral is None or value in neutral:
                continue
            raise BadRequest(f"{name} is not supported by this server", name)


def _prompt(fields: _Fields, decoder: SpeculativeDecoder, *, is_chat: bool) -> list[int]:
    """Returns the token ids of a prompt or of a conversation."""
    try:
        if is_chat:
            messages = [_plain(message) for message in fields.take("messages", list, [])]
            return decoder.encode(apply_chat_template(decoder.target, messages))
        prompt = fields.take("prompt", (str, list), None)
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        if prompt is None or (isinstance(prompt, list) and not all(type(token) is int for token in prompt)):
            raise BadRequest("prompt is a text or a list of token ids; send one prompt in a request", "prompt")
        return decoder.encode(prompt)
    except ValueError as error:
        raise BadRequest(str(error), "messages" if is_chat else "prompt") from None


def _plain(message: Any) -> Any:
    """Returns a message whose content is a text; a list of text parts is joined."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return message
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise BadRequest("content has a part that is no text", "messages")
    return {**message, "content": "".join(texts)}  # type: ignore[arg-type]


class Answer:
    """Writes one answer as JSON: text that is complete, token ids, log-probabilities and the reason of its end."""

    def __init__(self, completion_request: CompletionRequest, decoder: SpeculativeDecoder, *, model: str) -> None:
        kind = "chatcmpl" if completion_request.is_chat else "cmpl"
        self._request = completion_request
        self._decoder = decoder
        self._pieces = Pieces(decoder.target.tokenizer)
        self._base = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._held = ""  # the end of the text, which may begin a stop text
        self._is_first = True
        self.num_tokens = 0
        self.finish_reason: str | None = None

    def add(self, tokens: Sequence[int], logprobs: Sequence[TokenLogProb] | None, reason: str | None) -> dict[str, Any]:
        """Returns the choice for new tokens. ``finish_reason`` is then set if the answer has ended.

        Args:
            tokens: New tokens.
            logprobs: One entry per token, if they are recorded.
            reason: Why the answer ends with these tokens; ``None`` if it goes on.
        """
        self.num_tokens += len(tokens)
        shown = tokens
        if reason == "stop" and tokens and tokens[-1] in self._decoder.stop_tokens:
            shown = tokens[:-1]
        text = self._held + "".join(self._pieces.decode(list(shown)))
        self.finish_reason = reason
        starts = [text.index(stop) for stop in self._request.stops if stop in text]
        if starts:
            text = text[: min(starts)]
            self.finish_reason = "stop"
        held = 0 if self.finish_reason else self._longest_begun(text)
        self._held = text[len(text) - held :]
        return self._choice(text[: len(text) - held], tokens, logprobs)

    def _longest_begun(self, text: str) -> int:
        """Returns how many characters at the end of a text begin a stop text."""
        for stop in self._request.stops:
            for size in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:size]):
                    return size
        return 0

    def _choice(self, text: str, tokens: Sequence[int], logprobs: Sequence[TokenLogProb] | None) -> dict[str, Any]:
        completion_request = self._request
        scored = None if completion_request.logprobs is None or logprobs is None else self.logprobs(tokens, logprobs)
        choice: dict[str, Any] = {"index": 0, "logprobs": scored, "finish_reason": self.finish_reason}
        if completion_request.is_chat:
            part = {"role": "assistant", "content": text} if self._is_first else {"content": text}
            choice["delta" if completion_request.stream else "message"] = part
        else:
            choice |= {"text": text, "stop_reason": None}
        if completion_request.with_ids:
            choice["token_ids"] = list(tokens)
            if self._is_first:
                choice["prompt_token_ids"] = completion_request.request.tokens
        self._is_first = False
        return choice

    def logprobs(self, tokens: Sequence[int], logprobs: Sequence[TokenLogProb | None]) -> dict[str, Any]:
        """Returns log-probabilities in the form of the request; ``None`` stands for a token without one."""
        count = self._request.logprobs or 0
        tops = []
        for token, scored in zip(tokens, logprobs, strict=True):
            tops.append({} if scored is None else dict([*scored.top[:count], (token, scored.logprob)]))
        values = [None if scored is None else scored.logprob for scored in logprobs]
        if self._request.is_chat:
            content = []
            for token, value, top in zip(tokens, values, tops, strict=True):
                entries = [{"token": self._name(likely), "logprob": score} for likely, score in top.items()]
                content.append({"token": self._name(token), "logprob": value, "top_logprobs": entries[:count]})
            return {"content": content}
        named = [{self._name(likely): score for likely, score in top.items()} or None for top in tops]
        return {
            "tokens": [self._name(token) for token in tokens],
            "token_logprobs": values,
            "top_logprobs": named,
            "text_offset": [],
        }

    def _name(self, token: int) -> str:
        tokenizer = self._decoder.target.tokenizer
        if self._request.tokens_as_ids or tokenizer is None:
            return f"token_id:{token}"
        return tokenizer.decode([token], skip_special_tokens=False)

    def body(self, choices: list[dict[str, Any]], *, usage: bool) -> dict[str, Any]:
        """Returns the whole answer, or one chunk of it."""
        kind = "text_completion"
        if self._request.is_chat:
            kind = "chat.completion.chunk" if self._request.stream else "chat.completion"
        body = {**self._base, "object": kind, "choices": choices}
        if usage:
            prompt = len(self._request.request.tokens)
            body["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": self.num_tokens,
                "total_tokens": prompt + self.num_tokens,
            }
        return body
