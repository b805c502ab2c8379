"""JSON and text from people: a file, the standard input or an option, read whole or refused in one line."""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_jax.cli._errors import Misuse

MOST_TOKENS = 1_000_000_000  # limits are 32-bit on the device
STDIN = "-"

_FIELDS = ("prompt", "prompt_ids", "max_new_tokens")
# What published files keep beside a prompt; no command reads it to generate.
_LABELS = ("name", "kind", "id", "task_id", "category", "question_id", "reference")
_HUMAN_EVAL = ("entry_point", "canonical_solution", "test")
_SYNONYMS = {
    "prompt": ("text", "input", "content", "inputs"),
    "prompt_ids": ("ids", "tokens", "token_ids", "input_ids", "prompt_token_ids"),
    "max_new_tokens": ("max_tokens", "max_length", "max_completion_tokens", "max_output_tokens", "n_predict", "limit"),
}
_OPTIONS = ("temperature", "top_k", "top_p", "seed", "ignore_eos")
_FORM = """an object such as {"prompt": "def f(x):"} or {"prompt_ids": [1, 2], "max_new_tokens": 64}"""


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt of a command line or a file.

    Attributes:
        prompt: Text or token ids.
        max_new_tokens: Its limit.
        where: For error messages: empty, or the line of the file.
    """

    prompt: str | list[int]
    max_new_tokens: int
    where: str = ""


class JsonRow(NamedTuple):
    """One line of a JSONL file.

    Attributes:
        where: File and line, for error messages.
        values: The object on it.
    """

    where: str
    values: dict[str, Any]


def read_text(path: Path) -> str:
    """A text file in UTF-8 with or without a byte order mark; ``-`` is the standard input.

    Raises:
        Misuse: It is in another encoding; the message says where.
    """
    name = name_of(path)
    if str(path) != STDIN:
        content = path.read_bytes()
    elif sys.stdin is None:
        raise Misuse(f"{name} is closed; name a file instead of '-'")
    else:
        if sys.stdin.isatty():
            print("reading from the terminal; end with Ctrl-D", file=sys.stderr)
        content = sys.stdin.buffer.read()
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise Misuse(f"{name} is in UTF-16; save it in UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Misuse(f"{name} is not a text file in UTF-8 (byte {error.start})") from None


def name_of(path: Path) -> str:
    """What messages call it."""
    return "the standard input" if str(path) == STDIN else str(path)


def parse_json(text: str) -> Any:
    """JSON in the strict sense: no name twice, no ``NaN``, not nested without end.

    Raises:
        ValueError: It is none; the message says why.
    """
    try:
        return json.loads(text, object_pairs_hook=_each_once, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands there twice")
    return values


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def shown(value: Any) -> str:
    """A value in a message, short whatever it is."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or a number of thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_rows(path: Path, form: str) -> list[JsonRow]:
    """Objects of a JSONL file, one a line; blank lines are skipped.

    Args:
        path: The file; ``-`` for the standard input.
        form: What a line should look like, for error messages.
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name_of(path)} line {number}: "
        try:
            values = parse_json(line)
        except ValueError as error:
            raise Misuse(f"{where}not JSON ({error}); expected {form}") from None
        if not isinstance(values, dict):
            raise Misuse(f"{where}not an object; expected {form}")
        rows.append(JsonRow(where, values))
    if not rows:
        raise Misuse(f"{name_of(path)} holds no prompts; expected {form} on every line")
    return rows


def read_requests(path: Path, max_new_tokens: int) -> list[Request]:
    """Prompts of a JSONL file, one object a line; blank lines are skipped."""
    return [read_request(row, max_new_tokens) for row in read_rows(path, _FORM)]


def read_request(line: JsonRow, max_new_tokens: int) -> Request:
    """One line with a text or token ids, and its own limit or the given one."""
    where, row = line
    check_keys(line)
    if ("prompt" in row) == ("prompt_ids" in row):
        raise Misuse(f"{where}expected {_FORM}, with either 'prompt' or 'prompt_ids'")
    prompt = row["prompt"] if "prompt" in row else row["prompt_ids"]
    if not isinstance(prompt, str if "prompt" in row else list):
        raise Misuse(f"{where}'prompt' must be a text and 'prompt_ids' a list of token ids")
    if isinstance(prompt, list):
        prompt = whole_numbers(prompt, where)
    limit = row.get("max_new_tokens", max_new_tokens)
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_TOKENS:
        raise Misuse(f"{where}max_new_tokens is {shown(limit)}; expected a whole number from 1 to {MOST_TOKENS}")
    return Request(prompt, limit, where)


def check_keys(line: JsonRow, also: Collection[str] = ()) -> None:
    """Refuse a key that no command reads: what it asks for would be ignored in silence.

    Args:
        line: Of a file.
        also: Further keys that are read.
    """
    known = {*_FIELDS, *_LABELS, *_HUMAN_EVAL, *also}
    for key in line.values:
        if key in known:
            continue
        if key in _OPTIONS:
            advice = f"it is given for all prompts, with --{key.replace('_', '-')}"
        else:
            meant = [name for name, others in _SYNONYMS.items() if key in others]
            meant += difflib.get_close_matches(key, _FIELDS, n=1)
            advice = f"did you mean {meant[0]!r}?" if meant else f"expected {', '.join(map(repr, _FIELDS))}"
        raise Misuse(f"{line.where}{shown(key)} is not known; {advice}")


def whole_numbers(ids: list[Any], where: str) -> list[int]:
    """The list, if it holds whole numbers; the decoder checks whether the target has them."""
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise Misuse(f"{where}prompt token {shown(token)} is not a token id; expected a whole number")
    return ids
