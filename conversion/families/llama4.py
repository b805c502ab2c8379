"""Llama 4 Scout and Maverick, the language model: chunks of positions, an expert a token."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from eagle3_jax.conversion import blocks, hf_config
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.families.family import Family, Wrapper
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.models.config import (
    DecoderConfig,
    Experts,
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    QueryScaling,
    grouped,
)

_KINDS = _CHUNKED, _FULL = ("chunked_attention", "full_attention")


def read_config(fields: Fields) -> DecoderConfig:
    """Reads a Llama 4.

    Some layers rotate and normalise queries and keys; the others scale queries by position.
    """
    fields.require("num_key_value_heads", "head_dim", "use_qk_norm", "attention_chunk_size")
    count = hf_config.read_num_layers(fields)
    mlps = hf_config.read_mlps(fields, _sparse_layers(fields, count), _experts, _dense)
    mixers = _mixers(fields, count)
    layers = [LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]
    return hf_config.decoder_of(fields, layers)


def _dense(fields: Fields) -> GatedMLP:
    with read_from(fields.where):
        return GatedMLP(width=fields.size("intermediate_size_mlp"))


def _experts(fields: Fields) -> Experts:
    width = fields.size("intermediate_size")
    return hf_config.read_experts(
        fields, "sigmoid-of-input", width="intermediate_size", shared_width=width
    )


def _sparse_layers(fields: Fields, num_layers: int) -> list[bool]:
    """Tells for every layer whether it has experts, by its number or by a step."""
    named = fields.indices("moe_layers", num_layers)
    if named is not None:
        return [layer in named for layer in range(num_layers)]
    step = fields.size("interleave_moe_layer_step")
    return [(layer + 1) % step == 0 for layer in range(num_layers)]


def _mixers(fields: Fields, num_layers: int) -> list[GroupedQuery]:
    chunk = fields.size("attention_chunk_size")
    rope = hf_config.read_rope(fields, theta=500_000.0, interleaved=True)
    usual = hf_config.read_biased_mixer(fields, rope=rope)

    rotates = _rotating(fields, num_layers)
    types = hf_config.read_types(fields, _KINDS, num_layers)
    if not types:
        types = [_CHUNKED if is_rotating else _FULL for is_rotating in rotates]

    rotating: dict[str, Any] = {"qk_l2_norm": fields.flag("use_qk_norm")}
    fixed: dict[str, Any] = {"rope": None, "query_scaling": _query_scaling(fields)}
    mixers = []
    for is_rotating, kind in zip(rotates, types, strict=True):
        features = rotating if is_rotating else fixed
        with read_from(fields.where):
            mixers.append(
                dataclasses.replace(usual, chunk=chunk if kind == _CHUNKED else None, **features)
            )
    return mixers


def _rotating(fields: Fields, num_layers: int) -> list[bool]:
    """Tells for every layer whether it rotates.

    In ``no_rope_layers``, 1 means that the layer rotates. Without that list, all layers rotate
    except every ``no_rope_layer_interval``-th.
    """
    flags = fields.indices("no_rope_layers", 2)
    if not flags:
        interval = fields.size("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(flags) != num_layers:
        raise CheckpointError(
            f"{fields.where}: no_rope_layers names {len(flags)} layers but num_hidden_layers is"
            f" {num_layers}; they must agree"
        )
    return [flag == 1 for flag in flags]


def _query_scaling(fields: Fields) -> QueryScaling | None:
    """Reads the scaling of queries."""
    # Published files omit its three fields, or have the first as a number.
    switch = fields.get("attn_temperature_tuning")
    if not isinstance(switch, bool):
        switch = fields.integer("attn_temperature_tuning", 1)
    if not switch:
        return None
    with read_from(fields.where):
        return QueryScaling(
            floor=fields.size("floor_scale", 8192), beta=fields.number("attn_scale", 0.1), offset=1
        )


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    mixers = [grouped(layer) for layer in config.layers]
    experts = hf_config.experts_of(config)
    rotating = [mixer for mixer in mixers if mixer.rope is not None]
    scaling = next(
        (mixer.query_scaling for mixer in mixers if mixer.query_scaling is not None), None
    )
    dense_widths = [layer.mlp.width for layer in config.layers if isinstance(layer.mlp, GatedMLP)]
    chunks = [mixer.chunk for mixer in mixers if mixer.chunk is not None]
    sparse = [index for index, layer in enumerate(config.layers) if isinstance(layer.mlp, Experts)]

    attention = {
        "attention_bias": mixers[0].qkv_bias,
        "use_qk_norm": any(mixer.qk_l2_norm for mixer in rotating),
        "no_rope_layers": [int(mixer.rope is not None) for mixer in mixers],
        "layer_types": [_FULL if mixer.chunk is None else _CHUNKED for mixer in mixers],
        "attention_chunk_size": chunks[0] if chunks else config.max_positions,
        "attn_temperature_tuning": scaling is not None,
    }
    if scaling is not None:
        attention |= {"floor_scale": scaling.floor, "attn_scale": scaling.beta}

    mlps = {
        "intermediate_size": experts.width,
        "intermediate_size_mlp": dense_widths[0] if dense_widths else experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_layers": sparse,
        "interleave_moe_layer_step": sparse[0] + 1,
    }
    return hf_config.rope_fields(rotating[0].rope if rotating else None) | attention | mlps


def _dense_rules(config: GatedMLP, source: str, path: str) -> list[Rule]:
    return blocks.swiglu(config.width, f"{source}.feed_forward", f"{path}.mlp")


_expert_rules = functools.partial(
    blocks.experts,
    name="feed_forward",
    router="router",
    shared="shared_expert",
    kernels=functools.partial(blocks.stacked, transpose=False, in_halves=True),
)

FAMILY = Family(
    model_type="llama4_text",
    label="Llama 4",
    architecture="Llama4ForCausalLM",
    read_config=read_config,
    write_fields=write_fields,
    rules=functools.partial(blocks.decoder, parts={Experts: _expert_rules, GatedMLP: _dense_rules}),
)

# Published models also read images.
WRAPPER = Wrapper(
    model_type="llama4",
    label="Llama 4 with images",
    texts={"llama4_text": "llama4_text"},
    prefixes=(("language_model.", ""),),
    ignored=(r"vision_model\..*", r"multi_modal_projector\..*"),
)
