"""OLMo-2: norms of the outputs of mixer and MLP, and of all queries and all keys together."""

from __future__ import annotations

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, LayerConfig, grouped


def read_config(fields: Fields) -> DecoderConfig:
    """Reads an OLMo-2: one flag for all biases of attention; every norm multiplies in float32."""
    hf_config.refuse_windows(fields)
    mixer = hf_config.read_biased_mixer(fields, qk_norm=True, qk_norm_kind="whole")
    layer = LayerConfig(mixer=mixer, mlp=hf_config.read_mlp(fields), norms="after")
    return hf_config.decoder_of(
        fields, [layer] * hf_config.read_num_layers(fields), norm_kind="float32"
    )


FAMILY = Family(
    model_type="olmo2",
    label="OLMo-2",
    architecture="Olmo2ForCausalLM",
    read_config=read_config,
    write_fields=lambda config: {"attention_bias": grouped(config.layers[0]).qkv_bias},
)
