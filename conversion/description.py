"""Configurations as JSON objects and back, strictly: every field is named, and no default stands in for one.

Where a field may hold one of several classes, the object says which (``kind``).
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.models.config import (
    DecoderConfig,
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
    QueryScaling,
    RopeConfig,
)

# What stands in `kind`; never renamed, because files say it.
_KINDS = {
    GroupedQuery: "grouped-query",
    Latent: "latent",
    GatedDelta: "gated-delta",
    GatedMLP: "gated",
    Experts: "experts",
}

# Fields that came after files of the present format had been written. In those they have their defaults.
_LATER: dict[type, frozenset[str]] = {
    DecoderConfig: frozenset({"norm_kind"}),
    GroupedQuery: frozenset({"chunk", "qk_l2_norm", "sinks", "output_gate", "softcap", "scale"}),
    QueryScaling: frozenset({"offset"}),
    RopeConfig: frozenset({"partial", "interleaved"}),
}


def to_json(config: Any) -> Any:
    """A configuration as JSON values."""
    if isinstance(config, tuple):
        return [to_json(entry) for entry in config]
    if not dataclasses.is_dataclass(config):
        return config
    kind = {"kind": _KINDS[type(config)]} if type(config) in _KINDS else {}  # type: ignore[index]
    return kind | {field.name: to_json(getattr(config, field.name)) for field in dataclasses.fields(config)}


def from_json(config: type, value: Any, where: str) -> Any:
    """A configuration from exactly its fields.

    Raises:
        CheckpointError: A field is missing, unknown or of another type, or the values do not go together.
    """
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is {short(value)}; expected an object")
    values = {name: entry for name, entry in value.items() if not (name == "kind" and config in _KINDS)}
    hints = typing.get_type_hints(config)
    wrong = sorted((values.keys() ^ hints.keys()) - (_LATER.get(config, frozenset()) - values.keys()))
    if wrong:
        raise CheckpointError(f"{where}: the fields {wrong} are missing or unknown; convert it again")
    typed = {name: _typed(hint, values[name], name, where) for name, hint in hints.items() if name in values}
    try:
        return config(**typed)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from None


def _typed(hint: Any, value: Any, name: str, where: str) -> Any:
    """A value of a JSON file as the type of a field."""
    options = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    configs = [option for option in options if dataclasses.is_dataclass(option)]
    if configs:
        if configs[0] in _KINDS:
            kind = value.get("kind") if isinstance(value, dict) else None
            configs = [option for option in configs if _KINDS[option] == kind]  # type: ignore[index]
            if not configs:
                raise CheckpointError(f"{where}: {name} is of kind {short(kind)}, which this version does not know")
        return from_json(configs[0], value, f"{where}, {name}")  # type: ignore[arg-type]
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        of = typing.get_args(hint)[0]
        return tuple(_typed(of, entry, f"{name}[{index}]", where) for index, entry in enumerate(value))
    if float in options and type(value) is int and abs(value) < 1e300:
        return float(value)
    if not any(_is_a(value, option) for option in options):
        raise CheckpointError(f"{where}: {name} is {short(value)}; expected {_words(hint)}")
    return value


def _is_a(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Literal:
        return value in typing.get_args(hint)
    if isinstance(value, bool):
        return hint is bool
    return typing.get_origin(hint) is None and isinstance(value, hint)


def _words(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint).replace("typing.", ""))
