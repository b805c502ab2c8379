"""gpt-oss: sinks, windows in every second layer, biases everywhere, experts with clamped gates."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from eagle3_jax.conversion import blocks, hf_config
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, Experts

# Factor of the input of the sigmoid in an expert's gate.
_ALPHA = 1.702


def read_config(fields: Fields) -> DecoderConfig:
    """Reads gpt-oss: every projection of attention has a bias; norms multiply in float32."""
    fields.require("num_key_value_heads", "head_dim", "swiglu_limit")
    if fields.get("rope_parameters") is None:
        fields.require("rope_scaling")
    fields.only(attention_bias=True, swiglu_alpha=_ALPHA)

    mixer = hf_config.read_mixer(
        fields, qkv_bias=True, o_bias=True, rope=hf_config.read_rope(fields, theta=150_000.0)
    )
    experts = hf_config.read_experts(
        fields,
        "softmax-of-chosen",
        width="intermediate_size",
        bias=True,
        limit=fields.number("swiglu_limit"),
    )
    windows = hf_config.read_windows(
        fields, hf_config.read_window(fields), lambda layer: layer % 2 == 0
    )

    config = hf_config.read_decoder(
        fields, dataclasses.replace(mixer, sinks=True), experts, windows=windows
    )
    return dataclasses.replace(config, norm_kind="float32")


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    experts = hf_config.experts_of(config)
    return {
        "attention_bias": True,
        **hf_config.window_fields(config),
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "experts_per_token": experts.per_token,
        "swiglu_limit": experts.limit,
    }


_experts = functools.partial(
    blocks.experts,
    router="router",
    kernels=functools.partial(blocks.stacked, transpose=False, in_halves=False),
)

FAMILY = Family(
    model_type="gpt_oss",
    label="gpt-oss",
    architecture="GptOssForCausalLM",
    read_config=read_config,
    write_fields=write_fields,
    rules=functools.partial(blocks.decoder, parts={Experts: _experts}),
)
