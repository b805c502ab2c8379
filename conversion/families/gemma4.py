"""Gemma 4: two kinds of layers with other head sizes, shared keys, and vectors for each layer.

* Layers with a window (``sliding_attention``) have ``head_dim``, the others ``global_head_dim``;
  transformers 5.24 writes the latter as ``per_layer_config``.
* In the last ``num_kv_shared_layers`` layers attention reads the keys of an earlier layer. Their
  projections, which published files still hold, are not used.
* With ``attention_k_eq_v`` the layers without a window have no projection of values.
* The E models have a vector of each token for every layer (``hidden_size_per_layer_input``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.families.family import Family, Wrapper
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.models.config import (
    DecoderConfig,
    GroupedQuery,
    LayerConfig,
    RopeConfig,
    gated,
    grouped,
)

GELU = "gelu_pytorch_tanh"
LOCAL = "sliding_attention"
GLOBAL = "full_attention"
_PERIOD = 6
# Defaults of transformers for fields that published files may leave out.
_DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "global_head_dim": 512,
}
_ROPES = {
    LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
    GLOBAL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def with_defaults(fields: Fields) -> Fields:
    """Returns the fields with those that a file may leave out."""
    return Fields({**_DEFAULTS, **fields.values}, fields.where)


def read_kinds(fields: Fields) -> list[str]:
    """Reads the kind of every layer. By default each sixth has no window, and the last."""
    count = hf_config.read_num_layers(fields)
    kinds = hf_config.read_types(fields, (LOCAL, GLOBAL), count)
    if not kinds:
        kinds = [GLOBAL if (layer + 1) % _PERIOD == 0 else LOCAL for layer in range(count)]
        kinds[-1] = GLOBAL
    if kinds[-1] != GLOBAL:
        raise CheckpointError(
            f"{fields.where}: layer_types ends with {kinds[-1]!r}; expected {GLOBAL!r}, which"
            " transformers computes there in any case"
        )
    return kinds


def read_mixers(fields: Fields, kinds: list[str]) -> list[GroupedQuery]:
    """Reads the attention of every layer, before layers share keys."""
    if fields.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise fields.wrong("use_bidirectional_attention", "only causal attention is supported")
    window = hf_config.read_window(fields)
    if window is None:
        raise fields.wrong("sliding_window", "expected a number of tokens")

    ropes = {kind: _read_rope(fields, kind) for kind in set(kinds)}
    same_values = fields.flag("attention_k_eq_v")
    mixers = []
    for layer, kind in enumerate(kinds):
        is_local = kind == LOCAL
        mixer = hf_config.read_biased_mixer(
            _of_layer(fields, layer, kind),
            rope=ropes[kind],
            window=window if is_local else None,
            scale=1.0,
            qk_norm=True,
            value_norm=True,
            keys_as_values=same_values and not is_local,
        )
        mixers.append(mixer)
    return mixers


def _of_layer(fields: Fields, layer: int, kind: str) -> Fields:
    """Returns the fields of a layer, in either notation of what differs between layers."""
    values = dict(fields.values)
    notation = values.pop("per_layer_config", None)
    if notation is None:
        more = {}
        if kind == GLOBAL:
            more["head_dim"] = fields.size("global_head_dim")
            count = fields.get("num_global_key_value_heads")
            if count is not None and fields.flag("attention_k_eq_v"):
                more["num_key_value_heads"] = count
        return Fields(values | more, fields.where)

    sizes = fields.section("per_layer_config").section(str(layer))
    unknown = sorted(sizes.values.keys() - {"head_dim", "num_key_value_heads"})
    if unknown:
        raise sizes.wrong(unknown[0], "expected head_dim or num_key_value_heads alone")
    return Fields(values | dict(sizes.values), fields.where)


def _read_rope(fields: Fields, kind: str) -> RopeConfig:
    """Reads the rotary embedding of the layers of a kind."""
    parameters = fields.section("rope_parameters").values or _ROPES
    if not parameters.keys() <= {LOCAL, GLOBAL} or not isinstance(parameters.get(kind), dict):
        raise fields.wrong(
            "rope_parameters", f"expected an object for {LOCAL!r} and one for {GLOBAL!r}"
        )
    is_proportional = parameters[kind].get("rope_type") == "proportional"
    return hf_config.read_rope(
        Fields({"rope_parameters": parameters[kind]}, fields.where),
        partial=1.0 if is_proportional else None,
        types=("default", "linear", "proportional"),
    )


def read(fields: Fields) -> DecoderConfig:
    """Reads a target."""
    fields = with_defaults(fields)
    if fields.flag("enable_moe_block"):
        raise fields.wrong(
            "enable_moe_block",
            "a mixture of experts next to a dense MLP, as in 26B-A4B, is not computed here; give a"
            " dense or an E model",
        )
    fields.only(hidden_activation=GELU)
    kinds = read_kinds(fields)
    first_shared = len(kinds) - fields.integer("num_kv_shared_layers", 0)
    if not 1 <= first_shared <= len(kinds):
        raise fields.wrong(
            "num_kv_shared_layers", f"expected 0 to {len(kinds) - 1}, fewer than the layers"
        )

    mlp = hf_config.read_mlp(fields, activation="gelu-tanh")
    shared_width = mlp.width * (2 if fields.flag("use_double_wide_mlp") else 1)
    input_width = fields.integer("hidden_size_per_layer_input")
    if input_width and fields.size("vocab_size_per_layer_input") != fields.size("vocab_size"):
        raise fields.wrong(
            "vocab_size_per_layer_input", f"expected vocab_size, {fields.size('vocab_size')}"
        )

    layers = []
    with read_from(fields.where):
        for layer, mixer in enumerate(read_mixers(fields, kinds)):
            shares = layer >= first_shared
            layers.append(
                LayerConfig(
                    # Which projection would give the values does not matter without any.
                    mixer=dataclasses.replace(
                        mixer,
                        shares_keys=shares,
                        keys_as_values=mixer.keys_as_values and not shares,
                    ),
                    mlp=dataclasses.replace(mlp, width=shared_width if shares else mlp.width),
                    norms="around",
                    input_width=input_width,
                    output_scale=True,
                )
            )

    values = {name: value for name, value in fields.values.items() if name != "per_layer_config"}
    return hf_config.decoder_of(
        Fields(values, fields.where),
        layers,
        norm_kind="float32",
        hidden_act=GELU,
        tied=True,
        embedding_scale=fields.size("hidden_size") ** 0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def mixer_fields(layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    """Returns the fields of layers of both kinds; with one kind, the other has the same sizes."""
    mixers = [grouped(layer) for layer in layers]
    full = next((mixer for mixer in mixers if mixer.window is None), mixers[0])
    local = next((mixer for mixer in mixers if mixer.window is not None), full)
    ropes = {LOCAL: local.rope, GLOBAL: full.rope}
    parameters = {}
    for kind, rope in ropes.items():
        is_proportional = rope is not None and rope.type == "proportional"
        fields = hf_config.rope_fields(rope, partial=is_proportional)
        parameters[kind] = fields["rope_parameters"]

    return {
        "hidden_activation": GELU,
        "attention_bias": local.qkv_bias,
        "num_attention_heads": local.num_heads,
        "num_key_value_heads": local.num_kv_heads,
        "head_dim": local.head_dim,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "attention_k_eq_v": any(mixer.keys_as_values for mixer in mixers),
        "sliding_window": local.window or 1,
        "layer_types": [GLOBAL if mixer.window is None else LOCAL for mixer in mixers],
        "rope_parameters": parameters,
    }


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    shared = [layer for layer in config.layers if grouped(layer).shares_keys]
    keyed = [layer for layer in config.layers if not grouped(layer).shares_keys]
    width = gated(keyed[0]).width
    return {
        **mixer_fields(tuple(keyed)),
        "layer_types": mixer_fields(config.layers)["layer_types"],
        "hidden_act": GELU,
        "num_kv_shared_layers": len(shared),
        "use_double_wide_mlp": bool(shared) and gated(shared[0]).width != width,
        "intermediate_size": width,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": config.input_width,
        "vocab_size_per_layer_input": config.vocab_size if config.input_width else 0,
        "final_logit_softcapping": config.logit_softcap,
    }


def unused(config: DecoderConfig) -> tuple[str, ...]:
    """Returns patterns of the projections of layers that read the keys of others."""
    layers = [index for index, layer in enumerate(config.layers) if grouped(layer).shares_keys]
    parts = r"(k_proj|v_proj|k_norm)\.(weight|bias)"
    return tuple(rf"model\.layers\.{index}\.self_attn\.{parts}" for index in layers)


FAMILY = Family(
    "gemma4_text",
    "Gemma 4",
    "Gemma4ForCausalLM",
    read,
    write_fields,
    absent=("rope_theta", "rope_scaling"),
    unused=unused,
)
WRAPPER = Wrapper(
    model_type="gemma4",
    label="Gemma 4 with images and audio",
    texts={"gemma4_text": "gemma4_text"},
    prefixes=(("model.language_model.", "model."),),
    ignored=(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..*",),
)
