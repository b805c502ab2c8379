"""Qwen3-MoE: Qwen3's attention, and experts in all layers but some."""

from __future__ import annotations

import functools
from typing import Any

from eagle3_jax.conversion import hf_config, hf_experts
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, LayerConfig, grouped


def read_config(fields: Fields) -> DecoderConfig:
    """Windows, where they are switched on, are those of all layers."""
    fields.require("num_key_value_heads", "head_dim", "norm_topk_prob")
    bias, count = fields.flag("attention_bias"), hf_config.read_num_layers(fields)
    mixer = hf_config.read_mixer(fields, qkv_bias=bias, o_bias=bias, qk_norm=True)
    mlps = hf_experts.dense_or_sparse(
        count,
        read_sparse_layers(fields, count).__contains__,
        functools.partial(hf_config.read_mlp, fields),
        lambda: hf_experts.read_experts(fields, "softmax", normalise=fields.flag("norm_topk_prob")),
    )
    window = hf_config.read_window(fields) if fields.flag("use_sliding_window") else None
    windows = hf_config.read_windows(fields, window, lambda _: True)
    if len(set(windows)) > 1:
        raise CheckpointError(f"{fields.where}: layer_types differ, but this family has windows in all layers or none")
    layers = [LayerConfig(mixer=mixer, mlp=mlp) for mlp in mlps]
    return hf_config.decoder_of(fields, [hf_config.with_window(layer, windows[0]) for layer in layers])


def read_sparse_layers(fields: Fields, num_layers: int) -> list[int]:
    """The layers that have experts: every ``decoder_sparse_step``-th, but those of ``mlp_only_layers``."""
    step, dense = fields.size("decoder_sparse_step", 1), fields.indices("mlp_only_layers", num_layers) or []
    return [layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0]


def sparse_fields(config: DecoderConfig) -> dict[str, Any]:
    """Experts, and the layers that have them, on the way out."""
    experts = hf_experts.experts_of(config)
    return {
        **hf_experts.size_fields(experts),
        "norm_topk_prob": experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": hf_experts.dense_layers(config),
    }


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """See :class:`Family`."""
    mixer = grouped(config.layers[0])
    windows = {"use_sliding_window": mixer.window is not None, "sliding_window": mixer.window}
    return {"attention_bias": mixer.qkv_bias, **windows, **sparse_fields(config)}


FAMILY = Family(
    model_type="qwen3_moe",
    label="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    read_config=read_config,
    write_fields=write_fields,
)
