"""Muse Glimmer's language model: norms without weights, gates, layers that do not rotate."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from eagle3_jax.conversion import blocks, hf_config
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.families.family import Family, Wrapper
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.models.config import DecoderConfig, GroupedQuery, LayerConfig, RopeConfig, grouped
from eagle3_jax.models.rope import inverse_frequencies

# Without lists every fourth layer, counted from the last, attends to everything and rotates
# nothing.
_PERIOD = 4
# The tokens that stand for media, with transformers' defaults.
_MEDIA = {"image_token_id": 200_092, "video_token_id": 200_091}


def read_config(fields: Fields) -> DecoderConfig:
    """Reads a Muse Glimmer: windows in some layers, rotation in some, an output gate in all."""
    fields.require("num_key_value_heads", "head_dim", "qk_scale_factor", "output_multiplier")
    fields.require("post_norm_eps", "final_logit_softcapping")
    fields.only(hidden_activation="silu", attention_bias=False)
    # vLLM reads switches that transformers does not have.
    fields.only(use_qk_norm=True, use_attn_output_gate=True, normalize_tok_embeddings=True)

    count = hf_config.read_num_layers(fields)
    by_number = [(count - 1 - layer) % _PERIOD > 0 for layer in range(count)]
    windows = hf_config.read_windows(fields, hf_config.read_window(fields), by_number.__getitem__)
    usual = hf_config.read_mixer(fields, qk_l2_norm=True, output_gate=True)
    if usual.rope is not None and inverse_frequencies(usual.rope, usual.head_dim)[1] != 1:
        # Upstream normalises queries and keys before it rotates them. Here the norm comes after,
        # and would remove the scale.
        name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
        raise fields.wrong(name, "a rotation that scales attention is not supported")
    mlp = hf_config.read_mlp(fields)
    layers = []
    with read_from(fields.where):
        scale = fields.number("qk_scale_factor") * usual.head_dim**-0.5
        post_norm_eps = fields.number("post_norm_eps")
        for window, rotates in zip(windows, _rotating(fields, by_number), strict=True):
            rope = usual.rope if rotates else None
            mixer = dataclasses.replace(usual, window=window, rope=rope, scale=scale)
            layers.append(
                LayerConfig(mixer=mixer, mlp=mlp, norms="around", post_norm_eps=post_norm_eps)
            )
    return hf_config.decoder_of(
        fields,
        layers,
        norm_kind="zero-centred",
        final_norm_kind="float32",
        embedding_norm=True,
        logit_scale=fields.number("output_multiplier"),
        logit_softcap=fields.number("final_logit_softcapping"),
        media_tokens=_media_tokens(fields),
    )


def _media_tokens(fields: Fields) -> tuple[int, ...]:
    """Returns the tokens of media; a text cannot have one outside of the vocabulary."""
    ids = {fields.integer(name) for name in _MEDIA if fields.get(name) is not None}
    return tuple(sorted(token for token in ids if 0 <= token < fields.size("vocab_size")))


def _rotating(fields: Fields, by_number: list[bool]) -> list[bool]:
    """Tells for every layer whether it rotates; a base of 0 in ``layer_rope_theta`` means no."""
    if fields.get("layer_rope_theta") is None:
        return by_number
    bases = fields.numbers("layer_rope_theta")
    if len(bases) != len(by_number):
        raise CheckpointError(
            f"{fields.where}: layer_rope_theta names {len(bases)} layers but num_hidden_layers is"
            f" {len(by_number)}; they must agree"
        )
    theta = hf_config.read_rope(fields).theta
    if set(bases) - {0.0, theta}:
        # transformers rotates by rope_theta in every layer whose base is not 0.
        raise fields.wrong(
            "layer_rope_theta", f"expected 0 or the rope_theta {theta:g} for every layer"
        )
    return [base != 0 for base in bases]


def write_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields for :class:`Family`."""
    mixers = [grouped(layer) for layer in config.layers]
    mixer = mixers[0]
    rope = next((mixer.rope for mixer in mixers if mixer.rope is not None), RopeConfig())
    return {
        "hidden_activation": "silu",
        "attention_bias": mixer.qkv_bias,
        "qk_scale_factor": _scale_factor(mixer),
        "post_norm_eps": config.layers[0].post_norm_eps,
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.logit_softcap,
        "layer_rope_theta": [rope.theta if mixer.rope is not None else 0 for mixer in mixers],
        **dict(zip(_MEDIA, config.media_tokens, strict=False)),
        **hf_config.rope_fields(rope),
        **hf_config.window_fields(config),
    }


def _scale_factor(mixer: GroupedQuery) -> float:
    """Returns the factor that gives the scale of the scores, bit for bit."""
    usual = mixer.head_dim**-0.5
    scale = mixer.scale or usual
    factor = scale / usual
    near = (round(factor, 12), factor, math.nextafter(factor, 0), math.nextafter(factor, math.inf))
    return next((value for value in near if value * usual == scale), factor)


def _rules(config: DecoderConfig, prefix: str = "model.") -> list[Rule]:
    table = blocks.decoder(config, parts={GroupedQuery: blocks.gated_attention})
    return [
        rule._replace(source=prefix + rule.source.removeprefix("model."))
        if rule.source.startswith("model.")
        else rule
        for rule in table
    ]


FAMILY = Family(
    model_type="muse_glimmer_text",
    label="Muse Glimmer",
    architecture="MuseGlimmerForCausalLM",
    read_config=read_config,
    write_fields=write_fields,
    # vLLM takes layers under model. for those of an older layout, with other norms.
    rules=functools.partial(_rules, prefix="model.language_model."),
    alternatives=(_rules,),
)
WRAPPER = Wrapper(
    model_type="muse_glimmer",
    label="Muse Glimmer with images",
    texts={"muse_glimmer_text": "muse_glimmer_text"},
    prefixes=(("model.language_model.", "model."), ("language_model.", "model.")),
    ignored=(r"(model\.)?vision_(tower|adapter|projection)\..*",),
    outer=_MEDIA,
)
