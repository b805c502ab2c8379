"""What several commands have in common: option types, and reading what they name."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.reporting.tables import write_text

if TYPE_CHECKING:
    from eagle3_jax import DynamicTree, LoadedDrafter, LoadedTarget, SpeculationSchedule
    from eagle3_jax.types import Drafter

MOST_TOKENS = 1_000_000_000  # limits are 32-bit on the device

TargetOption = Annotated[
    str | None, typer.Option("--target", help="Directory or hub id of the target; the bundled one when left out.")
]
DrafterOption = Annotated[
    str | None,
    typer.Option(
        "--drafter", help="Directory or hub id of an EAGLE-3 head, 'ngram' or 'none'; the bundled head when left out."
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="float32, bfloat16, or mixed (bfloat16 products summed in float32).")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]

_TREE_KEYS = ("num_nodes", "max_depth", "top_k")


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


def read_target(source: str | None, dtype: str) -> LoadedTarget:
    """The target that ``--target`` names."""
    from eagle3_jax import load_target

    return load_target(source, dtype=dtype)


def read_drafter(
    source: str | None, *, target: LoadedTarget, target_source: str | None
) -> LoadedDrafter | Drafter[Any] | None:
    """The drafter that ``--drafter`` names; ``None`` for plain decoding."""
    from eagle3_jax import load_drafter
    from eagle3_jax.drafters import NGram

    if source == "none":
        return None
    if source == "ngram":
        return NGram()
    if source is None and target_source is not None:
        raise Misuse(
            "--target was given without --drafter, and the bundled head fits the bundled target only; "
            "add --drafter DIRECTORY, --drafter ngram or --drafter none"
        )
    return load_drafter(source, target=target)


def parse_tree(text: str | None) -> DynamicTree | None:
    """``num_nodes=60,max_depth=8,top_k=10`` as a tree."""
    from eagle3_jax import DynamicTree

    if text is None:
        return None
    values: dict[str, int] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or name not in _TREE_KEYS or name in values:
            raise Misuse(f"--tree {text!r}: {part!r} is not one of {_tree_form()}")
        try:
            values[name] = int(value)
        except ValueError:
            raise Misuse(f"--tree {text!r}: {name} is {value!r}; expected a whole number") from None
    missing = [name for name in _TREE_KEYS if name not in values]
    if missing:
        raise Misuse(f"--tree {text!r}: {', '.join(missing)} missing; expected {_tree_form()}")
    return DynamicTree(**values)


def _tree_form() -> str:
    return "num_nodes=N,max_depth=G,top_k=K, for example num_nodes=60,max_depth=8,top_k=10"


def parse_schedule(text: str | None) -> SpeculationSchedule | None:
    """``--schedule '[[1,4,5],[5,16,3]]'``, or a JSON file with such a list, as ``eagle3 tune --output`` writes it."""
    from eagle3_jax import SpeculationSchedule

    if text is None:
        return None
    is_file = not text.lstrip().startswith("[")
    try:
        value = json.loads(Path(text).read_text(encoding="utf-8") if is_file else text)
    except ValueError:
        raise Misuse(f"--schedule {text[:80]!r} is not JSON; expected {_SCHEDULE_FORM}") from None
    if isinstance(value, dict) and _SCHEDULE_KEY in value:
        value = value[_SCHEDULE_KEY]
        if value is None:
            raise Misuse(f"--schedule {text}: drafting paid at no batch size there; use --drafter none")
    if not isinstance(value, list):
        raise Misuse(f"--schedule {text[:80]!r} holds no schedule; expected {_SCHEDULE_FORM}")
    return SpeculationSchedule.from_lists(value)


_SCHEDULE_KEY = "num_speculative_tokens_per_batch_size"
_SCHEDULE_FORM = f"[[first, last, K], ...] such as '[[1,4,5],[5,16,3]]', or a file with it under {_SCHEDULE_KEY}"


def parse_numbers(text: str, option: str, *, least: int = 1, most: int = 100_000, or_none: bool = False) -> list[int]:
    """``1-7``, ``1,3,5`` or ``1-3,8``, in ascending order, each once; nothing for ``none`` where that is allowed."""
    if or_none and text == "none":
        return []
    found: set[int] = set()
    for part in text.split(","):
        bounds = part.strip().split("-")
        numbers = [int(bound) for bound in bounds if bound.isdecimal()]
        if len(numbers) != len(bounds) or len(bounds) > 2 or not least <= numbers[0] <= numbers[-1] <= most:
            raise Misuse(
                f"{option} {text!r}: expected whole numbers from {least} to {most}, such as '1-7' or '1,3,5'"
                + (", or 'none'" if or_none else "")
            )
        found.update(range(numbers[0], numbers[-1] + 1))
    return sorted(found)


def parse_ids(text: str) -> list[int]:
    """``--prompt-ids '[1, 2]'``; the decoder checks whether the target has them."""
    try:
        ids = json.loads(text)
    except ValueError:
        ids = None
    if not isinstance(ids, list):
        raise Misuse(f"--prompt-ids {text[:80]!r} is not a JSON list of token ids; expected for example '[1, 2, 3]'")
    return _whole_numbers(ids, "--prompt-ids: ")


def _whole_numbers(ids: list[Any], where: str) -> list[int]:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int):
            raise Misuse(f"{where}prompt token {str(token)[:40]!r} is not a token id; expected a whole number")
    return ids


class JsonRow(NamedTuple):
    """One line of a JSONL file.

    Attributes:
        where: File and line, for error messages.
        values: The object on it.
    """

    where: str
    values: dict[str, Any]


def read_rows(path: Path, form: str) -> list[JsonRow]:
    """Objects of a JSONL file, one a line; blank lines are skipped.

    Args:
        path: The file.
        form: What a line should look like, for error messages.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise Misuse(f"{path} is not a text file in UTF-8 (byte {error.start})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path} line {number}: "
        try:
            values = json.loads(line)
        except ValueError as error:
            raise Misuse(f"{where}not JSON ({error}); expected {form}") from None
        if not isinstance(values, dict):
            raise Misuse(f"{where}not an object; expected {form}")
        rows.append(JsonRow(where, values))
    if not rows:
        raise Misuse(f"{path} holds no prompts; expected {form} on every line")
    return rows


_REQUEST_FORM = """an object such as {"prompt": "def f(x):"} or {"prompt_ids": [1, 2], "max_new_tokens": 64}"""


def read_requests(path: Path, max_new_tokens: int) -> list[Request]:
    """Prompts of a JSONL file, one object a line; blank lines are skipped."""
    return [read_request(row, max_new_tokens) for row in read_rows(path, _REQUEST_FORM)]


def read_request(line: JsonRow, max_new_tokens: int) -> Request:
    """One line with a text or token ids, and its own limit or the given one."""
    where, row = line
    if ("prompt" in row) == ("prompt_ids" in row):
        raise Misuse(f"{where}expected {_REQUEST_FORM}, with either 'prompt' or 'prompt_ids'")
    prompt = row["prompt"] if "prompt" in row else row["prompt_ids"]
    if not isinstance(prompt, str if "prompt" in row else list):
        raise Misuse(f"{where}'prompt' must be a text and 'prompt_ids' a list of token ids")
    if isinstance(prompt, list):
        prompt = _whole_numbers(prompt, where)
    limit = row.get("max_new_tokens", max_new_tokens)
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_TOKENS:
        raise Misuse(f"{where}max_new_tokens is {limit!r}; expected a whole number from 1 to {MOST_TOKENS}")
    return Request(prompt, limit, where)


def check_writable(path: Path | None) -> None:
    """Refuse an output file that could not be written, before any work is done."""
    if path is None:
        return
    folder = path.absolute().parent
    if path.is_dir():
        raise Misuse(f"{path} is a directory; give the name of a file")
    if not folder.is_dir():
        raise Misuse(f"{path} cannot be written: there is no directory {folder}")
    if not os.access(folder, os.W_OK):
        raise Misuse(f"{path} cannot be written: no permission in {folder}")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file that appears under its name only when complete."""
    write_text(path, json.dumps(value) + "\n")
