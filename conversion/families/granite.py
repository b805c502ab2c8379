"""Granite 3: a Llama with factors of the embedding, the scores, what blocks add, and the logits."""

from __future__ import annotations

from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.models.config import DecoderConfig, LayerConfig, grouped


def read_config(fields: Fields) -> DecoderConfig:
    """Reads a Granite. ``logits_scaling`` is a divisor; the other factors multiply."""
    hf_config.refuse_windows(fields)
    fields.require(
        "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"
    )
    scaling = fields.number("logits_scaling")
    if scaling <= 0:
        raise fields.wrong("logits_scaling", "expected a positive number")

    mixer = hf_config.read_biased_mixer(fields, scale=fields.number("attention_multiplier"))
    mlp = hf_config.read_mlp(fields, bias=fields.flag("mlp_bias"))
    factor = fields.number("residual_multiplier")
    with read_from(fields.where):
        layer = LayerConfig(mixer=mixer, mlp=mlp, residual_scale=factor)
    return hf_config.decoder_of(
        fields,
        [layer] * hf_config.read_num_layers(fields),
        embedding_scale=fields.number("embedding_multiplier"),
        logit_scale=1 / scaling,
    )


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    layer = config.layers[0]
    mixer = grouped(layer)
    scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
    return {
        **hf_config.bias_fields(layer),
        "embedding_multiplier": config.embedding_scale,
        "attention_multiplier": scale,
        "residual_multiplier": layer.residual_scale,
        "logits_scaling": 1 / config.logit_scale,
    }


FAMILY = Family("granite", "Granite 3", "GraniteForCausalLM", read_config, write_fields)
