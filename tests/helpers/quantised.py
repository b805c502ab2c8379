"""Quantised checkpoints, written by hand from a dense one, and the weights they represent."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
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
# Recipes whose values are of four bits, or FP8, and stay as they are in memory.
INT4 = ("int4", "int4 with zeros", "awq", "gptq", "gptq with zeros")
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


def integers(weights: np.ndarray, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns integers from 0 to 15 in groups of inputs, and the scale and zero of each group."""
    grouped = weights.reshape(len(weights), -1, GROUP)
    low = np.minimum(grouped.min(-1), -1e-3)
    scale = ((np.maximum(grouped.max(-1), 0) - low) / 15).astype(np.float16).astype(np.float32)
    zero = np.minimum(np.rint(-low / scale), 15)
    if symmetric:
        scale = (np.abs(grouped).max(-1) / 7.5).astype(np.float16).astype(np.float32)
        zero = np.full(scale.shape, 8.0)
    values = np.clip(np.rint(grouped / scale[..., None]) + zero[..., None], 0, 15)
    return values.reshape(weights.shape).astype(np.uint32), scale, zero.astype(np.uint32)


def dequantised(values: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    size = values.shape[1] // scale.shape[1]
    centred = values.astype(np.float32) - np.repeat(zero, size, 1).astype(np.float32)
    return centred * np.repeat(scale, size, 1)


def words(values: np.ndarray, places: Sequence[int] = range(8)) -> np.ndarray:
    """Packs eight integers of the last axis in a word; ``places`` has the number of each."""
    packed = np.zeros((*values.shape[:-1], values.shape[-1] // 8), np.uint32)
    for index, number in enumerate(places):
        packed |= values[..., number::8] << np.uint32(4 * index)
    return packed.view(np.int32)


def _awq(name: str, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values, scale, zero = integers(weights, symmetric=False)
    stem = name.removesuffix("weight")
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        f"{stem}qweight": words(values.T, order),
        f"{stem}qzeros": words(zero.T, order),
        f"{stem}scales": scale.T.astype(np.float16),
    }
    return stored, dequantised(values, scale, zero)


def _gptq(
    name: str, weights: np.ndarray, *, symmetric: bool = True, added: int = -1
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Stores zero points plus ``added``, and a bias of zeros as AutoGPTQ does."""
    values, scale, zero = integers(weights, symmetric)
    stem = name.removesuffix("weight")
    stored = {
        f"{stem}qweight": words(values).T,
        f"{stem}qzeros": words(np.maximum(zero, 1).T + np.uint32(added % 2**32)),
        f"{stem}scales": scale.T.astype(np.float16),
        f"{stem}g_idx": (np.arange(weights.shape[1]) // GROUP).astype(np.int32),
        f"{stem}bias": np.zeros(len(weights), np.float16),
    }
    return stored, dequantised(values, scale, np.maximum(zero, 1))


def _packed_with_zeros(name: str, weights: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    values, scale, zero = integers(weights, symmetric=False)
    stem = name.removesuffix(".weight")
    stored = {
        f"{stem}.weight_packed": words(values),
        f"{stem}.weight_scale": scale,
        f"{stem}.weight_zero_point": words(zero.T).T,
        f"{stem}.weight_shape": np.array(weights.shape, np.int64),
    }
    return stored, dequantised(values, scale, zero)


def _nvfp4(
    name: str, weights: np.ndarray, *, divides: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Stores pairs of FP4 in blocks of 8 or 16 inputs: the files' blocks are cut off at the end."""
    inputs = weights.shape[1]
    padded = np.pad(weights, ((0, 0), (0, -inputs % 16))).reshape(len(weights), -1, 16)
    factor = (np.abs(weights).max() / np.float32(6 * 448)).astype(np.float32)
    scale = to_e4m3(np.abs(padded).max(-1) / 6 / factor)
    if divides:
        factor = np.float32(1) / factor
        sizes = scale.astype(np.float32) / factor
    else:
        sizes = scale.astype(np.float32) * factor
    nearest = np.abs(np.abs(padded / sizes[..., None])[..., None] - FP4).argmin(-1)
    dense = np.sign(padded) * FP4[nearest] * sizes[..., None]
    codes = (nearest | ((padded < 0) << 3)).astype(np.uint8).reshape(len(weights), -1)[:, :inputs]
    pairs = codes[:, 0::2] | (codes[:, 1::2] << 4)
    stem = name.removesuffix(".weight")
    stored = (
        {f"{stem}.weight_packed": pairs, f"{stem}.weight_global_scale": factor.reshape(1)}
        if divides
        else {name: pairs, f"{stem}.weight_scale_2": np.array(factor)}
    )
    dense = dense.astype(np.float32).reshape(len(weights), -1)[:, :inputs]
    return {**stored, f"{stem}.weight_scale": scale}, dense


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
GPTQ_CONFIG: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "damp_percent": 0.01,
    "true_sequential": True, "static_groups": False, "model_file_base_name": "model",
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
    "int4 with zeros": Recipe(
        _packed_with_zeros,
        group(
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False,
             "actorder": "weight"},
            "pack-quantized",
        ),
    ),
    "awq": Recipe(
        _awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm",
               "modules_to_not_convert": ["lm_head"]},
    ),
    "gptq": Recipe(_gptq, GPTQ_CONFIG),
    "gptq with zeros": Recipe(
        functools.partial(_gptq, symmetric=False, added=0),
        {**GPTQ_CONFIG, "sym": False, "checkpoint_format": "gptq_v2", "desc_act": True},
    ),
    "nvfp4": Recipe(
        functools.partial(_nvfp4, divides=True),
        group(
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
             "scale_dtype": "torch.float8_e4m3fn"},
            "nvfp4-pack-quantized",
        ),
    ),
    "nvfp4 of modelopt": Recipe(
        functools.partial(_nvfp4, divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
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
