"""Random targets in Hugging Face layout, by a few sizes."""

from __future__ import annotations

import json
import string
from pathlib import Path

import checkpoints
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform


def write_llama(folder: Path, *, width: int, vocab_size: int = 96, layers: int = 8) -> Path:
    """Writes a random target."""
    mixer = GroupedQuery(num_heads=2, num_kv_heads=2, head_dim=width // 2)
    stack = uniform(layers, mixer, GatedMLP(width=32))
    return checkpoints.write_llama(
        folder, DecoderConfig(vocab_size=vocab_size, width=width, layers=stack)
    )


def write_bytes_target(folder: Path) -> Path:
    """Writes a random target whose tokens are bytes, and which has no stop token.

    Most of its output is not text.
    """
    checkpoints.edit_config(
        write_llama(folder, width=32, vocab_size=256, layers=2), eos_token_id=None
    )
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content"
    " }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LETTERS = [*string.ascii_lowercase, "Ġ", "Ċ"]  # the last two are the space and the line feed
POSITIONS = 160  # of a chat target


def write_chat_target(folder: Path, *, layers: int = 2, template: str | None = CHATML) -> Path:
    """Writes a random target of :data:`POSITIONS` whose tokens are letters.

    It also stops at ``a`` and ``b``, because a random text rarely ends.
    """
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(_LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    write_llama(folder, width=16, vocab_size=tokenizer.get_vocab_size(), layers=layers)
    stops = [tokenizer.token_to_id("<|im_end|>"), 0, 1]
    checkpoints.edit_config(folder, eos_token_id=stops, max_position_embeddings=POSITIONS)
    tokenizer.save(str(folder / "tokenizer.json"))
    if template is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def bytes_tokenizer(*merged: tuple[str, str]) -> Tokenizer:
    """Returns a tokenizer whose tokens are single bytes and these pairs of them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*alphabet, *map("".join, merged)]
    tokenizer = Tokenizer(
        models.BPE({piece: index for index, piece in enumerate(pieces)}, list(merged))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
