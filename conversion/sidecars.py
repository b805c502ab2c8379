"""Reads the small files of a checkpoint; builds them from the metadata of a GGUF file."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eagle3_jax.conversion import gguf
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import (
    TOKENIZER_FILES,
    checkpoint_path,
    is_gguf,
    parsed_json,
    parsed_tokenizer,
    read_json,
    refuse_pointer,
    unreadable,
)


def read_sidecar(checkpoint: Path, name: str) -> bytes | None:
    """Returns the content of a small file of a checkpoint; ``None`` if there is no such file."""
    if is_gguf(checkpoint):
        text = gguf.read_text(checkpoint, name)
        return None if text is None else text.encode()
    path = checkpoint / name
    if not path.is_file():
        return None
    try:
        refuse_pointer(path)
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def read_object(checkpoint: Path, name: str) -> dict[str, Any]:
    """Reads the fields of a small JSON file of a checkpoint; empty if there is no such file."""
    content = read_sidecar(checkpoint, name)
    return {} if content is None else parsed_json(content, checkpoint / name)


def config_of(checkpoint: Path) -> Fields:
    """Reads the ``config.json`` of a checkpoint."""
    if is_gguf(checkpoint):
        return Fields(gguf.read_contents(checkpoint).config, str(checkpoint))
    path = checkpoint / "config.json"
    return Fields(read_json(path), str(path))


def tokenizer_of(checkpoint: Path) -> Tokenizer | None:
    """Reads the tokenizer of a checkpoint, a directory or a GGUF file; ``None`` if it has none.

    Raises:
        CheckpointError: The file is damaged, or the tokenizer of a GGUF file is unsupported.
    """
    checkpoint = checkpoint_path(checkpoint)
    content = read_sidecar(checkpoint, "tokenizer.json")
    return None if content is None else parsed_tokenizer(content, checkpoint / "tokenizer.json")


def tokenizer_config_of(checkpoint: Path) -> dict[str, Any]:
    """Reads the fields of the ``tokenizer_config.json`` of a checkpoint; empty without that file.

    As in transformers, a separate file with a chat template replaces the field ``chat_template``.
    Old checkpoints have their special tokens in ``special_tokens_map.json``.
    """
    checkpoint = checkpoint_path(checkpoint)
    config = read_object(checkpoint, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_object(checkpoint, "special_tokens_map.json")

    name = "chat_template.jinja"
    template = read_sidecar(checkpoint, name)
    if template is None:
        return config | read_object(checkpoint, "chat_template.json")
    try:
        return config | {"chat_template": template.decode()}
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{checkpoint / name} is not a text file in UTF-8 (byte {error.start})"
        ) from None


def described_tokens(tokens: Sequence[int], checkpoint: Path) -> str:
    """Returns token ids with their texts, such as ``2 '<|im_end|>'``, if a tokenizer tells them."""
    tokenizer = None
    with contextlib.suppress(CheckpointError):
        tokenizer = tokenizer_of(checkpoint)
    texts = {token: tokenizer and tokenizer.id_to_token(token) for token in tokens}
    return ", ".join(
        str(token) if text is None else f"{token} {text!r}" for token, text in texts.items()
    )


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copies the tokenizer files of the source, except absent ones."""
    for name in TOKENIZER_FILES:
        content = read_sidecar(source, name)
        if content is not None:
            (destination / name).write_bytes(content)
