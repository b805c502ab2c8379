"""GGUF files of every architecture and type of tensor are compared with their sources."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf")
import gguf
import gguf_files
import tiny
from checkpoints import assert_close, refused, same_target
from families import LLAMAS, RECIPES
from gguf_files import Type, everywhere
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax import conversion
from validation.peaked import VOCAB, Recipe, build, eager

pytestmark = pytest.mark.torch


def _changed(name: str, **fields: Any) -> Recipe:
    recipe = (RECIPES | LLAMAS)[name]
    return recipe._replace(fields={**recipe.fields, **fields})


_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
}  # fmt: skip
# Models of each family that a file can express. Gemma's second scale is that of its heads, and
# gpt-oss has one limit.
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


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    """Saves random models of transformers."""
    return functools.partial(_save, tmp_path / "model")


def _save(directory: Path, name: str) -> Path:
    """Saves a model. Norms have few bits, so that adding and subtracting 1 is exact."""
    build(MODELS[name]).save_pretrained(directory)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for key, value in tensors.items():
        if key.endswith("norm.weight"):
            tensors[key] = np.round(value * 1024) / 1024
    save_file(tensors, path, {"format": "pt"})
    return directory


def test_older_files_of_deepseek_have_one_tensor_of_keys_and_values(
    saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = saved("deepseek_v3")
    monkeypatch.setattr(
        gguf_files, "translated", functools.partial(_with_one_tensor, gguf_files.translated)
    )
    read = conversion.read_target(
        gguf_files.write(directory, tmp_path / "m.gguf", more=_older_keys)
    )
    assert same_target(read, conversion.read_target(directory))


def _with_one_tensor(translated: Any, config: dict[str, Any], tensors: gguf_files.Tensors) -> Any:
    for name, value in translated(config, tensors):
        if not re.search(r"attn_[kv]_b\.weight", name):
            yield name, value
    for layer in range(config["num_hidden_layers"]):
        yield (
            f"blk.{layer}.attn_kv_b.weight",
            tensors[f"model.layers.{layer}.self_attn.kv_b_proj.weight"],
        )


def _older_keys(writer: gguf.GGUFWriter) -> None:
    values = writer.kv_data[0]
    for name in ("key_length", "value_length"):
        values[f"deepseek2.attention.{name}"] = values.pop(f"deepseek2.attention.{name}_mla")
    values["deepseek2.attention.head_count_kv"] = values["deepseek2.attention.head_count"]


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("gemma2", "block_count", "the file has fewer tensors"),
        ("qwen3_moe", "block_count", "the file has fewer tensors"),
        ("qwen3_moe", "expert_count", "the file has stacks of 8 experts"),
        ("deepseek_v3", "expert_count", "the file has stacks of 8 experts"),
        ("deepseek_v3", "attention.head_count", r"blk\.0\.attn_output\.weight has 40 columns"),
    ],
)
def test_a_number_that_the_tensors_contradict_is_refused_quickly(
    saved: Any, tmp_path: Path, name: str, key: str, message: str
) -> None:
    value = gguf.gguf_writer.GGUFValue(10**9, gguf.GGUFValueType.UINT32)

    def edit(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0][f"{writer.arch}.{key}"] = value

    path = gguf_files.write(saved(name), tmp_path / "m.gguf", more=edit)
    refused(conversion.read_target, path, rf"\.{key} is 1000000000; {message}")


TYPES = [
    Type.F32,
    Type.F16,
    Type.BF16,
    Type.Q4_0,
    Type.Q4_1,
    Type.Q5_0,
    Type.Q5_1,
    Type.Q8_0,
    Type.MXFP4,
]


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_read_as_the_checkpoint_that_it_was_made_from(
    saved: Any, tmp_path: Path, name: str
) -> None:
    directory = saved(name)
    read = conversion.read_target(gguf_files.write(directory, tmp_path / "m.gguf"))
    truth = conversion.read_target(directory)
    assert same_target(read, truth)
    assert (read.stop_tokens, read.dtype, read.quantisation) == ((2,), "float32", None)


@pytest.mark.parametrize("type", TYPES[1:], ids=lambda type: type.name)
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "phi3", "qwen3_moe", "gpt_oss, wide", "deepseek_v3", "cohere"]
)
def test_weights_of_every_type_are_the_rounded_weights(
    saved: Any, tmp_path: Path, name: str, type: Type
) -> None:
    """The truth is computed from the Hugging Face weights, in the layout of each architecture."""
    directory = saved(name)
    read = conversion.read_target(
        gguf_files.write(directory, tmp_path / "m.gguf", everywhere(type))
    )
    gguf_files.round_to(directory, everywhere(type))
    assert same_target(read, conversion.read_target(directory))
    plain = {Type.F16: "float16", Type.BF16: "bfloat16"}
    assert read.dtype == plain.get(type, "float32")
    assert (read.quantisation is None) == (type in plain)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows are complete blocks of every type."""
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    directory = tmp_path_factory.mktemp("wide")
    build(Recipe("llama", {**sizes, "num_key_value_heads": 2}, 0)).save_pretrained(directory)
    return directory


def _random_blocks(rows: np.ndarray, type: Type) -> np.ndarray:
    """Returns random bytes with finite scales, for types that ``gguf`` cannot write."""
    numbers, size = gguf.GGML_QUANT_SIZES[type]
    random = np.random.default_rng(0)
    shape = (rows.shape[0], rows.shape[1] // numbers, size)
    blocks = random.integers(0, 256, shape, np.uint8)
    offsets = {
        Type.Q2_K: (80, 82),
        Type.Q3_K: (108,),
        Type.Q4_K: (0, 2),
        Type.Q5_K: (0, 2),
        Type.Q6_K: (208,),
    }
    # The scales are in float16; random bytes could be NaN.
    for offset in offsets[type]:
        scale = random.normal(0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., offset : offset + 2] = scale[..., None].view(np.uint8)
    return blocks.reshape(rows.shape[0], -1)


K_QUANTS = [Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K]


@pytest.mark.parametrize("type", [*TYPES, *K_QUANTS], ids=lambda type: type.name)
def test_a_tensor_of_every_type_has_the_numbers_of_the_package_gguf(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type: Type
) -> None:
    if type in K_QUANTS:
        monkeypatch.setattr(gguf.quants, "quantize", _random_blocks)
    path = gguf_files.write(wide, tmp_path / "m.gguf", everywhere(type))
    target = conversion.read_target(path)
    tensors = gguf.GGUFReader(path).tensors
    truth = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in tensors
    }
    assert sum(tensor.tensor_type == type for tensor in tensors) >= 9

    block = target.params["blocks"][0]
    assert_same_bits(target.params["embedding"], truth["token_embd.weight"])
    assert_same_bits(block["attention"]["o"]["kernel"], truth["blk.0.attn_output.weight"].T)
    assert_same_bits(block["mlp"]["down"]["kernel"], truth["blk.0.ffn_down.weight"].T)

    # Our arrays have gate and up in turn, and queries, keys and values by key head.
    gate_up = [truth[f"blk.0.ffn_{name}.weight"].T for name in ("gate", "up")]
    assert_same_bits(block["mlp"]["gate_up"]["kernel"], np.stack(gate_up, -1).reshape(256, -1))
    pairs = truth["blk.0.attn_k.weight"].reshape(2, 32, 2, 256)
    key = pairs.swapaxes(1, 2).reshape(2, 64, 256)
    qkv = np.asarray(block["attention"]["qkv"]["kernel"]).reshape(256, 2, 4, 64)
    assert_same_bits(qkv[:, :, 2], key.transpose(2, 0, 1))


def assert_same_bits(array: Any, truth: np.ndarray) -> None:
    first, second = (np.asarray(value, np.float32).view(np.uint32) for value in (array, truth))
    np.testing.assert_array_equal(first, second)


# Models that transformers can read from GGUF. Other fields have the defaults of transformers.
READ_BY_TRANSFORMERS = {
    "llama": Recipe("llama", {"head_dim": 16, "tie_word_embeddings": True}, 0),
    "mistral": MODELS["mistral"],
    "qwen2": RECIPES["qwen2"],
    "qwen3": Recipe("qwen3", {"head_dim": 128}, 0),
    "qwen3_moe": _changed("qwen3_moe", mlp_only_layers=[], moe_intermediate_size=768),
    "gemma2": Recipe(
        "gemma2",
        {
            "head_dim": 256, "sliding_window": 5, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256,
        },
        1,
    ),
    "gemma3": Recipe(
        "gemma3_text",
        {
            "head_dim": 256, "sliding_window": 5, "num_hidden_layers": 6,
            "query_pre_attn_scalar": 256,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
        20,
    ),
    "phi3": Recipe("phi3", {"sliding_window": None, "original_max_position_embeddings": 256}, 0),
}  # fmt: skip


@pytest.mark.parametrize("type", [Type.F32, Type.Q8_0], ids=lambda type: type.name)
@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_logits_are_those_of_transformers_from_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, type: Type
) -> None:
    import torch
    import transformers

    build(READ_BY_TRANSFORMERS[name]).save_pretrained(tmp_path / "model")
    tokens = [str(index) for index in range(VOCAB)]

    def add_tokens(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(tokens)
        writer.add_pad_token_id(0)

    path = gguf_files.write(tmp_path / "model", tmp_path / "m.gguf", everywhere(type), add_tokens)
    options = {"gguf_file": path.name, "dtype": torch.float32, "attn_implementation": "eager"}
    model = eager(transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options))
    prompt = [[7, 3, 90, 14, 33, 8, 61, 25, 40, 11, 5, 50]]
    with torch.no_grad():
        truth = model(torch.tensor(prompt), use_cache=False).logits.numpy()

    target = e3.load_target(path)
    logits, _ = tiny.forward(target.model, target.params, np.array(prompt, np.int32))
    assert_close(logits, truth)
