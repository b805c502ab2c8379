"""GLM-4.5, 4.6 and 4.7: half of the channels rotate; dense layers, then DeepSeek V3's experts."""

from __future__ import annotations

from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import BEHIND, Family
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, LayerConfig, grouped


def read_config(fields: Fields) -> DecoderConfig:
    """Reads a target; q, k and v may have biases, and q and k may have norms."""
    hf_config.refuse_windows(fields)
    fields.require("num_key_value_heads", "head_dim", "n_shared_experts", "n_group", "topk_group")
    mixer = hf_config.read_mixer(
        fields,
        qkv_bias=fields.flag("attention_bias"),
        qk_norm=fields.flag("use_qk_norm"),
        rope=hf_config.read_rope(fields, partial=0.5),
    )
    layers = [LayerConfig(mixer=mixer, mlp=mlp) for mlp in hf_config.read_corrected_mlps(fields)]
    return hf_config.decoder_of(fields, layers)


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    mixer = grouped(config.layers[0])
    num_dense = len(hf_config.dense_layers(config))
    experts = hf_config.experts_of(config)
    return {
        **hf_config.rope_fields(mixer.rope, partial=True),
        "attention_bias": mixer.qkv_bias,
        "use_qk_norm": mixer.qk_norm,
        "first_k_dense_replace": num_dense,
        "num_nextn_predict_layers": 0,
        **hf_config.corrected_fields(experts),
    }


FAMILY = Family(
    model_type="glm4_moe",
    label="GLM-4.5, 4.6, 4.7",
    architecture="Glm4MoeForCausalLM",
    read_config=read_config,
    write_fields=write_fields,
    modules=BEHIND,
)
