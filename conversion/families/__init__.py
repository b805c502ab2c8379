"""The table of families of targets, and functions that read a configuration with it."""

from __future__ import annotations

from typing import Any, NamedTuple

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.families import (
    cohere,
    deepseek,
    gemma,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    llama4,
    mellum,
    mimo,
    mistral,
    muse_glimmer,
    olmo2,
    phi3,
    qwen,
    qwen3_next,
)
from eagle3_jax.conversion.families.family import Family, Wrapper
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        *mistral.FAMILIES,
        *qwen.FAMILIES,
        gpt_oss.FAMILY,
        glm4_moe.FAMILY,
        llama4.FAMILY,
        *deepseek.FAMILIES,
        *qwen3_next.FAMILIES,
        mellum.FAMILY,
        mimo.FAMILY,
        *gemma.FAMILIES,
        gemma4.FAMILY,
        olmo2.FAMILY,
        granite.FAMILY,
        phi3.FAMILY,
        *cohere.FAMILIES,
        muse_glimmer.FAMILY,
    )
}
# Models of text and other media, with a language model of one of these families.
WRAPPERS: dict[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in (
        llama4.WRAPPER,
        *qwen3_next.WRAPPERS,
        mistral.WRAPPER,
        deepseek.WRAPPER,
        qwen.WRAPPER,
        gemma.WRAPPER,
        muse_glimmer.WRAPPER,
        gemma4.WRAPPER,
    )
}


def family_of(model_type: Any, where: str, extra_family: Family | None = None) -> Family:
    """Returns the family of a ``model_type``; ``extra_family`` has priority over the table's."""
    known = dict(FAMILIES)
    if extra_family is not None:
        known[extra_family.model_type] = extra_family
    if not isinstance(model_type, str) or model_type not in known:
        raise CheckpointError(
            f"{where}: model_type is {short(model_type)}; the families of targets are"
            f" {', '.join(known)}, alone or in {', '.join(WRAPPERS)} (docs/extending.md adds one)"
        )
    return known[model_type]


class Described(NamedTuple):
    """The language model that a ``config.json`` describes."""

    family: Family  #: Its family.
    fields: Fields  #: Its fields.
    #: The model that contains it; ``None`` if it is published without one.
    wrapper: Wrapper | None


def described(fields: Fields, extra_family: Family | None = None) -> Described:
    """Returns the language model in a ``config.json``, also as a part of a larger model.

    ``extra_family`` has priority over the families of the table.
    """
    model_type = fields.get("model_type")
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    is_extra = extra_family is not None and extra_family.model_type == model_type
    if not is_extra:
        deepseek.refuse_v4(fields)
    if wrapper is None or is_extra:
        return Described(family_of(model_type, fields.where, extra_family), fields, None)
    return Described(FAMILIES[wrapper.family(fields.values)], wrapper.fields(fields), wrapper)


def read_config(fields: Fields) -> DecoderConfig:
    """Reads the target in a ``config.json``, also as a part of a larger model."""
    family, language_fields, _ = described(fields)
    return family.read_config(language_fields)


__all__ = [
    "FAMILIES",
    "WRAPPERS",
    "Described",
    "Family",
    "Wrapper",
    "described",
    "family_of",
    "read_config",
]
