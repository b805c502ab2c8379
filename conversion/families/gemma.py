"""Gemma 2 and 3: norms around mixer and MLP, a scaled embedding, windows, capped scores."""

from __future__ import annotations

from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import Family, Wrapper
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig, GroupedQuery, LayerConfig, RopeConfig, grouped

_GELU = "gelu_pytorch_tanh"
_LOCAL = "sliding_attention"
_GLOBAL = "full_attention"
# Published files of Gemma 3 with images name only the sizes that differ from these, the defaults of
# transformers.
_GEMMA3 = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
}


def read_gemma2(fields: Fields) -> DecoderConfig:
    """Reads Gemma 2: layers 0, 2, 4 and so on have a window; scores and logits have caps."""
    fields.require(
        "num_key_value_heads", "head_dim", "attn_logit_softcapping", "final_logit_softcapping"
    )
    windows = hf_config.read_windows(
        fields, hf_config.read_window(fields), lambda layer: layer % 2 == 0
    )
    rope = hf_config.read_rope(fields)
    softcap = fields.optional_number("attn_logit_softcapping")
    return _decoder(
        fields, [_mixer(fields, rope, window=window, softcap=softcap) for window in windows]
    )


def read_gemma3(fields: Fields) -> DecoderConfig:
    """Reads Gemma 3, whose layers with a window rotate by another base, without an extension."""
    fields = Fields({**_GEMMA3, **fields.values}, fields.where)
    # transformers reads the field and does not apply it.
    fields.only(attn_logit_softcapping=None)
    period = fields.size("sliding_window_pattern", 6)
    windows = hf_config.read_windows(
        fields, hf_config.read_window(fields), lambda layer: (layer + 1) % period > 0
    )

    # transformers 5 has the two rotary embeddings by kind of layer, transformers 4 in two fields.
    parameters = fields.section("rope_parameters").values
    if parameters.keys() - {_LOCAL, _GLOBAL}:
        raise fields.wrong(
            "rope_parameters", f"expected an object for {_LOCAL!r} and one for {_GLOBAL!r}"
        )
    local = {
        "rope_theta": fields.get("rope_local_base_freq"),
        "rope_parameters": parameters.get(_LOCAL),
    }
    full = {name: fields.get(name) for name in ("rope_theta", "rope_scaling")}
    full["rope_parameters"] = parameters.get(_GLOBAL)
    local_rope = hf_config.read_rope(Fields(local, fields.where))
    full_rope = hf_config.read_rope(Fields(full, fields.where), theta=1e6)

    mixers = []
    for window in windows:
        rope = full_rope if window is None else local_rope
        mixers.append(_mixer(fields, rope, window=window, qk_norm=True))
    return _decoder(fields, mixers)


def _check_text(text: Fields) -> None:
    """Refuses a cap of the logits, which transformers ignores in the model with images."""
    text.only(final_logit_softcapping=None)


def _mixer(fields: Fields, rope: RopeConfig, **features: Any) -> GroupedQuery:
    scale = fields.size("query_pre_attn_scalar") ** -0.5
    return hf_config.read_biased_mixer(fields, rope=rope, scale=scale, **features)


def _decoder(fields: Fields, mixers: list[GroupedQuery]) -> DecoderConfig:
    fields.only(hidden_activation=_GELU, use_bidirectional_attention=False)
    mlp = hf_config.read_mlp(fields, activation="gelu-tanh")
    layers = [LayerConfig(mixer=mixer, mlp=mlp, norms="around") for mixer in mixers]
    return hf_config.decoder_of(
        fields,
        layers,
        norm_kind="zero-centred",
        hidden_act=_GELU,
        tied=True,
        embedding_scale=fields.size("hidden_size") ** 0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    mixer = grouped(config.layers[0])
    scale = mixer.scale or mixer.head_dim**-0.5
    return {
        "hidden_act": _GELU,
        "hidden_activation": _GELU,
        "attention_bias": mixer.qkv_bias,
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": mixer.softcap,
        "final_logit_softcapping": config.logit_softcap,
        **hf_config.window_fields(config),
    }


def write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`, with the rotary embeddings in both notations."""
    mixers = [grouped(layer) for layer in config.layers]
    sliding = next((mixer for mixer in mixers if mixer.window is not None), mixers[0])
    unlimited = next((mixer for mixer in mixers if mixer.window is None), mixers[0])

    local = hf_config.rope_fields(sliding.rope)
    full = hf_config.rope_fields(unlimited.rope)
    parameters = {_LOCAL: local["rope_parameters"], _GLOBAL: full["rope_parameters"]}
    return {
        **write_gemma2(config),
        **full,
        "rope_local_base_freq": local["rope_theta"],
        "rope_parameters": parameters,
    }


FAMILIES = (
    Family("gemma2", "Gemma 2", "Gemma2ForCausalLM", read_gemma2, write_gemma2),
    Family("gemma3_text", "Gemma 3", "Gemma3ForCausalLM", read_gemma3, write_gemma3),
)
# Gemma 3 from 4B on is published with an encoder of images.
WRAPPER = Wrapper(
    model_type="gemma3",
    label="Gemma 3 with images",
    texts={"gemma3_text": "gemma3_text"},
    prefixes=(("model.language_model.", "model."), ("language_model.", "")),
    ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    check=_check_text,
)
