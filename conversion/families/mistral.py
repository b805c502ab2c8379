"""Mistral, Ministral and Ministral 3: windows, and queries that grow with their position."""

from __future__ import annotations

from typing import Any

from eagle3_jax.conversion import hf_config
from eagle3_jax.conversion.families.family import Family, Wrapper
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.models.config import DecoderConfig, QueryScaling, grouped

_BETA = "llama_4_scaling_beta"
_FLOOR = "original_max_position_embeddings"


def read_config(fields: Fields) -> DecoderConfig:
    """Reads a Mistral. Without ``layer_types``, all layers have the window, if there is one."""
    fields.require("num_key_value_heads")
    window = hf_config.read_window(fields)
    windows = hf_config.read_windows(fields, window, lambda _: True)
    return hf_config.read_decoder(
        fields, hf_config.read_mixer(fields), hf_config.read_mlp(fields), windows=windows
    )


def read_ministral3(fields: Fields) -> DecoderConfig:
    """Reads a Ministral 3, whose rotary parameters include the scaling of queries."""
    fields.require("num_key_value_heads", "head_dim")
    window = fields.optional_size("sliding_window")
    parameters = fields.section("rope_parameters")
    if not parameters.values:
        parameters = fields.section("rope_scaling")
    rope = hf_config.read_rope(fields, known=(_BETA, "max_position_embeddings"))
    with read_from(parameters.where):
        floor = rope.original_max_positions or parameters.size(_FLOOR)
        scaling = QueryScaling(floor=floor, beta=parameters.number(_BETA))

    mixer = hf_config.read_mixer(fields, rope=rope, query_scaling=scaling)
    windows = hf_config.read_window_of_all(fields, window)
    return hf_config.read_decoder(fields, mixer, hf_config.read_mlp(fields), windows=windows)


def _window_of_all(config: DecoderConfig) -> dict[str, Any]:
    return {"sliding_window": grouped(config.layers[0]).window}


def _scaled(config: DecoderConfig) -> dict[str, Any]:
    mixer = grouped(config.layers[0])
    fields = hf_config.rope_fields(mixer.rope)
    scaling = mixer.query_scaling
    if scaling is not None:
        scaling_fields = {_BETA: scaling.beta, _FLOOR: scaling.floor}
        for name, value in fields.items():
            if isinstance(value, dict):
                fields[name] = value | scaling_fields
    return {**fields, **_window_of_all(config)}


def _check_text(text: Fields) -> None:
    """Refuses contradicting ``layer_types``: transformers ignores them in a model with images."""
    hf_config.read_window_of_all(text, text.optional_size("sliding_window"))


FAMILIES = (
    Family("mistral", "Mistral", "MistralForCausalLM", read_config, _window_of_all),
    Family("ministral", "Ministral", "MinistralForCausalLM", read_config, hf_config.window_fields),
    Family("ministral3", "Ministral 3", "Ministral3ForCausalLM", read_ministral3, _scaled),
)
# Mistral Small 3.1 and later, Devstral Small 2 and Ministral 3 are published with an encoder of
# images.
WRAPPER = Wrapper(
    model_type="mistral3",
    label="Mistral Small 3.1, 3.2; Ministral 3",
    texts={"mistral": "mistral", "ministral3": "ministral3"},
    prefixes=(("model.language_model.", "model."), ("language_model.", "")),
    ignored=(r"(model\.)?(vision_tower|multi_modal_projector)\..*",),
    check=_check_text,
)
