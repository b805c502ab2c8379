"""Documents from JSONL files, as texts that a draft head learns from.

Each line of a JSONL file is one document, in one of three forms::

    {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
    {"prompt": "def f(x):", "completion": " return x"}
    {"text": "Once upon a time"}

Messages go through the chat template of the target. A prompt and a text are encoded as they are, without a template.
A document may have the labels ``id``, ``source``, ``name`` and ``category``, which change nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eagle3_jax.chat.template import Messages, check_messages
from eagle3_jax.files.jsonl import JsonRow, read_rows, shown
from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.training.texts import Text, document_hash

_LABELS = ("id", "source", "name", "category")
_FORMS = ({"messages"}, {"prompt", "completion"}, {"prompt"}, {"text"})
_FORM = f"an object with 'messages', with 'prompt' and 'completion', or with 'text'; it may have {', '.join(_LABELS)}"


@dataclasses.dataclass(frozen=True)
class Document:
    """One line of a file, checked."""

    where: str  #: File and line, for error messages.
    fields: Mapping[str, Any]  #: The fields of its form, without labels.
    hash: int  #: :func:`~eagle3_jax.training.texts.document_hash` of its fields as JSON with sorted names.


def read_documents(
    paths: Sequence[Path], target: LoadedTarget, *, length: int, dropped: Counter[str]
) -> Iterator[Text]:
    """Reads the texts of documents, with a mask of the tokens that a head learns.

    A head learns the answers of messages, each up to and including its stop token. An answer follows the token ids of
    the conversation before it, as in serving. A conversation is one text while these ids begin with the text so far. If
    the template changes earlier turns, for example drops their reasoning, the answer begins another text. Of a prompt
    with a completion the head learns the completion, of a ``text`` all tokens; both end with the target's first stop
    token.

    Texts are cut at ``length``; only a ``text`` continues in further texts.

    Args:
        paths: JSONL files. All lines are checked before this function returns.
        target: The target, which gives tokenizer, chat template and stop tokens.
        length: Most tokens of a text.
        dropped: Counts the texts that are left out while they are read, by the reason. ``duplicate``: an equal document
            came before. ``no room``: no learnt token is within ``length``. ``nothing to learn``: the text has no learnt
            token, perhaps because the template leaves the answer out.

    Returns:
        Texts in the order of the documents. Each has a learnt token after its first.

    Raises:
        ValueError: A line has another form or no answer, ``length`` is out of range, or no text is left. The template
            is absent or refuses a conversation. A message about a line begins with file and line.
    """
    documents = _documents(paths, target, length, dropped)
    for document in documents:
        _check_answered(document)
    return _texts(documents, target, length, dropped)


def read_prompts_to_answer(
    paths: Sequence[Path], target: LoadedTarget, *, length: int, dropped: Counter[str], opening: int = 64
) -> list[tuple[list[int], int]]:
    """Reads the prompts of documents, for answers that the target writes itself.

    Of messages the prompt ends where the first answer to the user begins, because later turns depend on that answer.
    The conversation may end there, and a prompt needs no completion. A ``text`` is cut into pieces of ``length``
    tokens, and the beginning of each is a prompt.

    Args:
        paths: JSONL files.
        target: The target, which gives tokenizer and chat template.
        length: Most tokens of a prompt with its answer.
        dropped: Counts the documents that are left out, by the reason. ``duplicate``: an equal document or prompt came
            before. ``no room``: the prompt has ``length`` tokens or more. ``nothing to learn``: the prompt is empty.
        opening: Number of tokens of a ``text`` that are the prompt.

    Returns:
        The token ids of each prompt and the hash of its document, in the order of the documents.

    Raises:
        ValueError: As :func:`read_documents`; or a conversation has no user, or ``opening`` is less than 1.
    """
    if opening < 1:
        raise ValueError(f"opening is {opening}; expected at least 1 token")
    prompts: dict[tuple[int, ...], int] = {}
    for document in _documents(paths, target, length, dropped):
        for prompt in _prompts(document, target, length, opening):
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


# ---------------------------------------------------------------- lines


def _documents(paths: Sequence[Path], target: LoadedTarget, length: int, dropped: Counter[str]) -> list[Document]:
    """Returns the distinct documents of files."""
    if not 2 <= length <= target.max_positions:
        raise ValueError(f"length is {length}; expected 2 to the {target.holds} of {target.name}")
    documents: dict[int, Document] = {}
    for path in paths:
        for row in read_rows(path, _FORM):
            document = _document(row)
            if document.hash in documents:
                dropped["duplicate"] += 1
            else:
                documents[document.hash] = document
    return list(documents.values())


def _document(row: JsonRow) -> Document:
    """Checks the form of a line."""
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
    canonical = json.dumps(fields, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    try:
        number = document_hash(canonical)
    except UnicodeEncodeError as error:
        character = canonical[error.start]
        raise ValueError(f"{row.where}{character!r} is no character of UTF-8 by itself; give text in UTF-8") from None
    return Document(row.where, fields, number)


def _check_answered(document: Document) -> None:
    if "messages" in document.fields:
        answers = document.fields["messages"][1:]  # a first turn answers nothing
        if not any(message["role"] == "assistant" for message in answers):
            raise ValueError(f"{document.where}the assistant answers nothing; give an answer, or use --rewrite")
    elif set(document.fields) == {"prompt"}:
        raise ValueError(f"{document.where}the prompt has no 'completion'; give one, or use --rewrite")


def _nothing_left(dropped: Counter[str]) -> ValueError:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in dropped.items())
    return ValueError(f"no document is left to learn from: {reasons}; give other documents or a larger length")


# ---------------------------------------------------------------- token ids


def _texts(documents: list[Document], target: LoadedTarget, length: int, dropped: Counter[str]) -> Iterator[Text]:
    """Yields the texts of documents, of at most ``length`` tokens."""
    empty = True
    for document in documents:
        read_texts = _conversation if "messages" in document.fields else _plain
        for text in read_texts(document, target):
            # A piece of one token is left out: no token before it predicts it.
            starts = range(0, max(len(text.tokens) - 1, 1), length) if "text" in document.fields else (0,)
            for start in starts:
                piece = Text(text.tokens[start : start + length], text.learn[start : start + length], text.document)
                if any(piece.learn[1:]):
                    empty = False
                    yield piece
                else:
                    dropped["no room" if any(text.learn[1:]) else "nothing to learn"] += 1
    if empty:
        raise _nothing_left(dropped)


def _plain(document: Document, target: LoadedTarget) -> Iterator[Text]:
    """Yields the one text of a document without turns."""
    tokenizer = _tokenizer(target)
    tokens = _prompt(document, target)
    known = 0
    if "completion" in document.fields:
        known = len(tokens)
        tokens = tokens + _continuation(tokenizer, document.fields["prompt"], tokens, document.fields["completion"])
    ended = bool(tokens) and tokens[-1] in target.stop_tokens
    if target.stop_tokens and not ended:
        tokens = [*tokens, target.stop_tokens[0]]
    yield Text(tokens, [index >= known for index in range(len(tokens))], document.hash)


def _conversation(document: Document, target: LoadedTarget) -> Iterator[Text]:
    """Yields the texts of a conversation: one, or several if the template changes the turns before an answer."""
    messages = document.fields["messages"]
    tokenizer = _tokenizer(target)
    tokens: list[int] = []
    learn: list[bool] = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number == 0:
            continue
        context = _rendered(document, target, messages[:number])
        context_tokens = tokenizer.encode(context, add_special_tokens=False).ids
        if context_tokens[: len(tokens)] != tokens:
            yield Text(tokens, learn, document.hash)
            tokens = []
            learn = []
        turn = _turn(document, target, number, context)
        answer = _answer(turn, message["content"], target)
        answer_tokens = _continuation(tokenizer, context, context_tokens, answer)
        learn = learn + [False] * (len(context_tokens) - len(learn)) + [True] * len(answer_tokens)
        tokens = context_tokens + answer_tokens
    yield Text(tokens, learn, document.hash)


def _turn(document: Document, target: LoadedTarget, number: int, context: str) -> str:
    """Returns a rendered turn after its context; empty if the template leaves its content out."""
    messages = document.fields["messages"][: number + 1]
    conversation = _rendered(document, target, messages, answered=True)
    if conversation.startswith(context):
        return conversation.removeprefix(context)
    # The template changes the turns before. This turn is still the last, unless its opening has changed as well: the
    # template of DeepSeek R1 opens reasoning, and drops the reasoning of a turn that is over.
    opening = context.removeprefix(_rendered(document, target, messages[:-1], answered=True))
    start = conversation.rfind(messages[-1]["content"].strip())
    follows = start >= 0 and conversation[:start].rstrip().endswith(opening.rstrip())
    return conversation[start:] if follows else ""


def _answer(turn: str, content: str, target: LoadedTarget) -> str:
    """Returns the part of a rendered turn that the target writes: up to the first stop token after the content."""
    written = content if content in turn else content.strip()
    end = turn.find(written) + len(written) if written in turn else 0
    stops = [_tokenizer(target).decode([token], skip_special_tokens=False) for token in target.stop_tokens]
    stop_ends = [turn.index(stop, end) + len(stop) for stop in stops if stop and stop in turn[end:]]
    return turn[: min(stop_ends, default=end)]


def _continuation(tokenizer: Tokenizer, context: str, context_tokens: list[int], text: str) -> list[int]:
    """Returns the token ids of a text after a context.

    Some tokenizers put a space in front of everything that they encode. So both are encoded together, unless a token
    would span the border. Then the text is encoded separately, because the target continues the tokens of the context.
    """
    for special_tokens in (False, True):
        tokens = tokenizer.encode(context + text, add_special_tokens=special_tokens).ids
        if tokens[: len(context_tokens)] == context_tokens:
            return tokens[len(context_tokens) :]
    return tokenizer.encode(text, add_special_tokens=False).ids


def _prompts(document: Document, target: LoadedTarget, length: int, opening: int) -> Iterator[tuple[int, ...]]:
    """Yields the token ids that the target continues; see :func:`read_prompts_to_answer`."""
    tokens = tuple(_prompt(document, target))
    if "text" not in document.fields:
        yield tokens
        return
    yield tokens[:opening]
    for start in range(length, len(tokens) - opening + 1, length):
        yield tokens[start : start + opening]


def _prompt(document: Document, target: LoadedTarget) -> list[int]:
    """Returns the token ids of a text, or of the prompt of a document."""
    if "messages" not in document.fields:
        return _tokenizer(target).encode(document.fields.get("text", document.fields.get("prompt"))).ids
    messages = document.fields["messages"]
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise ValueError(f"{document.where}the conversation has no turn of the user; give one")
    question = roles.index("user")
    end = roles.index("assistant", question) if "assistant" in roles[question:] else len(roles)
    context = _rendered(document, target, messages[:end])
    return _tokenizer(target).encode(context, add_special_tokens=False).ids


def _rendered(document: Document, target: LoadedTarget, messages: Messages, *, answered: bool = False) -> str:
    """Returns the text of a conversation, up to the beginning of an answer or, if it is answered, up to its end."""
    if target.chat_template is None:
        raise ValueError(
            f"{document.where}{target.name} has no chat template; give 'prompt' and 'completion', or 'text'"
        )
    try:
        return target.chat_template.render(messages, add_generation_prompt=not answered)
    except ValueError as error:
        raise ValueError(f"{document.where}{error}") from None


def _tokenizer(target: LoadedTarget) -> Tokenizer:
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer, which documents need; give a target with one")
    return target.tokenizer
