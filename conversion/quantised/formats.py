"""Reads quantised checkpoints exactly, by the ``quantization_config`` of each.

* ``fp8``, as DeepSeek publishes: E4M3 in blocks of 128 by 128, with scales in float32 or exponents.
* ``fbgemm_fp8``, as Meta publishes: E4M3 with a scale for every output, stacked experts too.
* ``modelopt``, of NVIDIA's Model Optimizer: E4M3, one scale a tensor, described in ``config.json``
  or in its own file.
* ``mxfp4``, as gpt-oss is published: experts in four bits, with an exponent for 32 inputs.
* ``compressed-tensors``, as LLM Compressor writes: E4M3, eight bits, or four bits in words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import read_json
from eagle3_jax.conversion.quantised.arrays import E4M3, Dequantised
from eagle3_jax.conversion.quantised.decoding import (
    Scheme,
    Stored,
    fused_experts,
    mxfp4,
    packed,
    scaled,
)

_FILE = "hf_quant_config.json"  # of Model Optimizer, next to config.json


class Layout(NamedTuple):
    """The names of a quantised tensor and of its scales, and the function that decodes them."""

    scale: str  #: Ending of the name of the scales.
    values: str  #: Ending of the name of the values, instead of ``scale``.
    result: str  #: Ending of the name of the decoded weights, instead of ``scale``.
    #: Decodes the weights; raises ``CheckpointError`` if types or shapes contradict each other.
    decode: Callable[[Stored], Dequantised]


class Format(NamedTuple):
    """A quantisation as ``config.json`` describes it."""

    words: str  #: Its name for people.
    layouts: tuple[Layout, ...]  #: The layouts of its tensors.
    #: Patterns of the names of tensors that belong to quantised ones and are not needed for their
    #: weights.
    ignored: tuple[str, ...] = ()


class Quantisation(NamedTuple):
    """How the weights of a checkpoint were stored."""

    words: str  #: The format, for people.
    #: The kind of weights that keeps the stored values and scales, ``fp8`` or ``int8``; empty if
    #: there is none.
    kept_as: str
    num_tensors: int  #: How many tensors are quantised.


def read_quantised(
    tensors: Mapping[str, Any], fields: Fields, directory: Path
) -> tuple[dict[str, Any], Quantisation | None]:
    """Returns the tensors of a checkpoint without quantisation, and how they were stored.

    Args:
        tensors: The stored tensors by name.
        fields: The ``config.json`` of the checkpoint.
        directory: The directory of the checkpoint.
    """
    format = _format_of(fields, directory)
    if format is None:
        return dict(tensors), None

    results: dict[str, Any] = {}
    used: set[str] = set()
    for name, scale in tensors.items():
        layout = next((layout for layout in format.layouts if name.endswith(layout.scale)), None)
        if layout is None:
            continue

        stem = name.removesuffix(layout.scale)
        values = stem + layout.values
        result = stem + layout.result
        if values not in tensors:
            raise CheckpointError(
                f"{directory} holds {name} without {values}, which it scales; fetch the files again"
            )
        if result in results or (result != values and result in tensors):
            raise CheckpointError(f"{directory} gives {result} twice, the second time as {values}")

        try:
            results[result] = layout.decode(Stored(values, tensors[values], name, scale, tensors))
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error} ({format.words})") from None
        used |= {name, values}

    if not results:
        raise CheckpointError(
            f"{directory} says that its weights are quantised ({format.words}) and holds no scale;"
            " remove quantization_config"
        )
    dense = {
        name: value
        for name, value in tensors.items()
        if name not in used and not any(re.fullmatch(pattern, name) for pattern in format.ignored)
    }
    kinds = {value.kept_as for value in results.values()}
    kept_as = kinds.pop() if len(kinds) == 1 else ""
    # Messages list tensors in the order of the file.
    return dense | results, Quantisation(format.words, kept_as, len(results))


def _matrices(scheme: Scheme, dtype: Any = E4M3) -> Layout:
    """Returns the layout of linear layers whose scales are named ``weight_scale``."""
    return Layout(
        ".weight_scale", ".weight", ".weight", functools.partial(scaled, scheme=scheme, dtype=dtype)
    )


def _read_fp8(fields: Fields) -> Format:
    # Both names mean the same type; the checkpoints of DeepSeek have the short one.
    if fields.get("fmt") != "float8_e4m3fn":
        fields.only(fmt="e4m3")

    exponents = fields.one_of("scale_fmt", ("float", "ue8m0"), "float") == "ue8m0"
    if fields.get("weight_block_size") is None:
        words = "fp8, one scale a tensor"
        scheme = Scheme("tensor", exponents=exponents)
    else:
        size = _block_size(fields, "weight_block_size")
        words = f"fp8, a scale for {size[0]} by {size[1]} weights"
        scheme = Scheme("block", size, exponents=exponents)

    return Format(
        words=words,
        layouts=(
            Layout("_scale_inv", "", "", functools.partial(scaled, scheme=scheme, dtype=E4M3)),
        ),
        ignored=(r".*\.(input_scale|activation_scale)", r".*\.[kv]_scale"),
    )


def _read_fbgemm(fields: Fields) -> Format:
    return Format(
        words="fp8 of fbgemm, a scale for every output",
        layouts=(
            _matrices(Scheme("channel")),
            Layout("_proj_scale", "_proj", "_proj", fused_experts),
        ),
        ignored=(r".*\.(input_scale_ub|input_scale)",),
    )


def _read_modelopt(fields: Fields) -> Format:
    fields.only(quant_algo="FP8")
    return Format(
        words="fp8 of Model Optimizer, one scale a tensor",
        layouts=(_matrices(Scheme("tensor")),),
        ignored=(r".*\.(input_scale|output_scale)", r".*\.[qkv]_scale"),
    )


def _read_mxfp4(fields: Fields) -> Format:
    return Format(
        words="mxfp4, an exponent for 32 inputs of an output",
        layouts=(Layout("_scales", "_blocks", "", mxfp4),),
    )


# The names of the weights of compressed-tensors by format, type and number of bits.
_COMPRESSED = {
    ("float-quantized", "float", 8): "fp8",
    ("int-quantized", "int", 8): "int8",
    ("pack-quantized", "int", 4): "int4",
    ("pack-quantized", "int", 8): "int8",
    ("naive-quantized", "float", 8): "fp8",
    ("naive-quantized", "int", 8): "int8",
}
_FORMS = tuple(dict.fromkeys(form for form, _, _ in _COMPRESSED))


def _read_compressed_tensors(fields: Fields) -> Format:
    form = fields.one_of("format", _FORMS)
    fields.section("sparsity_config").only(format="dense")
    if fields.section("transform_config").get("config_groups"):
        raise CheckpointError(
            f"{fields.where}: transform_config rotates activations; that is not computed"
        )

    weights = _weights(fields)
    weights.only(symmetric=True)
    bits = weights.integer("num_bits")
    kind = weights.one_of("type", ("float", "int"))
    scheme, among = _scheme(weights, bits)
    words = _COMPRESSED.get((form, kind, bits))
    if words is None:
        raise CheckpointError(
            f"{weights.where}: num_bits {bits} of type {kind!r} is not read in the format {form!r}"
        )

    layout = _matrices(scheme, E4M3 if kind == "float" else np.int8)
    if form == "pack-quantized":
        layout = Layout(
            ".weight_scale", ".weight_packed", ".weight", functools.partial(packed, scheme=scheme)
        )

    return Format(
        words=f"{words} of compressed-tensors, {among}",
        layouts=(layout,),
        ignored=(r".*\.(input_scale|output_scale|weight_shape)", r".*\.[qkv]_scale"),
    )


def _weights(fields: Fields) -> Fields:
    """Returns the description of the weights, which must be the same for all groups of modules."""
    groups = fields.section("config_groups")
    descriptions = [groups.section(name).section("weights") for name in groups.values]
    if not descriptions or not all(weights.values for weights in descriptions):
        raise CheckpointError(
            f"{fields.where}: config_groups says nothing of weights; add their description"
        )

    compared = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
    first = descriptions[0]
    if any(weights.get(name) != first.get(name) for weights in descriptions for name in compared):
        raise CheckpointError(
            f"{fields.where}: the groups {', '.join(groups.values)} differ in their weights;"
            " expected one kind"
        )
    return first


def _scheme(weights: Fields, bits: int) -> tuple[Scheme, str]:
    strategy = weights.one_of("strategy", ("tensor", "channel", "group", "block"))
    if strategy == "group":
        size = weights.size("group_size")
        return Scheme("group", (1, size), bits), f"a scale for {size} inputs of an output"
    if strategy == "block":
        block = _block_size(weights, "block_structure")
        return Scheme("block", block, bits), f"a scale for {block[0]} by {block[1]} weights"
    return Scheme(strategy, bits=bits), (
        "one scale a tensor" if strategy == "tensor" else "a scale for every output"
    )


def _block_size(fields: Fields, name: str) -> tuple[int, int]:
    """Returns the number of outputs and of inputs of a block."""
    value = fields.get(name)
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(size) is int and 1 <= size <= 65536 for size in value):
        raise fields.wrong(name, "expected two sizes such as [128, 128]")
    return value[0], value[1]


FORMATS: dict[str, Callable[[Fields], Format]] = {
    "fp8": _read_fp8,
    "compressed-tensors": _read_compressed_tensors,
    "fbgemm_fp8": _read_fbgemm,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}


def _format_of(fields: Fields, directory: Path) -> Format | None:
    """Returns the format of a checkpoint; ``None`` if it is not quantised."""
    section = "quantization_config"
    owner = fields if fields.get(section) is not None else fields.section("text_config")
    # Model Optimizer may describe it in a file of its own.
    if owner.get(section) is None:
        path = directory / _FILE
        values = read_json(path) if path.is_file() else {}
        optimizer = Fields(values, str(path)).section("quantization")
        return None if optimizer.get("quant_algo") is None else _read_modelopt(optimizer)

    description = owner.section(section)
    method = description.get("quant_method")
    # Some files of Model Optimizer have no quant_method.
    if method is None and description.get("quant_algo") is not None:
        method = "modelopt"
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(
            f"{description.where}: quant_method is {short(method)}; those that are read are"
            f" {', '.join(FORMATS)}. Give one of these, or the checkpoint before quantisation"
            " (remove quantization_config if it is that)"
        )
    return FORMATS[method](description)
