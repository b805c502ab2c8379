"""Qwen2 and Qwen2.5: queries, keys and values always have a bias, the output projection never."""

from __future__ import annotations

from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, grouped


def read_config(fields: Fields) -> DecoderConfig:
    """Windows of the layers from ``max_window_layers`` on, where they are switched on at all."""
    fields.require("num_key_value_heads")
    mixer, mlp = hf_config.read_mixer(fields, qkv_bias=True), hf_config.read_mlp(fields)
    return hf_config.read_decoder(fields, mixer, mlp, windows=read_windows(fields))


def read_windows(fields: Fields) -> list[int | None]:
    """The window of every layer, as Qwen2 and Qwen3 say it: a size in the file counts only where it is switched on."""
    window = hf_config.read_window(fields) if fields.flag("use_sliding_window") else None
    first = 0 if window is None or fields.words("layer_types") else fields.integer("max_window_layers")
    return hf_config.read_windows(fields, window, lambda layer: window is not None and layer >= first)


def window_fields(config: DecoderConfig) -> dict[str, Any]:
    """The same on the way out; engines read ``layer_types`` or the number of layers before the first window."""
    windows = [grouped(layer).window for layer in config.layers]
    sliding = [index for index, window in enumerate(windows) if window is not None]
    return {
        "use_sliding_window": bool(sliding),
        "sliding_window": windows[sliding[0]] if sliding else None,
        "max_window_layers": sliding[0] if sliding else len(windows),
        "layer_types": hf_config.layer_types(config),
    }


FAMILY = Family(
    model_type="qwen2",
    label="Qwen2",
    architecture="Qwen2ForCausalLM",
    read_config=read_config,
    write_fields=window_fields,
)
