"""Quantised checkpoints, written by hand from a dense one, and the weights they represent."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from checkpoints import TARGET, write_checkpoint, write_llama

from eagle3_jax.conversion.tensors import read_tensors
from eagle3_jax.models.config import GatedMLP, GroupedQuery, uniform

E4M3 = ml_dtypes.float8_e4m3fn
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
BLOCK = 16
GROUP = 8
LAYERS = 2
# Recipes whose values are FP8 and stay as they are in memory.
KEPT = ("fp8", "fp8 exponents", "fp8 tensor", "channel", "tensor", "fbgemm", "modelopt")

# From a name and weights: the tensors of the file by name, and the weights that they represent.
Quantise = Callable[[str, np.ndarray], tuple[dict[str, np.ndarray], np.ndarray]]


class Recipe(NamedTuple):
    """The storage of linear layers and its ``quantization_config``."""

    quantise: Quantise
    config: dict[str, Any]


def is_linear(name: str) -> bool:
    return name.endswith("proj.weight")


def is_expert(name: str) -> bool:
    return name.endswith(("experts.gate_up_proj", "experts.down_proj"))


def to_e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(E4M3)


def by_block(
    weights: np.ndarray, power_of_two: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns values, a scale for each block, and the weights that they represent."""
    rows, columns = (-(-size // BLOCK) for size in weights.shape)
    scale = np.empty((rows, columns), np.float32)
    values = np.empty(weights.shape, E4M3)
    dense = np.empty(weights.shape, np.float32)

    for row in range(rows):
        for column in range(columns):
            area = np.s_[row * BLOCK : (row + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
            size = np.abs(weights[area]).max() / np.float32(448)
            scale[row, column] = 2.0 ** np.ceil(np.log2(size)) if power_of_two else size
            values[area] = to_e4m3(weights[area] / scale[row, column])
            dense[area] = values[area].astype(np.float32) * scale[row, column]

    return values, scale, dense


def _fp8_block(name: str, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values, scale, dense = by_block(weights)
    return {name: values, f"{name}_scale_inv": scale}, dense


def _fp8_exponents(name: str, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values, scale, dense = by_block(weights, power_of_two=True)
    exponents = (np.log2(scale) + 127).astype(np.uint8)
    stored = exponents if "q_proj" in name else exponents.view(ml_dtypes.float8_e8m0fnu)
    return {name: values, f"{name}_scale_inv": stored}, dense


def _fp8_tensor(name: str, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Stores scales without axes, one for the weights and one for the activations."""
    scale = (np.abs(weights).max() / np.float32(448)).astype(ml_dtypes.bfloat16)
    values = to_e4m3(weights / np.float32(scale))
    stem = name.removesuffix(".weight")
    scales = {
        f"{name}_scale_inv": np.array(scale),
        f"{stem}.activation_scale": np.array(1, ml_dtypes.bfloat16),
    }
    return {name: values, **scales}, values.astype(np.float32) * np.float32(scale)


def _scaled(
    top: float,
    cast: Callable[[np.ndarray], np.ndarray],
    granularity: str,
    *,
    has_input_scale: bool = False,
) -> Quantise:
    """Returns the scheme ``W = q s`` of compressed-tensors.

    Args:
        top: Largest value of the stored type.
        cast: Rounds values to the stored type.
        granularity: A scale for each ``"output"``, one ``"tensor"`` of one element, or one
            ``"scalar"``.
        has_input_scale: Whether the file also holds a scale of the inputs.
    """

    def quantise(name: str, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        axes = 1 if granularity == "output" else None
        scale = (
            (np.abs(weights).max(axis=axes, keepdims=True) / top)
            .astype(ml_dtypes.bfloat16)
            .astype(np.float32)
        )

        values = cast(weights / scale)
        shape = {"scalar": (), "tensor": (1,), "output": scale.shape}[granularity]
        stored = scale.reshape(shape)

        stem = name.removesuffix(".weight")
        stored = stored if "q_proj" in name else stored.astype(ml_dtypes.bfloat16)
        extra = {f"{stem}.input_scale": np.ones(1, np.float32)} if has_input_scale else {}

        dense = values.astype(np.float32) * scale
        return {name: values, f"{stem}.weight_scale": stored, **extra}, dense

    return quantise


def _packed(name: str, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Packs signed four-bit values plus 8, eight in a word, the first in its lowest bits."""
    grouped = weights.reshape(len(weights), -1, GROUP)
    scale = (np.abs(grouped).max(-1) / 7.5).astype(np.float32)
    values = np.clip(np.round(grouped / scale[..., None]), -8, 7).astype(np.int8)
    fields = (values.reshape(len(weights), -1, 8).astype(np.int64) + 8).astype(np.uint32)
    words = (fields << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)

    stem = name.removesuffix(".weight")
    shape = np.array(weights.shape, np.int64)

    stored = {
        f"{stem}.weight_packed": words,
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_shape": shape,
    }
    return stored, (values * scale[..., None]).reshape(weights.shape).astype(np.float32)


def mxfp4(name: str, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Stores experts ``[E, in, out]`` in blocks of 32 inputs, two values in a byte.

    The first is in the low half.
    """
    groups = np.swapaxes(weights, 1, 2).reshape(weights.shape[0], weights.shape[2], -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scaled = groups / np.exp2(exponent)[..., None]
    nearest = np.abs(np.abs(scaled)[..., None] - FP4).argmin(-1)
    codes = nearest.astype(np.uint8) | ((scaled < 0).astype(np.uint8) << 3)
    blocks = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scales = (exponent + 127).astype(np.uint8)
    dense = np.where(scaled < 0, -FP4[nearest], FP4[nearest]) * np.exp2(exponent)[..., None]
    dense = np.swapaxes(dense.reshape(*groups.shape[:2], -1), 1, 2).astype(np.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, dense


def _fbgemm(name: str, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Stores a scale for every output of linear layers and of stacked experts ``[E, in, out]``."""
    if is_linear(name):
        return _scaled(448, to_e4m3, "output")(name, weights)
    scale = (np.abs(weights).max(1, keepdims=True) / np.float32(448)).astype(np.float32)
    values = to_e4m3(weights / scale)
    stored = np.swapaxes(scale, 1, 2) if "down" in name else scale
    return {name: values, f"{name}_scale": stored}, values.astype(np.float32) * scale


def int8(x: np.ndarray) -> np.ndarray:
    return np.clip(np.round(x), -128, 127).astype(np.int8)


def group(weights: dict[str, Any], form: str, **fields: Any) -> dict[str, Any]:
    """Returns the configuration that LLM Compressor writes."""
    weights = {"symmetric": True, "dynamic": False, **weights}
    modules = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": modules}, "kv_cache_scheme": None, **fields,
    }  # fmt: skip


FP8_CONFIG: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}  # fmt: skip
_FLOAT = {"num_bits": 8, "type": "float"}
_INT = {"num_bits": 8, "type": "int"}
RECIPES = {
    "fp8": Recipe(_fp8_block, FP8_CONFIG),
    "fp8 exponents": Recipe(_fp8_exponents, {**FP8_CONFIG, "scale_fmt": "ue8m0"}),
    "fp8 tensor": Recipe(
        _fp8_tensor, {**FP8_CONFIG, "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
    ),
    "channel": Recipe(
        _scaled(448, to_e4m3, "output"), group({**_FLOAT, "strategy": "channel"}, "float-quantized")
    ),
    "tensor": Recipe(
        _scaled(448, to_e4m3, "tensor", has_input_scale=True),
        group({**_FLOAT, "strategy": "tensor"}, "float-quantized"),
    ),
    "int8": Recipe(_scaled(127.5, int8, "output"), group({**_INT, "strategy": "channel"}, "int-quantized")),
    "int4": Recipe(
        _packed,
        group({"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}, "pack-quantized"),
    ),
    "fbgemm": Recipe(_fbgemm, {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}),
    "modelopt": Recipe(
        _scaled(448, to_e4m3, "scalar", has_input_scale=True),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]},
    ),
}  # fmt: skip


def quantise(source: Path, directory: Path, recipe: Recipe) -> dict[str, np.ndarray]:
    """Writes a checkpoint with quantised layers and experts; returns what it represents."""
    values = json.loads((source / "config.json").read_text())
    stored: dict[str, np.ndarray] = {}
    dense: dict[str, np.ndarray] = {}
    for name, value in read_tensors(source).items():
        if is_linear(name) or is_expert(name):
            new, dense[name] = recipe.quantise(name, np.asarray(value, np.float32))
            stored |= new
        else:
            stored[name] = dense[name] = value
    write_checkpoint(directory, {**values, "quantization_config": recipe.config}, stored)
    return dense


def layers(inner: int) -> Any:
    return uniform(
        LAYERS, GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=8), GatedMLP(width=inner)
    )


def plain(directory: Path, inner: int = 24) -> Path:
    """Writes a dense target, whose layers are not multiples of a block."""
    return write_llama(directory, dataclasses.replace(TARGET, layers=layers(inner)))


def written(directory: Path, name: str, inner: int = 24) -> tuple[Path, Path]:
    """Writes a quantised target, and a dense one with the weights that it represents."""
    source = plain(directory / "source", inner)
    dense = quantise(source, directory / "quantised", RECIPES[name])
    write_checkpoint(directory / "dense", json.loads((source / "config.json").read_text()), dense)
    return directory / "quantised", directory / "dense"
