"""Directories and JSON files, read strictly and written all at once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conversion.errors import CheckpointError

# Describes a native checkpoint.
NATIVE_FILE = "eagle3_jax.json"
# What travels with a checkpoint unchanged, when it is there.
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


def checked_directory(directory: str | os.PathLike[str]) -> Path:
    """The directory as a path.

    Raises:
        CheckpointError: It does not exist or is a file.
    """
    path = Path(directory)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give the directory of a checkpoint")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the directory that holds config.json and the weights")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: The file is missing, or holds no JSON object.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.parent} has no {path.name}; a checkpoint directory holds one beside its weights")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}; expected an object with named fields")
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, with a final newline."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def new_directory(final: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary sibling that takes the final name when the block ends without an error.

    An interrupted write leaves nothing under the final name.

    Raises:
        CheckpointError: Something has that name already.
    """
    final = Path(final).absolute()
    if final.exists() or final.is_symlink():
        raise CheckpointError(f"{final} exists already; give a new directory, or remove that one first")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".partial", dir=final.parent))
    except OSError as error:
        raise CheckpointError(
            f"{final} cannot be created ({error.strerror}); give a place that can be written"
        ) from None
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        # mkdtemp, and the writer of safetensors, make what only the owner can read.
        temporary.chmod(0o777 & ~umask)
        for path in temporary.rglob("*"):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        if final.exists():
            raise CheckpointError(f"{final} appeared while it was being written; nothing was changed there")
        temporary.rename(final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copy the tokenizer's files that the source has."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
