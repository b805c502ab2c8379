"""Qwen2, Qwen2.5, Qwen3 and Qwen3-MoE, which share the fields of windows."""

from __future__ import annotations

import functools
from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import Family, Wrapper
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, GroupedQuery, LayerConfig, grouped


def read_qwen2(fields: Fields) -> DecoderConfig:
    """Reads Qwen2: queries, keys and values always have a bias, the output projection never."""
    fields.require("num_key_value_heads")
    mixer = hf_config.read_mixer(fields, qkv_bias=True)
    mlp = hf_config.read_mlp(fields)
    return hf_config.read_decoder(fields, mixer, mlp, windows=read_windows(fields))


def read_qwen3(fields: Fields) -> DecoderConfig:
    """Reads Qwen3, with windows as in Qwen2.

    Qwen3-VL divides the channels between time, height and width (mrope). A token of text has the
    same position in all three, so the rotation of text is the plain one.
    """
    mixer = _normed(fields, known=("mrope_section", "mrope_interleaved"))
    return hf_config.read_decoder(
        fields, mixer, hf_config.read_mlp(fields), windows=read_windows(fields)
    )


def read_qwen3_moe(fields: Fields) -> DecoderConfig:
    """Reads Qwen3-MoE: experts in some layers; a window, if it is switched on, in all layers."""
    fields.require("norm_topk_prob")
    window = hf_config.read_window(fields) if fields.flag("use_sliding_window") else None
    hf_config.read_window_of_all(fields, window)
    mixer = _normed(fields, window=window)
    experts = functools.partial(
        hf_config.read_experts, router="softmax", normalise=fields.flag("norm_topk_prob")
    )
    mlps = hf_config.read_mlps(fields, read_sparse_layers(fields), experts)
    return hf_config.decoder_of(fields, [LayerConfig(mixer=mixer, mlp=mlp) for mlp in mlps])


def _normed(
    fields: Fields, *, known: tuple[str, ...] = (), window: int | None = None
) -> GroupedQuery:
    """Reads the attention of Qwen3, with norms of queries and keys per head."""
    fields.require("num_key_value_heads", "head_dim")
    rope = hf_config.read_rope(fields, known=known)
    return hf_config.read_biased_mixer(fields, qk_norm=True, rope=rope, window=window)


def read_windows(fields: Fields) -> list[int | None]:
    """Reads the window of every layer; a size counts only if windows are switched on."""
    window = hf_config.read_window(fields) if fields.flag("use_sliding_window") else None
    first = (
        0 if window is None or fields.words("layer_types") else fields.integer("max_window_layers")
    )
    return hf_config.read_windows(
        fields, window, lambda layer: window is not None and layer >= first
    )


def window_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of windows.

    Engines read ``layer_types``, or the number of layers before the first window.
    """
    windows = [grouped(layer).window for layer in config.layers]
    sliding = [index for index, window in enumerate(windows) if window is not None]
    return {
        **hf_config.window_fields(config),
        "use_sliding_window": bool(sliding),
        "max_window_layers": sliding[0] if sliding else len(windows),
    }


def read_sparse_layers(fields: Fields) -> list[bool]:
    """Tells for every layer whether it has experts.

    These are every ``decoder_sparse_step``-th outside of ``mlp_only_layers``.
    """
    count = hf_config.read_num_layers(fields)
    step = fields.size("decoder_sparse_step", 1)
    dense = fields.indices("mlp_only_layers", count) or []
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(count)]


def sparse_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of experts and of the layers that have them."""
    experts = hf_config.experts_of(config)
    return {
        **hf_config.size_fields(experts),
        "norm_topk_prob": experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": hf_config.dense_layers(config),
    }


def _qwen3_fields(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": grouped(config.layers[0]).qkv_bias, **window_fields(config)}


def _qwen3_moe_fields(config: DecoderConfig) -> dict[str, Any]:
    mixer = grouped(config.layers[0])
    windows = {"use_sliding_window": mixer.window is not None, "sliding_window": mixer.window}
    return {"attention_bias": mixer.qkv_bias, **windows, **sparse_fields(config)}


def _check_text(text: Fields) -> None:
    """Refuses windows, and a missing rotary base, whose default differs from Qwen3's."""
    hf_config.refuse_windows(text)
    hf_config.require_theta(text)


FAMILIES = (
    Family("qwen2", "Qwen2", "Qwen2ForCausalLM", read_qwen2, window_fields),
    Family("qwen3", "Qwen3", "Qwen3ForCausalLM", read_qwen3, _qwen3_fields),
    Family("qwen3_moe", "Qwen3-MoE", "Qwen3MoeForCausalLM", read_qwen3_moe, _qwen3_moe_fields),
)
# Qwen3-VL also adds the output of its encoder to the first layers (deepstack), but only for images.
WRAPPER = Wrapper(
    model_type="qwen3_vl",
    label="Qwen3-VL",
    texts={"qwen3_vl_text": "qwen3"},
    prefixes=(("model.language_model.", "model."),),
    ignored=(r"(model\.)?visual\..*",),
    check=_check_text,
)
