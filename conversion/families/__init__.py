"""The families of targets: one file each, one line each in the table. Reading a configuration needs no JAX."""

from __future__ import annotations

from typing import Any

from conversion.errors import CheckpointError, short
from conversion.families import llama, mistral, qwen2, qwen3
from conversion.families.family import Family

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        llama.FAMILY,
        *mistral.FAMILIES,
        qwen2.FAMILY,
        qwen3.FAMILY,
    )
}


def family_of(model_type: Any, where: str) -> Family:
    """The family of a ``model_type``.

    Raises:
        CheckpointError: There is none; the message names those that there are.
    """
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type is {short(model_type)}; the families of targets are {', '.join(FAMILIES)}"
        )
    return FAMILIES[model_type]


__all__ = ["FAMILIES", "Family", "family_of"]
