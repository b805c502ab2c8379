"""GGUF files of every architecture and type of tensor, written as llama.cpp writes them, against what they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
gguf = pytest.importorskip("gguf")
import gguf_files
from checkpoints import assert_close, same_target
from families import BASE, LLAMAS, RECIPES
from gguf_files import Type, everywhere
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax import conversion
from validation.peaked import Recipe, build, eager

pytestmark = pytest.mark.torch


def _changed(name: str, **fields: Any) -> Recipe:
    recipe = (RECIPES | LLAMAS)[name]
    return recipe._replace(fields={**recipe.fields, **fields})


_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# What a file can say of each family. Gemma's second scale is that of its heads, and gpt-oss has one limit.
MODELS = {
    "llama": RECIPES["llama"],
    "llama, tied": LLAMAS["llama, heads of 80, tied"],
    "llama, llama3": Recipe("llama", {"head_dim": 16, "rope_parameters": _LLAMA3}, 0),
    "llama, linear": LLAMAS["llama, linear"],
    "llama, yarn": LLAMAS["llama, yarn"],
    "mistral": Recipe("mistral", {"head_dim": 12, "sliding_window": None}, 0),
    "ministral3": RECIPES["ministral3"],
    "qwen2": RECIPES["qwen2"],
    "qwen3": _changed("qwen3", attention_bias=False),
    "qwen3, yarn": _changed("qwen3, yarn, windows", use_sliding_window=False, layer_types=None),
    "qwen3_moe": _changed("qwen3_moe", mlp_only_layers=[]),
    "gpt_oss": _changed("gpt_oss", swiglu_limit=7.0),
    "gpt_oss, wide": _changed("gpt_oss", swiglu_limit=7.0, intermediate_size=32),
    "deepseek_v3": RECIPES["deepseek_v3"],
    "deepseek_v3, whole queries": _changed("deepseek_v3", q_lora_rank=None, norm_topk_prob=False),
    "gemma2": _changed("gemma2", query_pre_attn_scalar=12),
    "gemma3": _changed("gemma3", query_pre_attn_scalar=12, layer_types=None, num_hidden_layers=7),
    "olmo2": _changed("olmo2", attention_bias=False),
    "granite": RECIPES["granite"],
    "phi3": _changed("phi3", sliding_window=None, original_max_position_embeddings=256),
    "phi3, windows": _changed("phi3", original_max_position_embeddings=256),
    "phi3, longrope": RECIPES["phi3, longrope"],
    "cohere": _changed("cohere", attention_bias=False, tie_word_embeddings=True),
    "cohere2": _changed("cohere2", layer_types=None),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The directory of a random model of transformers. Its norms have few bits, so that one can be added and taken."""

    def of(name: str) -> Path:
        directory = tmp_path_factory.mktemp("model")
        build(MODELS[name]).save_pretrained(directory)
        path = directory / "model.safetensors"
        coarse = lambda name, value: np.round(value * 1024) / 1024 if name.endswith("norm.weight") else value
        save_file({key: coarse(key, value) for key, value in load_file(path).items()}, path, {"format": "pt"})
        return directory

    return of


TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.MXFP4]


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_read_as_the_checkpoint_that_it_was_made_from(saved: Any, tmp_path: Path, name: str) -> None:
    directory = saved(name)
    read = conversion.read_target(gguf_files.write(directory, tmp_path / "m.gguf"))
    truth = conversion.read_target(directory)
    assert read.config == truth.config
    assert same_target(read, truth)
    assert read.stop_tokens == (2,) and read.dtype == "float32" and read.quantisation is None
