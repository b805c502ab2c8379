"""The small files of a checkpoint: configuration and tokenizer. For a GGUF file they are built from its metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eagle3_jax.conversion import gguf
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import (
    TOKENIZER_FILES,
    checkpoint_path,
    is_gguf,
    parsed_json,
    parsed_tokenizer,
    read_json,
    read_tokenizer,
)


def read_sidecar(checkpoint: Path, name: str) -> bytes | None:
    """The content of a small file of a checkpoint; ``None`` if there is none of this name."""
    if is_gguf(checkpoint):
        text = gguf.read_text(checkpoint, name)
        return None if text is None else text.encode()
    path = checkpoint / name
    return path.read_bytes() if path.is_file() else None


def config_of(checkpoint: Path) -> Fields:
    """The ``config.json`` of a checkpoint."""
    if is_gguf(checkpoint):
        return Fields(gguf.read_contents(checkpoint).config, str(checkpoint))
    path = checkpoint / "config.json"
    return Fields(read_json(path), str(path))


def tokenizer_of(checkpoint: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, a directory or a GGUF file; ``None`` if it has none.

    Raises:
        CheckpointError: The file is damaged, or the tokenizer of a GGUF file is unsupported.
    """
    checkpoint = checkpoint_path(checkpoint)
    if not is_gguf(checkpoint):
        return read_tokenizer(checkpoint / "tokenizer.json")
    text = gguf.read_text(checkpoint, "tokenizer.json")
    return None if text is None else parsed_tokenizer(text, checkpoint)


def tokenizer_config_of(checkpoint: Path) -> dict[str, Any]:
    """The ``tokenizer_config.json`` of a checkpoint, a directory or a GGUF file; empty if it has none.

    Keys that a GGUF file gives: ``chat_template``, ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``.
    """
    checkpoint = checkpoint_path(checkpoint)
    content = read_sidecar(checkpoint, "tokenizer_config.json")
    return {} if content is None else parsed_json(content, checkpoint / "tokenizer_config.json")


def copy_tokenizer(source: Path, destination: Path) -> None:
    """Copies the tokenizer's files that the source has."""
    for name in TOKENIZER_FILES:
        content = read_sidecar(source, name)
        if content is not None:
            (destination / name).write_bytes(content)
