"""GGUF files written from Hugging Face checkpoints as llama.cpp's converter writes them, with its own names of tensors.

The transformations are those of llama.cpp's ``conversion`` package; the names come from the package ``gguf``.
"""

from __future__ import annotations

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


# Tensors of more than one axis that stay in float32, in llama.cpp's names and in ours: small ones, and two whose rows
# are others in the file.
_IN_FLOAT32 = ("norm", "bias", "gate_inp", "mlp.gate.", "mlp.router.", "attn_k_b.", "attn_v_b.", "kv_b_proj.")


def everywhere(matrix_type: Type) -> Choose:
    """This type for matrices whose rows are whole blocks, float16 for other matrices, and float32 for the rest."""
    block, _ = gguf.GGML_QUANT_SIZES[matrix_type]

    def choose(name: str, value: np.ndarray) -> Type:
        if value.ndim == 1 or any(part in name for part in _IN_FLOAT32):
            return Type.F32
        return matrix_type if value.shape[-1] % block == 0 else Type.F16

    return choose


def stored(value: np.ndarray, type: Type) -> np.ndarray:
    """The bytes of a tensor."""
    value = np.ascontiguousarray(value, np.float32)
    return value if type == Type.F32 else gguf.quants.quantize(value, type)


def permuted(value: np.ndarray, heads: int) -> np.ndarray:
    return value.reshape(heads, 2, value.shape[0] // heads // 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)


def translated(config: dict[str, Any], tensors: Tensors) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a Hugging Face checkpoint under llama.cpp's names, in its order of axes and rows."""
    architecture = ARCHITECTURES[config["model_type"]]
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    layers = config["num_hidden_layers"]
    names = gguf.get_tensor_name_map(arch, layers)

    def named(name: str) -> str:
        translated_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert translated_name is not None, name
        return translated_name

    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in tensors.items():
        stem = name.rpartition(".")[0]
        parts = name.split(".")
        if architecture in PERMUTED and parts[-2] in ("q_proj", "k_proj"):
            heads = config["num_attention_heads" if parts[-2] == "q_proj" else "num_key_value_heads"]
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
    """The tensors of rotary embeddings."""
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        size = config["head_dim"]
        old = 8192
        factors = []
        for index in range(0, size, 2):
            length = 2 * math.pi * rope["rope_theta"] ** (index / size)
            low = rope["low_freq_factor"]
            high = rope["high_freq_factor"]
            factor = rope["factor"]
            smooth = (old / length - low) / (high - low)
            between = 1 / ((1 - smooth) / factor + smooth)
            factors.append(1 if length < old / high else factor if length > old / low else between)
        yield "rope_freqs.weight", np.array(factors, np.float32)
    for name in ("long", "short"):
        if rope.get("rope_type") == "longrope":
            yield f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32)


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """The metadata of a model."""
    kind = config["model_type"]
    rope = config.get("rope_parameters") or {}
    full_rope = rope.get("full_attention", rope)
    heads = config["num_attention_heads"]
    width = config["hidden_size"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(1 if kind == "deepseek_v3" else config["num_key_value_heads"])
    if kind != "gemma2" and full_rope.get("rope_theta") is not None:  # its converter writes no base
        writer.add_rope_freq_base(full_rope["rope_theta"])
    if config.get("rms_norm_eps") is not None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("layer_norm_eps") is not None:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    if config.get("head_dim") is not None and kind not in ("granite", "phi3", "deepseek_v3"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if kind in ("llama", "mistral", "ministral3", "granite"):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config.get("head_dim") or width // heads)
    if full_rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full_rope["rope_type"]))
        writer.add_rope_scaling_factor(full_rope["factor"])
    if full_rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(full_rope["original_max_position_embeddings"])
        for name in ("beta_fast", "beta_slow"):
            if full_rope.get(name) is not None:
                getattr(writer, f"add_rope_scaling_yarn_{name}")(full_rope[name])
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if kind in ("gemma2", "gemma3_text", "gpt_oss", "cohere2"):
        writer.add_sliding_window(config["sliding_window"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if kind in ("cohere", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind == "phi3":
        share = rope.get("partial_rotary_factor", 1.0)
        old = config["original_max_position_embeddings"]
        new = config["max_position_embeddings"]
        writer.add_rope_dimension_count(int(share * width) // heads)
        writer.add_rope_scaling_orig_ctx_len(old)
        writer.add_sliding_window(config["sliding_window"] or 0)
        if rope["rope_type"] == "longrope":
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(new / old) / math.log(old)))
    if kind == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind in ("qwen3_moe", "gpt_oss", "deepseek_v3"):
        counts = (config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
        writer.add_expert_count(next(count for count in counts if count))
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if kind == "deepseek_v3":
        rope_dim = config["qk_rope_head_dim"]
        rank = config["kv_lora_rank"]
        if config["q_lora_rank"] is not None:
            writer.add_q_lora_rank(config["q_lora_rank"])
        writer.add_kv_lora_rank(rank)
        writer.add_key_length(rank + rope_dim)
        writer.add_value_length(rank)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rope_dim)
        writer.add_value_length_mla(config["v_head_dim"])
        writer.add_rope_dimension_count(rope_dim)
        writer.add_leading_dense_block_count(config["first_k_dense_replace"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if config["norm_topk_prob"]:
            writer.add_expert_weights_norm(True)
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def write(
    directory: Path,
    path: Path,
    choose: Choose = everywhere(Type.F32),
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Write the Hugging Face checkpoint in a directory as a GGUF file; ``more`` writes a tokenizer."""
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
    """All tensors in float32; a tied projection once."""
    config = json.loads((directory / "config.json").read_text())
    tensors = {name: value.astype(np.float32) for name, value in load_file(directory / "model.safetensors").items()}
    if config["tie_word_embeddings"]:
        tensors.pop("lm_head.weight", None)
    return tensors


def round_to(directory: Path, choose: Choose) -> None:
    """Replace the weights in a directory by what they stand for when they are stored in these types."""
    config = json.loads((directory / "config.json").read_text())
    tensors = read(directory)
    for name, value in tensors.items():
        turned = config["model_type"] == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj"))
        rows = value.swapaxes(-1, -2) if turned else value
        type = choose(name, rows)
        values = gguf.quants.dequantize(stored(rows, type), type).reshape(rows.shape)
        tensors[name] = np.ascontiguousarray(values.swapaxes(-1, -2) if turned else values)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
