"""Random targets in Hugging Face layout, by a few sizes."""

from __future__ import annotations

from pathlib import Path

import checkpoints
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform


def write_llama(folder: Path, *, width: int, vocab_size: int = 96, layers: int = 8) -> Path:
    """A random target."""
    mixer = GroupedQuery(num_heads=2, num_kv_heads=2, head_dim=width // 2)
    stack = uniform(layers, mixer, GatedMLP(width=32))
    return checkpoints.write_llama(folder, DecoderConfig(vocab_size=vocab_size, width=width, layers=stack))


def write_bytes_target(folder: Path) -> Path:
    """A random target whose tokens are single bytes, so that most of what it writes is no text; nothing stops it."""
    checkpoints.edit_config(write_llama(folder, width=32, vocab_size=256, layers=2), eos_token_id=None)
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def bytes_tokenizer(*merged: tuple[str, str]) -> Tokenizer:
    """A tokenizer whose tokens are single bytes, and these pairs of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *map("".join, merged)]
    tokenizer = Tokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, list(merged)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
