"""Reads requests from files of users, one JSON object per line.

Every command takes the same lines: a text to continue (``prompt``, as in HumanEval as published),
token ids (``prompt_ids``), a conversation (``messages``), and questions of benchmarks: ``turns``
(EAGLE's ``eagle/data``, Spec-Bench, MT-bench) and ``question`` (GSM8K as published).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from eagle3_jax.files.jsonl import JsonRow, read_rows, shown
from eagle3_jax.prompts.request import MOST_TOKENS, Request
from eagle3_jax.text.template import Messages, check_messages

#: Each key that may hold the prompt of a line, and the form of its value.
_INPUTS = {
    "prompt": "a text",
    "prompt_ids": "a list of token ids",
    "messages": "a list of turns",
    "turns": "a list of texts, at least one",
    "question": "a text",
}
_FIELDS = (*_INPUTS, "max_new_tokens")
# Fields that published files have next to a prompt; no command uses them to generate.
_LABELS = (
    "name",
    "kind",
    "id",
    "task_id",
    "category",
    "question_id",
    "reference",
    "answer",
)
_HUMAN_EVAL = ("entry_point", "canonical_solution", "test")
# What a line of `eagle3 generate` may set for its prompt, and the form of its value.
_OPTIONS = {
    "temperature": "a number",
    "top_k": "a whole number from 0 to 2147483647",
    "top_p": "a number",
    "seed": "a whole number from 0 to 4294967295",
    "stop": "a text or a list of texts",
}
#: The form of a line, for messages.
FORM = """an object such as {"prompt": "def f(x):"} with one of """ + ", ".join(map(repr, _INPUTS))


def read_requests(path: Path, defaults: Request) -> list[Request]:
    """Reads the prompts of a JSONL file, one object per line, with their options.

    Blank lines are skipped.

    Args:
        path: The file.
        defaults: What a line does not say. The stop texts of a line are added to these. A line
            without a seed has one derived from this seed, except for the first, because equal
            prompts would otherwise give equal samples.

    Raises:
        ValueError: A line is malformed; the message names it.
    """
    # Other commands read no requests, and need no numpy here.
    import numpy as np

    requests = []
    for number, row in enumerate(read_rows(path, FORM)):
        derived = np.random.SeedSequence((defaults.seed, number)).generate_state(1)
        seed = int(derived[0]) if number else defaults.seed
        requests.append(read_request(row, dataclasses.replace(defaults, seed=seed), _OPTIONS))
    return requests


def read_request(line: JsonRow, defaults: Request, options: Collection[str] = ()) -> Request:
    """Returns the request of a line with a text, token ids or messages.

    Args:
        line: The line.
        defaults: What it does not say.
        options: Names of the keys that it may have in addition.
    """
    where, row = line
    check_keys(line, options)
    inputs = [name for name in _INPUTS if name in row]
    if len(inputs) != 1:
        raise ValueError(f"{where}expected {FORM}")
    prompt, messages = _input(inputs[0], row[inputs[0]], where)

    limit = row.get("max_new_tokens", defaults.max_new_tokens)
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_TOKENS:
        raise ValueError(
            f"{where}max_new_tokens is {shown(limit)}; expected a whole number from 1 to"
            f" {MOST_TOKENS}"
        )

    values = {name: _option(name, row[name], where) for name in _OPTIONS if name in row}
    values["stops"] = (*defaults.stops, *values.pop("stop", ()))
    return dataclasses.replace(
        defaults,
        prompt=prompt,
        max_new_tokens=limit,
        messages=messages,
        is_question=inputs[0] in ("turns", "question"),
        where=where,
        **values,
    )


def _question(text: str) -> tuple[str, Messages]:
    return text, [{"role": "user", "content": text}]


def _input(name: str, value: Any, where: str) -> tuple[str | list[int], Messages | None]:
    """Returns the prompt of a line and its conversation, which is absent without one.

    Of several questions it is the first, because the others depend on the answer.
    """
    try:
        match name, value:
            case "prompt", str():
                return value, None
            case "prompt_ids", list():
                return check_token_ids(value, ""), None
            case "messages", _:
                check_messages(value)
                return value[-1]["content"], value
            case "question", str() if value:
                return _question(value)
            case "turns", [str(), *_] if all(isinstance(turn, str) and turn for turn in value):
                return _question(value[0])
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None
    raise ValueError(f"{where}{name!r} is {shown(value)}; expected {_INPUTS[name]}")


def _option(name: str, value: Any, where: str) -> Any:
    """Checks the value of an option and returns it, ``stop`` as a list.

    The ranges of floats are checked later.
    """
    if name == "stop":
        value = [value] if isinstance(value, str) else value
        is_valid = isinstance(value, list) and all(isinstance(text, str) and text for text in value)
    elif name in ("temperature", "top_p"):
        is_valid = isinstance(value, int | float) and not isinstance(value, bool)
        # A whole number of hundreds of digits is not a float.
        try:
            value = float(value) if is_valid else value
        except OverflowError:
            is_valid = False
    else:
        limit = 2**32 if name == "seed" else 2**31
        is_valid = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit
    if not is_valid:
        raise ValueError(f"{where}{name} is {shown(value)}; expected {_OPTIONS[name]}")
    return value


def check_keys(line: JsonRow, also: Collection[str] = ()) -> None:
    """Checks that a command reads every key of a line, so that none is ignored silently.

    Args:
        line: The line.
        also: Allowed keys in addition to those that all commands know.

    Raises:
        ValueError: A key is not known; the message suggests another.
    """
    known = {*_FIELDS, *_LABELS, *_HUMAN_EVAL, *also}
    for key in line.values:
        if key in known:
            continue

        similar = difflib.get_close_matches(key, _FIELDS, n=1)
        if key in (*_OPTIONS, "ignore_eos"):
            advice = f"it is given for all prompts, with --{key.replace('_', '-')}"
        elif similar:
            advice = f"did you mean {similar[0]!r}?"
        else:
            advice = f"expected {', '.join(map(repr, _FIELDS))}"
        raise ValueError(f"{line.where}{shown(key)} is not known; {advice}")


def check_token_ids(ids: list[Any], where: str) -> list[int]:
    """Returns the list if it has only whole numbers. The decoder compares them with the vocabulary.

    Args:
        ids: The list.
        where: Beginning of the error message.

    Raises:
        ValueError: An entry is not a whole number of at least 0.
    """
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ValueError(
                f"{where}prompt token {shown(token)} is not a token id; expected a whole number"
            )
    return ids
