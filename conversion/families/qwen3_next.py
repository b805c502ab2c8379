"""Qwen3-Next and Qwen3.5: most layers are gated delta nets, every fourth is gated attention.

Qwen3-Next has experts and a shared expert. Qwen3.5, dense or with experts, is published with an
encoder of images.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

from eagle3_jax.conversion import blocks, hf_config
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.families.family import MTP, Family, Wrapper
from eagle3_jax.conversion.families.qwen import read_sparse_layers, sparse_fields
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.rules import COMPLETE, Rule, in_turns, linear, norm
from eagle3_jax.models.config import (
    MLP,
    DecoderConfig,
    Experts,
    GatedDelta,
    GroupedQuery,
    LayerConfig,
    Mixer,
)

_KINDS = _DELTA, _FULL = ("linear_attention", "full_attention")
_LINEAR = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}


def read_config(fields: Fields) -> DecoderConfig:
    """Reads Qwen3-Next: experts in the same layers as Qwen3-MoE."""
    fields.require("norm_topk_prob")
    experts = functools.partial(_read_experts, normalise=fields.flag("norm_topk_prob"))
    return _decoder(fields, hf_config.read_mlps(fields, read_sparse_layers(fields), experts))


def read_dense(fields: Fields) -> DecoderConfig:
    """Reads Qwen3.5: a dense MLP in every layer."""
    return _decoder(fields, itertools.repeat(hf_config.read_mlp(fields)))


def read_sparse(fields: Fields) -> DecoderConfig:
    """Reads Qwen3.5-MoE: experts in every layer, whose weights always sum to one."""
    return _decoder(fields, itertools.repeat(_read_experts(fields, normalise=True)))


def _decoder(fields: Fields, mlps: Iterable[MLP]) -> DecoderConfig:
    layers = [
        LayerConfig(mixer=mixer, mlp=mlp)
        for mixer, mlp in zip(read_mixers(fields), mlps, strict=False)
    ]
    return hf_config.decoder_of(fields, layers, norm_kind="zero-centred")


def read_mixers(fields: Fields) -> list[Mixer]:
    """Reads the mixers from ``layer_types``.

    Default: attention in every ``full_attention_interval``-th layer.
    """
    count = hf_config.read_num_layers(fields)
    types = hf_config.read_types(fields, _KINDS, count)
    if not types:
        interval = fields.size("full_attention_interval", 4)
        types = [_DELTA if (layer + 1) % interval else _FULL for layer in range(count)]
    read = {kind: (_delta if kind == _DELTA else _attention)(fields) for kind in set(types)}
    return [read[kind] for kind in types]


def _delta(fields: Fields) -> GatedDelta:
    with read_from(fields.where):
        return GatedDelta(**{name: fields.size(field) for name, field in _LINEAR.items()})


def _attention(fields: Fields) -> GroupedQuery:
    fields.require("num_key_value_heads", "head_dim")
    fields.only(attn_output_gate=True)
    bias = fields.flag("attention_bias")
    # The three sections of positions differ only for images.
    rope = hf_config.read_rope(fields, partial=0.25, known=("mrope_section", "mrope_interleaved"))
    mixer = hf_config.read_mixer(fields, qkv_bias=bias, o_bias=bias, qk_norm=True, rope=rope)
    return dataclasses.replace(mixer, output_gate=True)


def _read_experts(fields: Fields, *, normalise: bool) -> Experts:
    """Reads experts and a shared expert with a gate."""
    shared = fields.size("shared_expert_intermediate_size")
    return hf_config.read_experts(
        fields, "softmax", normalise=normalise, shared_width=shared, shared_gate=True
    )


def mixer_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of the mixers."""
    mixers = [layer.mixer for layer in config.layers]
    delta = next((mixer for mixer in mixers if isinstance(mixer, GatedDelta)), None)
    attention = next((mixer for mixer in mixers if isinstance(mixer, GroupedQuery)), None)
    if delta is None or attention is None:
        raise CheckpointError(
            "a target without recurrent layers, or without attention, is of another family"
        )

    linear_fields = {field: getattr(delta, name) for name, field in _LINEAR.items()}
    types = [_DELTA if isinstance(mixer, GatedDelta) else _FULL for mixer in mixers]
    return {
        **linear_fields,
        **hf_config.rope_fields(attention.rope, partial=True),
        "attention_bias": attention.qkv_bias,
        "layer_types": types,
    }


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    return {**_sparse_fields(config), **sparse_fields(config)}


def _sparse_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of a target with experts in every layer."""
    experts = hf_config.experts_of(config)
    shared = {"shared_expert_intermediate_size": experts.shared_width}
    return {**mixer_fields(config), **hf_config.size_fields(experts), **shared}


def _delta_rules(config: GatedDelta, source: str, path: str, *, grouped: bool) -> list[Rule]:
    """Returns the rules of a gated delta net.

    ``grouped`` projections are by key head, as in our parameters. Otherwise one projection has all
    queries, keys and values, and there are three others. The channels of the convolution are always
    all queries, keys and values.
    """
    source = f"{source}.linear_attn"
    path = f"{path}.attention"
    heads = config.num_key_heads
    group = config.group
    sizes = {"q": config.key_dim, "k": config.key_dim, "v": group * config.value_dim}
    cuts = dict(in_turns(1, 1, {name: heads * size for name, size in sizes.items()}))
    rules = [Rule(f"{source}.A_log", f"{path}.a_log"), Rule(f"{source}.dt_bias", f"{path}.dt_bias")]
    rules += [norm(f"{source}.norm", f"{path}.norm"), *linear(f"{source}.out_proj", f"{path}.o")]

    for name, part in in_turns(heads, 1, sizes):
        kernel = Rule(
            f"{source}.conv1d.weight",
            f"{path}.convolution",
            part=part,
            cut=cuts[name],
            reverse=True,
        )
        rules.append(kernel)

    if grouped:
        rules += linear(f"{source}.in_proj_qkvz", f"{path}.qkvz")
        return rules + linear(f"{source}.in_proj_ba", f"{path}.ba")

    for name, part in in_turns(heads, 1, {**sizes, "z": group * config.value_dim}):
        tensor = f"{source}.in_proj_{'z' if name == 'z' else 'qkv'}"
        rules += linear(tensor, f"{path}.qkvz", part=part, cut=cuts.get(name, COMPLETE))
    for name, part in in_turns(heads, 1, {"b": group, "a": group}):
        rules += linear(f"{source}.in_proj_{name}", f"{path}.ba", part=part)
    return rules


def _of_modules(fields: Fields, count: int) -> dict[str, Any]:
    """Every module has attention, and experts if layers of the target have them."""
    del fields
    return {"layer_types": [_FULL] * count, "mlp_only_layers": [], "decoder_sparse_step": 1}


_MODULES = MTP._replace(fields=_of_modules)


def _rules(*, grouped: bool = False, kernels: blocks.PartRules = blocks.separate) -> Any:
    delta = functools.partial(_delta_rules, grouped=grouped)
    experts = functools.partial(blocks.experts, shared="shared_expert", kernels=kernels)
    return functools.partial(blocks.decoder, parts={GatedDelta: delta, Experts: experts})


def _wrapper(model_type: str, label: str) -> Wrapper:
    return Wrapper(
        model_type=model_type,
        label=label,
        texts={f"{model_type}_text": f"{model_type}_text"},
        prefixes=(("model.language_model.", "model."),),
        ignored=(r"(model\.)?visual\..*",),
    )


# In files with the encoder of images the experts of a layer are stacked.
_STACKED = functools.partial(blocks.stacked, transpose=True, in_halves=True)
FAMILIES = (
    Family(
        "qwen3_next",
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        read_config,
        write_fields,
        rules=_rules(grouped=True),
        modules=_MODULES,
    ),
    Family(
        "qwen3_5_text",
        "Qwen3.5",
        "Qwen3_5ForCausalLM",
        read_dense,
        mixer_fields,
        rules=_rules(),
        modules=_MODULES,
    ),
    Family(
        "qwen3_5_moe_text",
        "Qwen3.5-MoE",
        "Qwen3_5MoeForCausalLM",
        read_sparse,
        _sparse_fields,
        rules=_rules(),
        alternatives=(_rules(kernels=_STACKED),),
        modules=_MODULES,
    ),
)
WRAPPERS = (
    _wrapper("qwen3_5", "Qwen3.5 with images"),
    _wrapper("qwen3_5_moe", "Qwen3.5-MoE with images"),
)
