"""Documents from JSONL files, as texts that a draft head learns from.

Each line of a JSONL file is one document, in one of three forms::

    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
    {"prompt": "def f(x):", "completion": " return x"}
    {"text": "Once upon a time"}

Messages go through the chat template of the target. A prompt and a text are encoded as they are,
without a template. A document may have the labels ``id``, ``source``, ``name`` and ``category``,
which change nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eagle3_jax.files.jsonl import JsonRow, read_rows, shown
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.text.template import Messages, check_messages
from eagle3_jax.training.texts import Text, document_hash

_LABELS = ("id", "source", "name", "category")
_FORMS = ({"messages"}, {"prompt", "completion"}, {"prompt"}, {"text"})
_FORM = (
    "an object with 'messages', with 'prompt' and 'completion', or with 'text'; it may have"
    f" {', '.join(_LABELS)}"
)


@dataclasses.dataclass(frozen=True)
class Document:
    """One line of a file, checked, and its token ids for a target."""

    where: str  #: File and line, for error messages.
    fields: Mapping[str, Any]  #: The fields of its form, without labels.
    #: :func:`~eagle3_jax.training.texts.document_hash` of its fields as JSON with sorted names.
    hash: int
    target: LoadedTarget  #: The target, for its chat template and stop tokens.
    tokenizer: Tokenizer  #: The target's tokenizer.

    def check_answered(self) -> None:
        """Raises ``ValueError`` if the document has no answer to learn."""
        if "messages" in self.fields:
            answers = self.fields["messages"][1:]  # a first turn answers nothing
            if not any(message["role"] == "assistant" for message in answers):
                raise ValueError(
                    f"{self.where}the assistant answers nothing; give an answer, or use --rewrite"
                )
        elif set(self.fields) == {"prompt"}:
            raise ValueError(
                f"{self.where}the prompt has no 'completion'; give one, or use --rewrite"
            )

    def texts(self) -> Iterator[Text]:
        """Yields one text, or several if the template changes the turns before an answer."""
        return self._conversation() if "messages" in self.fields else self._plain()

    def prompts(self, length: int, opening: int) -> Iterator[tuple[int, ...]]:
        """Yields the token ids that the target continues; see :func:`read_prompts_to_answer`."""
        tokens = tuple(self._prompt())
        if "text" not in self.fields:
            yield tokens
            return
        yield tokens[:opening]
        for start in range(length, len(tokens) - opening + 1, length):
            yield tokens[start : start + opening]

    def _plain(self) -> Iterator[Text]:
        tokens = self._prompt()
        known = 0
        if "completion" in self.fields:
            known = len(tokens)
            tokens = tokens + self._continuation(
                self.fields["prompt"], tokens, self.fields["completion"]
            )

        stops = self.target.stop_tokens
        if stops and not {*tokens[-1:]} & {*stops}:
            tokens = [*tokens, stops[0]]
        yield Text(tokens, [index >= known for index in range(len(tokens))], self.hash)

    def _conversation(self) -> Iterator[Text]:
        messages = self.fields["messages"]
        tokens: list[int] = []
        learn: list[bool] = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number == 0:
                continue
            context = self._rendered(messages[:number])
            context_tokens = self._encode(context)

            # The template changed the turns before, so this answer begins another text.
            if context_tokens[: len(tokens)] != tokens:
                yield Text(tokens, learn, self.hash)
                tokens = []
                learn = []

            answer = self._answer(self._turn(messages[: number + 1], context), message["content"])
            answer_tokens = self._continuation(context, context_tokens, answer)
            learn = (
                learn + [False] * (len(context_tokens) - len(learn)) + [True] * len(answer_tokens)
            )
            tokens = context_tokens + answer_tokens
        yield Text(tokens, learn, self.hash)

    def _turn(self, messages: Messages, context: str) -> str:
        """Returns the last turn, rendered after its context.

        It is empty if the template leaves its content out.
        """
        conversation = self._rendered(messages, answered=True)
        if conversation.startswith(context):
            return conversation.removeprefix(context)

        # The template changes the turns before. This turn is still the last, unless its opening has
        # changed as well: the template of DeepSeek R1 opens reasoning, and drops the reasoning of a
        # turn that is over.
        opening = context.removeprefix(self._rendered(messages[:-1], answered=True))
        start = conversation.rfind(messages[-1]["content"].strip())
        follows = start >= 0 and conversation[:start].rstrip().endswith(opening.rstrip())
        return conversation[start:] if follows else ""

    def _answer(self, turn: str, content: str) -> str:
        """Returns the part of a rendered turn that the target writes.

        It ends with the first stop token after the content.
        """
        # Many templates strip the content.
        written = content if content in turn else content.strip()
        end = turn.find(written) + len(written) if written in turn else 0

        stops = [
            self.tokenizer.decode([token], skip_special_tokens=False)
            for token in self.target.stop_tokens
        ]
        stop_ends = [
            turn.index(stop, end) + len(stop) for stop in stops if stop and stop in turn[end:]
        ]
        return turn[: min(stop_ends, default=end)]

    def _continuation(self, context: str, context_tokens: list[int], text: str) -> list[int]:
        """Returns the token ids of a text after a context.

        Some tokenizers put a space in front of everything that they encode. So both are encoded
        together, unless a token would span the border. Then the text is encoded separately, because
        the target continues the tokens of the context.
        """
        for special_tokens in (False, True):
            tokens = self.tokenizer.encode(context + text, add_special_tokens=special_tokens).ids
            if tokens[: len(context_tokens)] == context_tokens:
                return tokens[len(context_tokens) :]
        return self._encode(text)

    def _prompt(self) -> list[int]:
        """Returns the token ids of a text, or of the prompt of a document."""
        if "messages" not in self.fields:
            return self.tokenizer.encode(self.fields.get("text", self.fields.get("prompt"))).ids
        messages = self.fields["messages"]
        roles = [message["role"] for message in messages]
        if "user" not in roles:
            raise ValueError(f"{self.where}the conversation has no turn of the user; give one")
        # The prompt ends before the first answer to the user.
        question = roles.index("user")
        end = roles.index("assistant", question) if "assistant" in roles[question:] else len(roles)
        return self._encode(self._rendered(messages[:end]))

    def _rendered(self, messages: Messages, *, answered: bool = False) -> str:
        """Returns the text of a conversation up to the beginning of an answer, or ``answered``."""
        if self.target.chat_template is None:
            raise ValueError(
                f"{self.where}{self.target.name} has no chat template; give 'prompt' and"
                " 'completion', or 'text'"
            )

        try:
            return self.target.chat_template.render(messages, add_generation_prompt=not answered)
        except ValueError as error:
            raise ValueError(f"{self.where}{error}") from None

    def _encode(self, text: str) -> list[int]:
        """Returns the token ids of a text without those that the tokenizer adds."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def read_documents(
    paths: Sequence[Path], target: LoadedTarget, *, length: int, dropped: Counter[str]
) -> Iterator[Text]:
    """Reads the texts of documents, with a mask of the tokens that a head learns.

    A head learns the answers of messages, each up to and including its stop token. An answer
    follows the token ids of the conversation before it, as in serving. A conversation is one text
    while these ids begin with the text so far. If the template changes earlier turns, for example
    drops their reasoning, the answer begins another text. Of a prompt with a completion the head
    learns the completion, of a ``text`` all tokens; both end with the target's first stop token.

    Texts are cut at ``length``; only a ``text`` continues in further texts.

    Args:
        paths: JSONL files. All lines are checked before this function returns.
        target: The target, which gives tokenizer, chat template and stop tokens.
        length: Most tokens of a text.
        dropped: Counts the texts that are left out while they are read, by the reason.
            ``duplicate``: an equal document came before. ``no room``: no learnt token is within
            ``length``. ``nothing to learn``: the text has no learnt token, perhaps because the
            template leaves the answer out.

    Returns:
        Texts in the order of the documents. Each has a learnt token after its first.

    Raises:
        ValueError: A line has another form or no answer, ``length`` is out of range, or no text is
            left. The template is absent or refuses a conversation. A message about a line begins
            with file and line.
    """
    documents = _documents(paths, target, length, dropped)
    for document in documents:
        document.check_answered()
    return _texts(documents, length, dropped)


def read_prompts_to_answer(
    paths: Sequence[Path],
    target: LoadedTarget,
    *,
    length: int,
    dropped: Counter[str],
    opening: int = 64,
) -> list[tuple[list[int], int]]:
    """Reads the prompts of documents, for answers that the target writes itself.

    Of messages the prompt ends where the first answer to the user begins, because later turns
    depend on that answer. The conversation may end there, and a prompt needs no completion. A
    ``text`` is cut into pieces of ``length`` tokens, and the beginning of each is a prompt.

    Args:
        paths: JSONL files.
        target: The target, which gives tokenizer and chat template.
        length: Most tokens of a prompt with its answer.
        dropped: Counts the documents that are left out, by the reason. ``duplicate``: an equal
            document or prompt came before. ``no room``: the prompt has ``length`` tokens or more.
            ``nothing to learn``: the prompt is empty.
        opening: Number of tokens of a ``text`` that are the prompt.

    Returns:
        The token ids of each prompt and the hash of its document, in the order of the documents.

    Raises:
        ValueError: As :func:`read_documents`; or a conversation has no user, or ``opening`` is less
            than 1.
    """
    if opening < 1:
        raise ValueError(f"opening is {opening}; expected at least 1 token")

    # By tokens, the hash of the document.
    prompts: dict[tuple[int, ...], int] = {}
    for document in _documents(paths, target, length, dropped):
        for prompt in document.prompts(length, opening):
            if not prompt:
                dropped["nothing to learn"] += 1
            elif len(prompt) >= length:
                dropped["no room"] += 1
            elif prompt in prompts:
                dropped["duplicate"] += 1
            else:
                prompts[prompt] = document.hash

    if not prompts:
        raise _nothing_left(dropped)
    return [(list(tokens), number) for tokens, number in prompts.items()]


def _documents(
    paths: Sequence[Path], target: LoadedTarget, length: int, dropped: Counter[str]
) -> list[Document]:
    """Returns the distinct documents of files."""
    if not 2 <= length <= target.max_positions:
        raise ValueError(f"length is {length}; expected 2 to the {target.holds} of {target.name}")
    if target.tokenizer is None:
        raise ValueError(
            f"{target.name} has no tokenizer, which documents need; give a target with one"
        )

    documents: dict[int, Document] = {}
    for path in paths:
        for row in read_rows(path, _FORM):
            fields = _checked_fields(row)
            number = _hash_of(fields, row.where)
            if number in documents:
                dropped["duplicate"] += 1
            else:
                documents[number] = Document(row.where, fields, number, target, target.tokenizer)
    return list(documents.values())


def _checked_fields(row: JsonRow) -> dict[str, Any]:
    """Returns the fields of a line without labels; raises ``ValueError`` if they have no form."""
    fields = {name: value for name, value in row.values.items() if name not in _LABELS}
    if set(fields) not in _FORMS:
        raise ValueError(f"{row.where}the fields are {shown(list(fields))}; expected {_FORM}")

    for name, value in fields.items():
        if name == "messages":
            try:
                check_messages(value)
            except ValueError as error:
                raise ValueError(f"{row.where}{error}") from None
        elif not isinstance(value, str):
            raise ValueError(f"{row.where}{name!r} is {shown(value)}; expected a text")
    return fields


def _hash_of(fields: Mapping[str, Any], where: str) -> int:
    canonical = json.dumps(fields, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    try:
        return document_hash(canonical)
    except UnicodeEncodeError as error:
        character = canonical[error.start]
        raise ValueError(
            f"{where}{character!r} is not a character of UTF-8 by itself; give text in UTF-8"
        ) from None


def _texts(documents: list[Document], length: int, dropped: Counter[str]) -> Iterator[Text]:
    """Yields the texts of documents, of at most ``length`` tokens."""
    empty = True
    for document in documents:
        for text in document.texts():
            # Only a `text` continues in further pieces. A piece of one token is left out: no token
            # before it predicts it.
            end = max(len(text.tokens) - 1, 1) if "text" in document.fields else 1
            for start in range(0, end, length):
                part = slice(start, start + length)
                piece = Text(text.tokens[part], text.learn[part], text.document)
                if any(piece.learn[1:]):
                    empty = False
                    yield piece
                else:
                    dropped["no room" if any(text.learn[1:]) else "nothing to learn"] += 1
    if empty:
        raise _nothing_left(dropped)


def _nothing_left(dropped: Counter[str]) -> ValueError:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in dropped.items())
    return ValueError(
        f"no document is left to learn from: {reasons}; give other documents or a larger length"
    )
