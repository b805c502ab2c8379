"""Qwen3.5, dense and of experts: the layers of Qwen3-Next, published with an encoder of images."""

from __future__ import annotations

import functools
from typing import Any

from eagle3_jax.conversion import blocks, hf_config, hf_experts
from eagle3_jax.conversion.families import qwen3_next
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.families.wrapper import Wrapper
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, Experts, GatedDelta


def read_config(fields: Fields) -> DecoderConfig:
    """A dense MLP in every layer."""
    mixers, mlp = qwen3_next.read_mixers(fields), hf_config.read_mlp(fields)
    layers = qwen3_next.layers_of(mixers, [mlp] * len(mixers))
    return hf_config.decoder_of(fields, layers, norm_kind="zero-centred")


def read_sparse(fields: Fields) -> DecoderConfig:
    """Experts in every layer, whose weights always sum to one."""
    mixers, experts = qwen3_next.read_mixers(fields), qwen3_next.read_experts(fields, normalise=True)
    layers = qwen3_next.layers_of(mixers, [experts] * len(mixers))
    return hf_config.decoder_of(fields, layers, norm_kind="zero-centred")


def sparse_fields(config: DecoderConfig) -> dict[str, Any]:
    """See :class:`Family`."""
    experts = hf_experts.experts_of(config)
    shared = {"shared_expert_intermediate_size": experts.shared_width}
    return {**qwen3_next.mixer_fields(config), **hf_experts.size_fields(experts), **shared}


def _rules(kernels: Any) -> Any:
    experts = functools.partial(qwen3_next.shared_experts, kernels=kernels)
    return functools.partial(blocks.decoder, parts={GatedDelta: qwen3_next.flat_delta, Experts: experts})


def _wrapper(model_type: str, label: str) -> Wrapper:
    return Wrapper(
        model_type=model_type,
        label=label,
        texts={f"{model_type}_text": f"{model_type}_text"},
        prefixes=(("model.language_model.", "model."),),
        ignored=(r"(model\.)?visual\..*", r"mtp\..*"),
    )


FAMILIES = (
    Family(
        model_type="qwen3_5_text",
        label="Qwen3.5",
        architecture="Qwen3_5ForCausalLM",
        read_config=read_config,
        write_fields=qwen3_next.mixer_fields,
        rules=_rules(blocks.separate),
        beside=qwen3_next.drafting_module,
    ),
    Family(
        model_type="qwen3_5_moe_text",
        label="Qwen3.5-MoE",
        architecture="Qwen3_5MoeForCausalLM",
        read_config=read_sparse,
        write_fields=sparse_fields,
        rules=_rules(blocks.separate),
        # With the encoder of images the experts of a layer are one tensor.
        also=(_rules(functools.partial(blocks.stacked, transpose=True, in_halves=True)),),
        beside=qwen3_next.drafting_module,
    ),
)
# What is published reads images too.
WRAPPERS = (_wrapper("qwen3_5", "Qwen3.5 with images"), _wrapper("qwen3_5_moe", "Qwen3.5-MoE with images"))
