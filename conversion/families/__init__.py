"""The table of families of targets, and the reading of a configuration by it."""

from __future__ import annotations

from typing import Any, NamedTuple

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.families import (
    cohere,
    deepseek,
    gemma,
    glm4_moe,
    gpt_oss,
    granite,
    llama,
    llama4,
    mistral,
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
        *gemma.FAMILIES,
        olmo2.FAMILY,
        granite.FAMILY,
        phi3.FAMILY,
        *cohere.FAMILIES,
    )
}
# Models of more than text, with a language model of one of these families.
WRAPPERS: dict[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in (
        llama4.WRAPPER,
        *qwen3_next.WRAPPERS,
        mistral.WRAPPER,
        deepseek.WRAPPER,
        qwen.WRAPPER,
        gemma.WRAPPER,
    )
}


def family_of(model_type: Any, where: str, own: Family | None = None) -> Family:
    """The family of a ``model_type``; ``own``, a family of the caller, comes before those of the table."""
    known = FAMILIES if own is None else {**FAMILIES, own.model_type: own}
    if not isinstance(model_type, str) or model_type not in known:
        raise CheckpointError(
            f"{where}: model_type is {short(model_type)}; the families of targets are {', '.join(known)}, alone or "
            f"in {', '.join(WRAPPERS)} (docs/extending.md adds one)"
        )
    return known[model_type]


class Described(NamedTuple):
    """The language model that a ``config.json`` describes."""

    family: Family  #: Its family.
    fields: Fields  #: Its own fields.
    wrapper: Wrapper | None  #: The model that contains it; ``None`` where it is published alone.


def described(fields: Fields, own: Family | None = None) -> Described:
    """The language model that a ``config.json`` describes, alone or as a part; ``own`` as in :func:`family_of`."""
    model_type = fields.get("model_type")
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if wrapper is None or (own is not None and own.model_type == model_type):
        return Described(family_of(model_type, fields.where, own), fields, None)
    return Described(FAMILIES[wrapper.family(fields.values)], wrapper.fields(fields), wrapper)


def read_config(fields: Fields) -> DecoderConfig:
    """The description of the target in a ``config.json``, alone or as a part of a larger model."""
    family, own, _ = described(fields)
    return family.read_config(own)


__all__ = ["FAMILIES", "WRAPPERS", "Described", "Family", "Wrapper", "described", "family_of", "read_config"]
