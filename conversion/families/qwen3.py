"""Qwen3: queries and keys are normalised per head, and heads have a size of their own."""

from __future__ import annotations

from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families import qwen2
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.families.wrapper import Wrapper
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.hf_rope import read_rope
from eagle3_jax.models.config import DecoderConfig, grouped


def read_config(fields: Fields) -> DecoderConfig:
    """Windows as in Qwen2; one flag for all four biases of attention.

    Qwen3-VL divides the channels between time, height and width (mrope). A token of text has the same position in all
    three, so the rotation of text is the plain one.
    """
    fields.require("num_key_value_heads", "head_dim")
    bias = fields.flag("attention_bias")
    rope = read_rope(fields, known=("mrope_section", "mrope_interleaved"))
    mixer = hf_config.read_mixer(fields, qkv_bias=bias, o_bias=bias, qk_norm=True, rope=rope)
    return hf_config.read_decoder(fields, mixer, hf_config.read_mlp(fields), windows=qwen2.read_windows(fields))


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """See :class:`Family`."""
    return {"attention_bias": grouped(config.layers[0]).qkv_bias, **qwen2.window_fields(config)}


FAMILY = Family(
    model_type="qwen3",
    label="Qwen3",
    architecture="Qwen3ForCausalLM",
    read_config=read_config,
    write_fields=write_fields,
)
# Qwen3-VL adds what its encoder sees to the first layers as well (deepstack). That concerns images alone.
WRAPPER = Wrapper(
    model_type="qwen3_vl",
    label="Qwen3-VL",
    texts={"qwen3_vl_text": "qwen3"},
    prefixes=(("model.language_model.", "model."),),
    ignored=(r"(model\.)?visual\..*",),
)
