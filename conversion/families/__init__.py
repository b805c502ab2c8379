"""The families of targets: one file each, one line each in the table. Reading a configuration needs no JAX."""

from __future__ import annotations

from typing import Any, NamedTuple

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
WRAPPERS: dict[str, Wrapper] = {
    wrapper.model_type: wrapper
    for wrapper in (llama4.WRAPPER, *qwen3_5.WRAPPERS, mistral.WRAPPER, deepseek.WRAPPER, qwen3.WRAPPER)
}


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
    if not isinstance(model_type, str) or model_type not in known:
        raise CheckpointError(
            f"{where}: model_type is {short(model_type)}; the families of targets are {', '.join(known)}, alone or "
            f"in {', '.join(WRAPPERS)} (docs/extending.md adds one)"
        )
    return known[model_type]


class Described(NamedTuple):
    """The language model that a ``config.json`` describes.

    Attributes:
        family: Its family.
        fields: Its own fields.
        wrapper: What it is part of; ``None`` where it is published alone.
    """

    family: Family
    fields: Fields
    wrapper: Wrapper | None


def described(fields: Fields, own: Family | None = None) -> Described:
    """The language model that a ``config.json`` describes, alone or as a part.

    Args:
        fields: Of the file.
        own: A family that the caller brings, before those of the table.

    Raises:
        CheckpointError: It is of no family.
    """
    model_type = fields.get("model_type")
    wrapper = WRAPPERS.get(model_type) if isinstance(model_type, str) else None
    if wrapper is None or (own is not None and own.model_type == model_type):
        return Described(family_of(model_type, fields.where, own), fields, None)
    return Described(FAMILIES[wrapper.family(fields.values)], wrapper.fields(fields), wrapper)


def read_config(fields: Fields) -> DecoderConfig:
    """The description of the target that a ``config.json`` is of, or holds beside others.

    Raises:
        CheckpointError: It is of no family, or cannot be computed.
    """
    family, own, _ = described(fields)
    return family.read_config(own)


__all__ = ["FAMILIES", "WRAPPERS", "Described", "Family", "Wrapper", "described", "family_of", "read_config"]
