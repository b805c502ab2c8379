"""Configurations of well-known targets, read from ``known_models.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from eagle3_jax.models.config import (
    DecoderConfig,
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
    LayerConfig,
    QueryScaling,
    RopeConfig,
    uniform,
)

_PARTS = {
    "attention": GroupedQuery,
    "local": GroupedQuery,
    "latent": Latent,
    "recurrence": GatedDelta,
    "mlp": GatedMLP,
    "experts": Experts,
}
_FIELDS_OF_PARTS = {"rope": RopeConfig, "query_scaling": QueryScaling}


def known_name(name: str, names: Iterable[str]) -> str | None:
    """Returns the usual spelling of a name in any case; ``None`` if it is not known."""
    return next((known for known in names if known.lower() == name.lower()), None)


def _read(table: dict[str, Any]) -> DecoderConfig:
    """Returns the configuration of a table of the file."""
    parts: dict[str, Any] = {}
    for name in _PARTS.keys() & table:
        fields = table.pop(name)
        for field in _FIELDS_OF_PARTS.keys() & fields:
            fields[field] = _FIELDS_OF_PARTS[field](**fields[field]) if fields[field] else None
        parts[name] = _PARTS[name](**fields)

    layers: list[LayerConfig] = []
    for number, mixer, mlp in table.pop("layers"):
        layers += uniform(number, parts[mixer], parts[mlp])
    return DecoderConfig(layers=tuple(layers * table.pop("repeats", 1)), **table)


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
#: Configurations by name. The counts that follow from these are checked against the published
#: checkpoints.
KNOWN_MODELS: dict[str, DecoderConfig] = {name: _read(table) for name, table in _TABLES.items()}

#: How the published checkpoints of some of them store their layers, by the keys of ``WEIGHT_BITS``;
#: the others are in bfloat16.
PUBLISHED_WEIGHTS = {"gpt-oss-20b": "mxfp4", "gpt-oss-120b": "mxfp4", "DeepSeek-V3": "fp8"}


def similar_targets(name: str) -> dict[str, str]:
    """Returns the known models for :func:`eagle3_jax.files.sources.locate`.

    Only ``eagle3 plan`` takes the name of a known model, so another command suggests its hub id.
    """
    known = known_name(name, KNOWN_MODELS)
    return {model: f"the hub id of {model}" if model == known else model for model in KNOWN_MODELS}
