"""Small random targets of shapes that real models have and tiny tests forget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "one key/value head, tied embeddings": {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "heads of 80, llama3 rope, attention bias": {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 80,
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "three groups, yarn rope, an odd vocabulary": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 509,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


def write_odd_model(shape: str, directory: Path) -> Path:
    """Write a random model of a shape with transformers, in float32; its text does not run into loops at once."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{
            "vocab_size": 512,
            "hidden_size": 96,
            "intermediate_size": 160,
            "num_hidden_layers": 8,
            "max_position_embeddings": 256,
            "initializer_range": 0.15,
            "bos_token_id": None,
            "eos_token_id": 2,
        }
        | SHAPES[shape]
    )
    torch.manual_seed(len(shape))
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                value.normal_(0, 0.1)
    model.save_pretrained(directory)
    return directory
