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
            f"{where}: model_type is {short(model_type)}; the families of targets are {', '.join(known)} "
            "(docs/extending.md adds one)"
        )
    return known[model_type]


__all__ = ["FAMILIES", "Family", "family_of"]
