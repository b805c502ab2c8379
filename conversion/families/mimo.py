"""Xiaomi MiMo: Qwen2 with a module for multi-token prediction."""

from __future__ import annotations

from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import Family, Modules
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig


def read_config(fields: Fields) -> DecoderConfig:
    """Reads a target without windows; queries, keys and values always have a bias."""
    hf_config.refuse_windows(fields)
    hf_config.require_theta(fields)
    fields.require("num_key_value_heads", "head_dim")
    fields.only(attention_bias=True, use_mrope=False)
    mixer = hf_config.read_mixer(fields, qkv_bias=True)
    return hf_config.read_decoder(fields, mixer, hf_config.read_mlp(fields))


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    del config
    return {"attention_bias": True, "use_sliding_window": False, "num_nextn_predict_layers": 0}


FAMILY = Family(
    model_type="mimo",
    label="MiMo",
    architecture="MiMoForCausalLM",
    read_config=read_config,
    write_fields=write_fields,
    # Both as in vLLM, for which Xiaomi wrote the only program that drafts with them.
    modules=Modules(
        "mimo",
        pattern=r"model\.mtp_layers\..*",
        number=r"model\.mtp_layers\.(\d{1,9})\.",
        normed_state=False,
        zero_first=True,
    ),
)
