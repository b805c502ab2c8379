"""Native checkpoints of version 0.1 (format 2): one flat description for all layers, and fused kernels side by side.

What is read here is what a later format says; nothing writes it any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.rules import Part, in_turns
from eagle3_jax.models.config import MOST_LAYERS, DecoderConfig, Eagle3Config, gated, grouped

FORMAT = 2
_LAYER = ("mlp_width", "num_layers", "num_heads", "num_kv_heads", "head_dim", "rope")
_FLAGS = ("attention_bias", "mlp_bias", "qk_norm")


def description(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The description as format 3 has it.

    Raises:
        CheckpointError: Fields are missing, or the number of layers is none.
    """
    config = _object(values.get("config"), f"{where}, config")
    if values.get("kind") == "target":
        return {**values, "family": "llama", "config": _layered(config, f"{where}, config")}
    stack = _layered(_object(config.get("layer"), f"{where}, config, layer"), f"{where}, config, layer")
    if stack.pop("tie_embeddings", False) is not False:
        raise CheckpointError(f"{where}: tie_embeddings is true for a head, which has no such projection")
    rest = {name: value for name, value in config.items() if name != "layer"}
    if rest.keys() & stack.keys():
        raise CheckpointError(
            f"{where}: the fields {sorted(rest.keys() & stack.keys())} are given twice; convert it again"
        )
    return {**values, "config": {**rest, **stack}}


def leaves(arrays: Mapping[str, np.ndarray], config: DecoderConfig | Eagle3Config) -> dict[str, np.ndarray]:
    """The arrays with the columns of fused kernels as they lie today."""
    layer = config.layers[0]
    mixer = grouped(layer)
    fused = {
        "qkv": dict(in_turns(mixer.num_kv_heads, mixer.head_dim, {"q": mixer.group, "k": 1, "v": 1})),
        "gate_up": dict(in_turns(gated(layer).width, 1, {"gate": 1, "up": 1})),
    }

    def now(path: str, leaf: np.ndarray) -> np.ndarray:
        parts = fused.get(path.split(".")[-2]) if "." in path else None
        return leaf if parts is None else _regrouped(leaf, list(parts.values()))

    return {path: now(path, leaf) for path, leaf in arrays.items()}


def _regrouped(side_by_side: np.ndarray, parts: list[Part]) -> np.ndarray:
    if side_by_side.ndim == 0 or side_by_side.shape[-1] != parts[0].outer * parts[0].slots * parts[0].inner:
        return side_by_side  # of a damaged checkpoint, whose shapes are checked where all others are
    whole, start = np.empty_like(side_by_side), 0
    for part in parts:
        stop = start + part.shape(side_by_side.shape)[-1]
        view = part.of(whole)
        view[...] = side_by_side[..., start:stop].reshape(view.shape)
        start = stop
    return whole


def _layered(flat: Mapping[str, Any], where: str) -> dict[str, Any]:
    wrong = sorted({*_LAYER, *_FLAGS} - flat.keys()) + sorted({"layers"} & flat.keys())
    if wrong:
        raise CheckpointError(f"{where}: the fields {wrong} are missing or unknown; convert it again")
    count = flat["num_layers"]
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_LAYERS:
        raise CheckpointError(
            f"{where}: num_layers is {short(count)}; expected a whole number from 1 to {MOST_LAYERS:,}"
        )
    mixer = {name: flat[name] for name in ("num_heads", "num_kv_heads", "head_dim", "rope", "qk_norm")}
    bias = {"qkv_bias": flat["attention_bias"], "o_bias": flat["attention_bias"]}
    layer = {
        "mixer": {"kind": "grouped-query", **mixer, **bias, "window": None, "query_scaling": None},
        "mlp": {"kind": "gated", "width": flat["mlp_width"], "bias": flat["mlp_bias"]},
    }
    rest = {name: value for name, value in flat.items() if name not in (*_LAYER, *_FLAGS)}
    return {**rest, "layers": [layer] * count}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"{where} is {short(value)}; expected an object")
    return value
