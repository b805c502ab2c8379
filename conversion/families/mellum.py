"""Mellum 2: layers with and without a window, each kind with its own rotation; experts."""

from __future__ import annotations

import functools
from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import MTP, Family
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, LayerConfig, RopeConfig, grouped

_KINDS = _FULL, _SLIDING = ("full_attention", "sliding_attention")
_MLPS = _DENSE, _SPARSE = ("dense", "sparse")


def read_config(fields: Fields) -> DecoderConfig:
    """Reads a target; every layer is sparse unless ``mlp_layer_types`` say otherwise."""
    fields.require("num_key_value_heads", "head_dim", "norm_topk_prob")
    count = hf_config.read_num_layers(fields)
    kinds = hf_config.read_types(fields, _KINDS, count) or [_FULL] * count
    window = hf_config.read_window(fields) if _SLIDING in kinds else None
    if _SLIDING in kinds and window is None:
        raise fields.wrong("sliding_window", f"layer_types has {_SLIDING!r}, so expected a size")

    mixers = {}
    for kind in set(kinds):
        size = window if kind == _SLIDING else None
        rope = _rope(fields, kind)
        mixers[kind] = hf_config.read_biased_mixer(fields, qk_norm=True, rope=rope, window=size)

    types = hf_config.read_types(fields, _MLPS, count, name="mlp_layer_types")
    experts = functools.partial(
        hf_config.read_experts, router="softmax", normalise=fields.flag("norm_topk_prob")
    )
    sparse = [kind == _SPARSE for kind in types or [_SPARSE] * count]
    mlps = hf_config.read_mlps(fields, sparse, experts)
    layers = [
        LayerConfig(mixer=mixers[kind], mlp=mlp) for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    return hf_config.decoder_of(fields, layers)


def _rope(fields: Fields, kind: str) -> RopeConfig:
    """Reads the rotation of a kind of layer: every kind has an object of its own."""
    ropes = fields.section("rope_parameters")
    if ropes.values.keys() - {*_KINDS} or not ropes.section(kind).values:
        raise fields.wrong("rope_parameters", f"expected an object for {kind!r}")
    return hf_config.read_rope(Fields({"rope_parameters": ropes.get(kind)}, ropes.where))


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`, with the rotation of each kind of layer."""
    mixers = [grouped(layer) for layer in config.layers]
    dense = hf_config.dense_layers(config)
    experts = hf_config.experts_of(config)
    ropes = {
        _FULL if mixer.window is None else _SLIDING: hf_config.rope_fields(mixer.rope)
        for mixer in mixers
    }
    return {
        **hf_config.window_fields(config),
        **hf_config.size_fields(experts),
        "attention_bias": mixers[0].qkv_bias,
        "norm_topk_prob": experts.normalise,
        "mlp_layer_types": [
            _DENSE if layer in dense else _SPARSE for layer in range(config.num_layers)
        ],
        # There is no older notation, and transformers would read one alone.
        "rope_theta": hf_config.ABSENT,
        "rope_scaling": hf_config.ABSENT,
        "rope_parameters": {kind: rope["rope_parameters"] for kind, rope in ropes.items()},
    }


def _of_modules(fields: Fields, count: int) -> dict[str, Any]:
    """Fields of the modules; by default they have a window and experts."""
    return {
        "layer_types": fields.get("mtp_layer_types") or [_SLIDING] * count,
        "mlp_layer_types": fields.get("mtp_mlp_layer_types") or [_SPARSE] * count,
    }


FAMILY = Family(
    model_type="mellum",
    label="Mellum 2",
    architecture="MellumForCausalLM",
    read_config=read_config,
    write_fields=write_fields,
    modules=MTP._replace(fields=_of_modules),
)
