"""Random targets in Hugging Face layout, written with numpy alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

OFFICIAL = Path(__file__).parent.parent / "golden" / "official"


def write_llama(folder: Path, *, width: int, vocab_size: int = 96, layers: int = 8) -> Path:
    """A random target."""
    rng, mlp, heads, size = np.random.default_rng(0), 32, 2, width // 2
    shapes = {"model.embed_tokens": (vocab_size, width), "model.norm": (width,), "lm_head": (vocab_size, width)}
    for layer in range(layers):
        for name, shape in {
            "self_attn.q_proj": (heads * size, width),
            "self_attn.k_proj": (heads * size, width),
            "self_attn.v_proj": (heads * size, width),
            "self_attn.o_proj": (width, heads * size),
            "mlp.gate_proj": (mlp, width),
            "mlp.up_proj": (mlp, width),
            "mlp.down_proj": (width, mlp),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }.items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    folder.mkdir()
    tensors = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((OFFICIAL / "target" / "config.json").read_text())
    changed = {
        "hidden_size": width, "intermediate_size": mlp, "vocab_size": vocab_size, "head_dim": size,
        "num_attention_heads": heads, "num_key_value_heads": heads, "num_hidden_layers": layers,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


def write_bytes_target(folder: Path) -> Path:
    """A random target whose tokens are single bytes, so that most of what it writes is no text; nothing stops it."""
    write_llama(folder, width=32, vocab_size=256, layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
