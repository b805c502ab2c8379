"""Chat templates: the text of a conversation in the form that a model was trained on.

A template is a program in the language of Jinja, and comes with the model. It runs in Jinja's
sandbox, with the functions that transformers offers it.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eagle3_jax.files.jsonl import shown

ROLES = ("system", "user", "assistant")
Messages = Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a model.

    Attributes:
        source: The program.
        special_tokens: The texts of special tokens by the names that templates give them, such as
            ``bos_token``.
    """

    source: str
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ChatTemplate | None:
        """Reads the template of a ``tokenizer_config.json``; ``None`` if it has none.

        Args:
            config: ``chat_template`` is a text, or a list of objects with ``name`` and
                ``template``; the one named ``default`` is used. A field whose name ends in
                ``_token`` is a special token if its value is a text or an object with the text as
                its ``content``.

        Raises:
            ValueError: ``chat_template`` has another form, or no template in the list is named
                ``default``.
        """
        source = config.get("chat_template")
        if isinstance(source, list):
            named = (entry for entry in source if isinstance(entry, Mapping))
            source = next(
                (entry.get("template") for entry in named if entry.get("name") == "default"), source
            )
        if not source:
            return None

        if not isinstance(source, str):
            raise ValueError(
                f"chat_template is {shown(source)}; expected a text, or a list with a template"
                " 'default'"
            )

        special_tokens = {}
        for name, value in config.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(text, str):
                special_tokens[name] = text
        return cls(source, special_tokens)

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """Returns the text of a conversation.

        Args:
            messages: The turns; each with ``role`` (``system``, ``user`` or ``assistant``) and
                ``content``, a text.
            add_generation_prompt: Whether the text ends where the model's answer begins.

        Raises:
            ValueError: The messages have another form, the template refuses them, or it is not
                valid; in one line.
        """
        check_messages(messages)
        try:
            program = _compiled(self.source)
        # Not only syntax errors: compilation computes constant expressions.
        except Exception as error:
            raise ValueError(f"the chat template is not valid: {_reason(error)}") from None

        try:
            return program(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self.special_tokens,
            )
        # A template can fail in any way.
        except Exception as error:
            raise ValueError(
                f"the chat template does not take {shown(list(messages))}: {_reason(error)}"
            ) from None


def check_messages(messages: Any) -> None:
    """Checks that messages are the turns of a conversation.

    Args:
        messages: A list of at least one object with ``role`` (``system``, ``user`` or
            ``assistant``) and ``content`` (a text), and nothing else.

    Raises:
        ValueError: They are not; the message says which turn.
    """
    form = """a list of turns such as {"role": "user", "content": "Why?"}"""
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError(f"messages are {shown(messages)}; expected {form}")

    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise ValueError(f"message {number} is {shown(message)}; expected {form}")
        if message["role"] not in ROLES:
            raise ValueError(
                f"message {number} has the role {shown(message['role'])}; expected"
                f" {', '.join(ROLES)}"
            )
        if not isinstance(message["content"], str):
            raise ValueError(
                f"message {number} has the content {shown(message['content'])}; expected a text"
            )


def _reason(error: Exception) -> str:
    """Returns the first line of an error's message, and the line of the template if it is known."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = getattr(error, "lineno", None)
    return reason if line is None else f"line {line}: {reason}"


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Callable[..., str]:
    """Compiles a template in the environment of transformers."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The tag that marks the model's answers for training. Here its body is ordinary text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    # Jinja's own filter escapes for HTML.
    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source).render
