"""Reads a checkpoint's directory, JSON files and tokenizer strictly; writes directories at once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eagle3_jax.conversion.errors import CheckpointError, printable
from eagle3_jax.files.sources import NATIVE_FILE, within
from eagle3_jax.files.writing import WriteError, check_free, whole_directory

_POINTER = b"version https://git-lfs.github.com/spec/"
# In bytes. The index of a model of a thousand shards has a few millions.
_LONGEST_JSON = 100_000_000
# A conversion copies these files unchanged.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def checkpoint_path(checkpoint: str | os.PathLike[str]) -> Path:
    """Returns the path of a checkpoint: a directory, or a GGUF file.

    Raises:
        CheckpointError: The path does not hold a checkpoint; the message names the usual mistakes.
    """
    path = Path(checkpoint)
    try:
        if not path.exists():
            raise CheckpointError(f"{path} does not exist; give the directory of a checkpoint")
        if is_gguf(path):
            return path

        if not path.is_dir():
            raise CheckpointError(
                f"{path} is a file; give the directory that holds config.json and the weights"
            )

        snapshots = path / "snapshots"
        if snapshots.is_dir() and not any(
            (path / name).exists() for name in ("config.json", NATIVE_FILE)
        ):
            candidates = sorted(snapshots.iterdir())
            advice = f"one of its {len(candidates)} snapshots, in {snapshots}"
            if len(candidates) == 1:
                advice = str(candidates[0])
            raise CheckpointError(f"{path} is a folder of the hub's cache; give {advice}")
    except OSError as error:
        raise unreadable(path, error) from None

    try:
        return within(path)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def is_gguf(path: Path) -> bool:
    """Tells whether a path is that of a GGUF file."""
    return path.suffix == ".gguf" and path.is_file()


def refuse_pointer(path: Path) -> None:
    """Refuses a pointer of Git LFS, which is text in place of a file that was not fetched."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CheckpointError(
                f"{path} is a Git LFS pointer and not the file itself; run `git lfs pull` in"
                f" {path.parent}"
            )


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """Returns an error of the operating system about a file as a :class:`CheckpointError`."""
    return CheckpointError(
        f"{path} cannot be read ({error.strerror or error}); give a checkpoint that can be"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file."""
    try:
        if not path.is_file():
            raise CheckpointError(
                f"{path.parent} has no {path.name}; a checkpoint directory holds one next to its"
                " weights"
            )
        if path.stat().st_size > _LONGEST_JSON:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes; expected at most {_LONGEST_JSON:,}"
            )
        refuse_pointer(path)
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    return parsed_json(content, path)


def parsed_json(content: bytes, path: Path) -> dict[str, Any]:
    """Parses the content of a file as a JSON object; ``path`` is its name in messages."""
    try:
        value = json.loads(content.decode("utf-8-sig"))
    # ValueError: not UTF-8, not JSON, or a number of thousands of digits. RecursionError: deep
    # nesting.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is not valid JSON ({str(error)[:120]}); fetch the file again"
        ) from None

    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__}; expected an object with named fields"
        )
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object, indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_directory(final: str | os.PathLike[str], num_bytes: int = 0) -> Iterator[Path]:
    """Yields a temporary directory that takes the final name when the block ends without an error.

    Raises:
        CheckpointError: The directory exists, or the free space is smaller than ``num_bytes``, the
            least size of the written files.
    """
    try:
        check_free(Path(final).absolute(), num_bytes)
        with whole_directory(final) as temporary:
            yield temporary
    except WriteError as error:
        raise CheckpointError(str(error)) from None


def read_tokenizer(path: Path) -> Tokenizer | None:
    """Reads the tokenizer in a file; returns ``None`` if there is no such file."""
    if not path.is_file():
        return None
    refuse_pointer(path)
    return parsed_tokenizer(path.read_bytes(), path)


def parsed_tokenizer(content: bytes, path: Path) -> Tokenizer:
    """Parses the content of a ``tokenizer.json``; ``path`` is its name in messages."""
    try:
        tokenizer = Tokenizer.from_str(content.decode("utf-8-sig"))
    except BaseException as error:
        # The package tokenizers raises plain exceptions, and a panic of its Rust code is not even
        # an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = printable(" ".join(str(error).split()))[:120]
        raise CheckpointError(
            f"{path} is not a tokenizer ({reason}); fetch the file again, or remove it"
        ) from None

    # Some tokenizers are saved with the length of their training; prompts must never be cut.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
