"""The families of targets: one file each, one line each in the table. Reading a configuration needs no JAX."""

from __future__ import annotations

from typing import Any

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.families import (
    deepseek,
    glm4_moe,
    gpt_oss,
    llama,
    llama4,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
)
from eagle3_jax.conversion.families.family import Family
from eagle3_jax.conversion.families.wrapper import Wrapper
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.models.config import DecoderConfig

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        *mistral.FAMILIES,
        qwen2.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
        gpt_oss.FAMILY,
        glm4_moe.FAMILY,
        llama4.FAMILY,
        *deepseek.FAMILIES,
        qwen3_next.FAMILY,
        *qwen3_5.FAMILIES,
    )
}
# Models of more than text whose language model is of one of these families.
WRAPPERS: dict[str, Wrapper] = {wrapper.model_type: wrapper for wrapper in (llama4.WRAPPER, *qwen3_5.WRAPPERS)}


def family_of(model_type: Any, where: str, own: Family | None = None) -> Family:
    """The family of a ``model_type``.

    Args:
        model_type: As a file has it.
        where: The file, for messages.
        own: A family that the caller brings, before those of the table.

    Raises:
        CheckpointError: There is none; the message names those that there are.
    """
    known = FAMILIES if own is None else {own.model_type: own, **FAMILIES}
    if isinstance(model_type, str) and model_type in WRAPPERS and model_type not in known:
        model_type = WRAPPERS[model_type].text
    if not isinstance(model_type, str) or model_type not in known:
        raise CheckpointError(
            f"{where}: model_type is {short(model_type)}; the families of targets are {', '.join(known)} "
            "(docs/extending.md adds one)"
        )
    return known[model_type]


def wrapper_of(fields: Fields) -> Wrapper | None:
    """What a language model is part of, where a ``config.json`` describes more than one; ``None`` elsewhere."""
    model_type = fields.get("model_type")
    return WRAPPERS.get(model_type) if isinstance(model_type, str) else None


def read_config(fields: Fields) -> DecoderConfig:
    """The description of the target that a ``config.json`` is of, or holds beside others.

    Raises:
        CheckpointError: It is of no family, or cannot be computed.
    """
    family, wrapper = family_of(fields.get("model_type"), fields.where), wrapper_of(fields)
    return family.read_config(fields if wrapper is None else wrapper.fields(fields))


__all__ = ["FAMILIES", "WRAPPERS", "Family", "Wrapper", "family_of", "read_config", "wrapper_of"]
