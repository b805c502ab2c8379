"""GGUF files written from Hugging Face checkpoints as llama.cpp's converter writes them.

The transformations are those of llama.cpp's ``conversion`` package; the names of tensors come from
the package ``gguf``.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "ministral3": "mistral3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "deepseek2",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "olmo2": "olmo2",
    "granite": "granite",
    "phi3": "phi3",
    "cohere": "command-r",
    "cohere2": "cohere2",
}
PERMUTED = ("llama", "granite", "mistral3")
Tensors = dict[str, np.ndarray]
Choose = Callable[[str, np.ndarray], Type]


# Tensors of more than one axis that stay in float32, by llama.cpp's names and by ours: small ones,
# and two whose rows have another order in the file.
_IN_FLOAT32 = (
    "norm", "bias", "gate_inp", "mlp.gate.", "mlp.router.", "attn_k_b.", "attn_v_b.", "kv_b_proj.",
)  # fmt: skip


def everywhere(matrix_type: Type) -> Choose:
    """Chooses a type for matrices whose rows are complete blocks.

    Other matrices are float16, everything else is float32.
    """
    return functools.partial(_chosen, matrix_type)


def _chosen(matrix_type: Type, name: str, value: np.ndarray) -> Type:
    block, _ = gguf.GGML_QUANT_SIZES[matrix_type]
    if value.ndim == 1 or any(part in name for part in _IN_FLOAT32):
        return Type.F32
    return matrix_type if value.shape[-1] % block == 0 else Type.F16


def stored(value: np.ndarray, type: Type) -> np.ndarray:
    """Encodes a tensor."""
    value = np.ascontiguousarray(value, np.float32)
    return value if type == Type.F32 else gguf.quants.quantize(value, type)


def permuted(value: np.ndarray, heads: int) -> np.ndarray:
    num_pairs = value.shape[0] // heads // 2
    halves = value.reshape(heads, 2, num_pairs, *value.shape[1:])
    return halves.swapaxes(1, 2).reshape(value.shape)


def translated(config: dict[str, Any], tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors by llama.cpp's names, in its order of axes and rows."""
    architecture = ARCHITECTURES[config["model_type"]]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(arch, layers)

    named = lambda name: names.get_name(name, try_suffixes=(".weight", ".bias"))
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        stem = name.rpartition(".")[0]
        parts = name.split(".")
        if architecture in PERMUTED and parts[-2] in ("q_proj", "k_proj"):
            heads = config[
                "num_attention_heads" if parts[-2] == "q_proj" else "num_key_value_heads"
            ]
            value = permuted(value, heads)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            value = value + np.float32(1)
        if ".experts." in name and parts[-3].isdigit():
            stack = ".".join([*parts[:-3], *parts[-2:]])
            experts.setdefault(stack, {})[int(parts[-3])] = value
        elif architecture == "gpt-oss" and ".experts." in name:
            kind = parts[-1].removesuffix("_bias")
            bias = parts[-1].endswith("_bias")
            value = value if bias else value.swapaxes(-1, -2)
            ending = ".bias" if bias else ".weight"
            halves = {"gate_proj": value[:, ::2], "up_proj": value[:, 1::2]}
            for part, half in halves.items() if kind == "gate_up_proj" else ((kind, value),):
                yield named(f"{stem}.{part}{ending}"), half
        elif name.endswith("kv_b_proj.weight"):
            heads = config["num_attention_heads"]
            key = config["qk_nope_head_dim"]
            size = config["v_head_dim"]
            both = value.reshape(heads, key + size, -1)
            yield named(name.replace("kv_b_proj", "k_b_proj")), both[:, :key].swapaxes(1, 2)
            yield named(name.replace("kv_b_proj", "v_b_proj")), both[:, key:]
        elif name.endswith("e_score_correction_bias"):
            yield named(f"{stem}.e_score_correction") + ".bias", value
        elif name.endswith("sinks"):
            yield named(f"{name}.weight"), value
        else:
            yield named(name), value
    for name, values in experts.items():
        yield named(name), np.stack([values[index] for index in sorted(values)])
    yield from rotations(config)


def rotations(config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the tensors of rotary embeddings; Llama 3.1's frequencies are transformers' own."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        from transformers import LlamaConfig
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
        exponents = np.arange(0, 1, 2 / config["head_dim"])
        divisors = rope["rope_theta"] ** -exponents / frequencies.numpy()
        yield "rope_freqs.weight", divisors.astype(np.float32)
    if rope.get("rope_type") == "longrope":
        for name in ("long", "short"):
            yield f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32)


# The methods of GGUFWriter, without ``add_``, that write a field.
_FIELDS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "layer_norm_eps": "layer_norm_eps",
    "sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "v_head_dim": "value_length_mla",
    "qk_rope_head_dim": "rope_dimension_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_shared_experts": "expert_shared_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}
_YARN = {
    "original_max_position_embeddings": "rope_scaling_orig_ctx_len",
    "beta_fast": "rope_scaling_yarn_beta_fast",
    "beta_slow": "rope_scaling_yarn_beta_slow",
}
# Families whose converters write the window.
_WINDOWED = ("gemma2", "gemma3_text", "gpt_oss", "cohere2", "phi3")


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Writes the metadata of a model."""
    kind = config["model_type"]
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    head_dim = config.get("head_dim")

    if kind not in _WINDOWED:
        config = config | {"sliding_window": None}
    if kind == "deepseek_v3":
        config = config | {"num_key_value_heads": 1}
    if kind == "phi3":
        config = config | {"sliding_window": config["sliding_window"] or 0}

    _add(writer, _FIELDS, config)
    if kind != "gemma2":  # its converter writes no base
        _add(writer, {"rope_theta": "rope_freq_base"}, full)

    if head_dim is not None and kind not in ("granite", "phi3", "deepseek_v3"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if kind in ("llama", "mistral", "ministral3", "granite"):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(head_dim or width // heads)

    if full.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
    if full.get("rope_type") == "yarn":
        _add(writer, _YARN, full)

    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if kind in ("cohere", "cohere2"):
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    if kind == "phi3":
        old = config["original_max_position_embeddings"]
        writer.add_rope_dimension_count(
            int(rope.get("partial_rotary_factor", 1.0) * width) // heads
        )
        writer.add_rope_scaling_orig_ctx_len(old)
        if rope["rope_type"] == "longrope":
            extension = math.log(config["max_position_embeddings"] / old) / math.log(old)
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + extension))

    if kind == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])

    if kind in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size") or config["intermediate_size"]
        )

    if kind == "deepseek_v3":
        writer.add_key_length(config["kv_lora_rank"] + config["qk_rope_head_dim"])
        writer.add_value_length(config["kv_lora_rank"])
        writer.add_key_length_mla(config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if config["norm_topk_prob"]:
            writer.add_expert_weights_norm(True)
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _add(writer: gguf.GGUFWriter, table: dict[str, str], fields: dict[str, Any]) -> None:
    """Writes the fields of a table that have a value."""
    for field, name in table.items():
        if fields.get(field) is not None:
            getattr(writer, f"add_{name}")(fields[field])


def write(
    directory: Path,
    path: Path,
    choose: Choose = everywhere(Type.F32),
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Writes a Hugging Face checkpoint as a GGUF file; ``more`` writes a tokenizer."""
    config = json.loads((directory / "config.json").read_text())
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])

    describe(writer, config)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    more(writer)

    for name, value in translated(config, read(directory)):
        type = choose(name, value)
        writer.add_tensor(name, stored(value, type), raw_dtype=type)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read(directory: Path) -> Tensors:
    """Reads all tensors in float32, without a tied projection."""
    config = json.loads((directory / "config.json").read_text())
    tensors = {
        name: value.astype(np.float32)
        for name, value in load_file(directory / "model.safetensors").items()
    }
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    return tensors


def round_to(directory: Path, choose: Choose) -> None:
    """Replaces the weights in a directory by their values after storage in the chosen types."""
    config = json.loads((directory / "config.json").read_text())
    tensors = read(directory)
    for name, value in tensors.items():
        turned = config["model_type"] == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj"))
        rows = value.swapaxes(-1, -2) if turned else value
        type = choose(name, rows)
        values = gguf.quants.dequantize(stored(rows, type), type).reshape(rows.shape)
        tensors[name] = np.ascontiguousarray(values.swapaxes(-1, -2) if turned else values)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
