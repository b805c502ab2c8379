"""Small random targets of shapes that real models have and tiny tests forget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from validation.peaked import Recipe, build

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
    """Write a random model in float32; its text does not run into loops at once."""
    sizes = {
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 8,
        "bos_token_id": None,
    }
    build(Recipe("llama", sizes | SHAPES[shape], seed=len(shape))).save_pretrained(directory)
    return directory
