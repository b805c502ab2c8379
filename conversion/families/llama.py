"""Llama, and models that are published in its format."""

from __future__ import annotations

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig


def read_config(fields: Fields) -> DecoderConfig:
    """Reads a Llama: one flag for the biases of attention, one for the MLP's, and no windows."""
    hf_config.refuse_windows(fields)
    mlp = hf_config.read_mlp(fields, bias=fields.flag("mlp_bias"))
    return hf_config.read_decoder(fields, hf_config.read_biased_mixer(fields), mlp)


FAMILY = Family(
    model_type="llama",
    label="Llama",
    architecture="LlamaForCausalLM",
    read_config=read_config,
    write_fields=lambda config: hf_config.bias_fields(config.layers[0]),
)
