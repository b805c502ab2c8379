"""Reads JSON and text from files, the standard input and options, with errors of one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

STDIN = "-"


class JsonRow(NamedTuple):
    """One line of a JSONL file."""

    where: str  #: File and line, for error messages.
    values: dict[str, Any]  #: The object on the line.


def read_text(path: Path) -> str:
    """Reads a text file in UTF-8, with or without a byte order mark; ``-`` is the standard input.

    Raises:
        ValueError: It has another encoding; the message gives the first wrong byte.
    """
    name = name_of(path)
    if str(path) != STDIN:
        content = path.read_bytes()
    elif sys.stdin is None:
        raise ValueError(f"{name} is closed; name a file instead of '-'")
    else:
        content = sys.stdin.buffer.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not a text file in UTF-8 (byte {error.start})") from None


def name_of(path: Path) -> str:
    """Returns the name of a file in messages."""
    return "the standard input" if str(path) == STDIN else str(path)


def parse_json(text: str) -> Any:
    """Parses strict JSON: no repeated names and no ``NaN``.

    Nesting and the digits of a number have limits.

    Raises:
        ValueError: The text is not strict JSON; the message gives the reason.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=_refuse_constant,
            parse_int=_parse_integer,
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"{shown(name)} occurs twice")
        values[name] = value
    return values


def _parse_integer(digits: str) -> int:
    try:
        return int(digits)
    # Python's own message recommends to change a setting of the interpreter.
    except ValueError:
        raise ValueError(f"a number has {len(digits)} digits") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def shown(value: Any) -> str:
    """Returns a value as messages show it, in at most 80 characters."""
    try:
        text = repr(value)
    # The value is nested deeply, or has a number of thousands of digits.
    except (RecursionError, ValueError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_rows(path: Path, form: str) -> list[JsonRow]:
    """Reads the objects of a JSONL file, one a line; blank lines are skipped.

    Args:
        path: The file; ``-`` for the standard input.
        form: The expected form of a line, for error messages.

    Raises:
        ValueError: A line is not an object, or there are none; the message names the line.
    """
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue

        where = f"{name_of(path)} line {number}: "
        try:
            values = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{where}not JSON ({error}); expected {form}") from None
        if not isinstance(values, dict):
            raise ValueError(f"{where}not an object; expected {form}")
        rows.append(JsonRow(where, values))
    if not rows:
        raise ValueError(f"{name_of(path)} holds no lines; expected {form} on every line")
    return rows
