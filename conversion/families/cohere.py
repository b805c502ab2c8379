"""Command R and Command A: attention and MLP read the same LayerNorm; logits are scaled."""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, GroupedQuery, LayerConfig, grouped


def read_cohere(fields: Fields) -> DecoderConfig:
    """Reads Command R, whose queries and keys may have norms, with weights for every head."""
    hf_config.refuse_windows(fields)
    normed = fields.flag("use_qk_norm")
    mixer = _mixer(fields, qk_norm=normed, qk_norm_kind="own-weights" if normed else "per-head")
    return _decoder(fields, [mixer] * hf_config.read_num_layers(fields))


def read_cohere2(fields: Fields) -> DecoderConfig:
    """Reads Command A, whose layers have a window and rotate, or have neither."""
    period = fields.size("sliding_window_pattern", 4)
    windows = hf_config.read_windows(
        fields, hf_config.read_window(fields), lambda layer: (layer + 1) % period > 0
    )
    mixer = _mixer(fields)
    full = dataclasses.replace(mixer, rope=None)
    mixers = [
        full if window is None else dataclasses.replace(mixer, window=window) for window in windows
    ]
    return _decoder(fields, mixers)


def _mixer(fields: Fields, **features: Any) -> GroupedQuery:
    hf_config.require_theta(fields)
    return hf_config.read_biased_mixer(
        fields, rope=hf_config.read_rope(fields, interleaved=True), **features
    )


def _decoder(fields: Fields, mixers: list[GroupedQuery]) -> DecoderConfig:
    fields.only(
        use_parallel_block=True,
        use_gated_activation=True,
        position_embedding_type="rope_gptj",
        rotary_pct=1.0,
    )

    mlp = hf_config.read_mlp(fields)
    scale = fields.number("logit_scale")
    layers = [LayerConfig(mixer=mixer, mlp=mlp, norms="parallel") for mixer in mixers]
    return hf_config.decoder_of(
        fields, layers, norm_kind="layer", norm_eps="layer_norm_eps", tied=True, logit_scale=scale
    )


def write_cohere(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    mixer = grouped(config.layers[0])
    return {
        "layer_norm_eps": config.norm_eps,
        "logit_scale": config.logit_scale,
        "attention_bias": mixer.qkv_bias,
        "use_qk_norm": mixer.qk_norm,
    }


def write_cohere2(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    fields = write_cohere(config) | hf_config.window_fields(config)
    del fields["use_qk_norm"]
    return fields


FAMILIES = (
    Family("cohere", "Command R", "CohereForCausalLM", read_cohere, write_cohere),
    Family("cohere2", "Command R7B, Command A", "Cohere2ForCausalLM", read_cohere2, write_cohere2),
)
