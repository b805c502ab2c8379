"""Reads quantised checkpoints exactly, by the ``quantization_config`` of each.

* ``fp8``, as DeepSeek publishes: E4M3 in blocks of 128 by 128, with scales in float32 or exponents.
* ``fbgemm_fp8``, as Meta publishes: E4M3 with a scale for every output, stacked experts too.
* ``modelopt``, of NVIDIA's Model Optimizer: E4M3 with one scale a tensor, or NVFP4, described in
  ``config.json`` or in its own file.
* ``mxfp4``, as gpt-oss is published: experts in four bits, with an exponent for 32 inputs.
* ``compressed-tensors``, as LLM Compressor writes: E4M3, eight bits, four bits in words, or NVFP4.
* ``awq``, as AutoAWQ writes for its product ``gemm``: four bits with zero points.
* ``gptq``, as AutoGPTQ and GPTQModel write: two, four or eight bits with zero points.
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
    awq,
    fused_experts,
    gptq,
    mxfp4,
    nvfp4,
    packed,
    scaled,
)

_NVFP4 = Scheme("group", (1, 16), 4)
_NVFP4_BITS = 4 + 8 / 16
_NVFP4_WORDS = "a scale for 16 inputs of an output and one for the tensor"
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
    #: Its kind: ``fp8``, ``int8``, ``int4``, ``mxfp4`` or ``nvfp4``.
    kind: str
    bits: float  #: Bits of a quantised weight, with its share of scales and zero points.
    layouts: tuple[Layout, ...]  #: The layouts of its tensors.
    #: Patterns of the names of tensors that belong to quantised ones and are not needed for their
    #: weights.
    ignored: tuple[str, ...] = ()
    zero_biases: bool = False  #: See :class:`Quantisation`.


class Quantisation(NamedTuple):
    """How the weights of a checkpoint were stored."""

    words: str  #: The format, for people.
    #: The kind of weights that keeps the stored values and scales, ``fp8``, ``int8`` or ``int4``;
    #: empty if there is none.
    kept_as: str
    num_tensors: int  #: How many tensors are quantised.
    #: Whether the writer may have added a bias of zeros to layers without a bias.
    zero_biases: bool = False


def read_quantised(
    tensors: Mapping[str, Any], fields: Fields, directory: Path
) -> tuple[dict[str, Any], Quantisation | None]:
    """Returns the tensors of a checkpoint without quantisation, and how they were stored.

    Args:
        tensors: The stored tensors by name.
        fields: The ``config.json`` of the checkpoint.
        directory: The directory of the checkpoint.
    """
    format = format_of(fields, directory)
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
    return dense | results, Quantisation(format.words, kept_as, len(results), format.zero_biases)


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
        kind="fp8",
        bits=8.0,
        layouts=(
            Layout("_scale_inv", "", "", functools.partial(scaled, scheme=scheme, dtype=E4M3)),
        ),
        ignored=(r".*\.(input_scale|activation_scale)", r".*\.[kv]_scale"),
    )


def _read_fbgemm(fields: Fields) -> Format:
    return Format(
        words="fp8 of fbgemm, a scale for every output",
        kind="fp8",
        bits=8.0,
        layouts=(
            _matrices(Scheme("channel")),
            Layout("_proj_scale", "_proj", "_proj", fused_experts),
        ),
        ignored=(r".*\.(input_scale_ub|input_scale)",),
    )


def _read_modelopt(fields: Fields) -> Format:
    algorithm = fields.one_of("quant_algo", ("FP8", "NVFP4", "W4A16_NVFP4"))
    words = "fp8 of Model Optimizer, one scale a tensor"
    layout = _matrices(Scheme("tensor"))
    extra: tuple[str, ...] = ()
    if algorithm != "FP8":
        fields.only(group_size=_NVFP4.block[1])
        words = f"nvfp4 of Model Optimizer, {_NVFP4_WORDS}"
        decode = functools.partial(nvfp4, scheme=_NVFP4, suffix=".weight_scale_2", divides=False)
        layout = Layout(".weight_scale", ".weight", ".weight", decode)
        extra = (r".*\.weight_scale_2",)
    return Format(
        words=words,
        kind="fp8" if algorithm == "FP8" else "nvfp4",
        bits=8.0 if algorithm == "FP8" else _NVFP4_BITS,
        layouts=(layout,),
        ignored=(r".*\.(input_scale|output_scale)", r".*\.[qkv]_scale", *extra),
    )


def _read_mxfp4(fields: Fields) -> Format:
    return Format(
        words="mxfp4, an exponent for 32 inputs of an output",
        kind="mxfp4",
        bits=4 + 8 / 32,
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
    ("nvfp4-pack-quantized", "float", 4): "nvfp4",
}
# Fields of a description of weights: how they are stored, and how they were found.
_STORED_BY = "num_bits type symmetric strategy group_size block_structure actorder"
_OF_WEIGHTS = f"{_STORED_BY} dynamic observer observer_kwargs scale_dtype zp_dtype"
_FORMS = tuple(dict.fromkeys(form for form, _, _ in _COMPRESSED))


def _read_compressed_tensors(fields: Fields) -> Format:
    form = fields.one_of("format", _FORMS)
    fields.section("sparsity_config").only(format="dense")
    if fields.section("transform_config").get("config_groups"):
        raise CheckpointError(
            f"{fields.where}: transform_config rotates activations; that is not computed"
        )

    weights = _weights(fields)
    _check_settings(weights, _OF_WEIGHTS)
    weights.only(dynamic=False)
    symmetric = weights.flag("symmetric", True)
    bits = weights.integer("num_bits")
    kind = weights.one_of("type", ("float", "int"))
    words = _COMPRESSED.get((form, kind, bits))
    if words is None:
        raise CheckpointError(
            f"{weights.where}: num_bits {bits} of type {kind!r} is not read in the format {form!r}"
        )
    if kind == "float":
        weights.only(symmetric=True)

    ignored = (r".*\.(input_scale|output_scale|weight_shape)", r".*\.[qkv]_scale")
    if words == "nvfp4":
        weights.only(strategy="tensor_group", group_size=_NVFP4.block[1])
        decode = functools.partial(
            nvfp4, scheme=_NVFP4, suffix=".weight_global_scale", divides=True
        )
        return Format(
            words=f"nvfp4 of compressed-tensors, {_NVFP4_WORDS}",
            kind=words,
            bits=_NVFP4_BITS,
            layouts=(Layout(".weight_scale", ".weight_packed", ".weight", decode),),
            ignored=(*ignored, r".*\.(weight|input)_global_scale"),
        )

    scheme, among = _scheme(weights, bits)
    # By "weight" the columns were only visited in another order. By "group" they are stored so.
    order = "group" if weights.get("actorder") is True else None
    order = order or weights.one_of("actorder", ("weight", "static", "group", "dynamic"), "static")
    scheme = scheme._replace(symmetric=symmetric, reordered=order in ("group", "dynamic"))
    if not symmetric:
        among = among.replace("scale", "scale and a zero point")
        ignored += (r".*\.weight_zero_point",)
    if scheme.reordered:
        among += ", reordered"
        ignored += (r".*\.weight_g_idx",)

    layout = _matrices(scheme, E4M3 if kind == "float" else np.int8)
    if form == "pack-quantized":
        layout = Layout(
            ".weight_scale", ".weight_packed", ".weight", functools.partial(packed, scheme=scheme)
        )
    return Format(
        words=f"{words} of compressed-tensors, {among}",
        kind=words,
        bits=_bits(scheme, bits if form == "pack-quantized" else 8),
        layouts=(layout,),
        ignored=ignored,
    )


def _weights(fields: Fields) -> Fields:
    """Returns the description of the weights, which must be the same for all groups of modules."""
    groups = fields.section("config_groups")
    descriptions = [groups.section(name).section("weights") for name in groups.values]
    if not descriptions or not all(weights.values for weights in descriptions):
        raise CheckpointError(
            f"{fields.where}: config_groups says nothing of weights; add their description"
        )

    compared = _STORED_BY.split()
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


# What AutoAWQ writes about its format, and further fields that tell how the weights were found.
_AWQ = """
    quant_method bits group_size zero_point version format modules_to_not_convert backend
    do_fuse exllama_config fuse_max_seq_len modules_to_fuse
"""
_GPTQ = """
    quant_method bits group_size desc_act sym checkpoint_format format lm_head dynamic
    pack_dtype is_marlin_format act_group_aware backend batch_size block_name_to_quantize
    cache_block_outputs damp_auto_increment damp_percent dataset disable_exllama exllama_config
    inside_layer_modules max_input_length meta model_file_base_name model_name_or_path
    model_seqlen module_name_preceding_first_block modules_in_block_to_quantize
    modules_to_not_convert mse offload_to_disk pad_token_id quantizer static_groups tokenizer
    true_sequential use_cuda_fp16 use_exllama
"""


def _check_settings(fields: Fields, known: str) -> None:
    """Refuses fields with a value that nothing here reads."""
    for name in fields.values:
        if name not in known.split() and fields.get(name) is not None:
            raise fields.wrong(
                name, "this setting is not known; remove it if the weights do not depend on it"
            )


def _group_scheme(fields: Fields, bits: int) -> tuple[Scheme, str]:
    """Returns the scheme of a ``group_size``, which is -1 for all inputs of an output."""
    if fields.integer("group_size") == -1:
        return Scheme("group", (1, 0), bits), "a scale and a zero point for every output"
    size = fields.size("group_size")
    among = f"a scale and a zero point for {size} inputs of an output"
    return Scheme("group", (1, size), bits, symmetric=False), among


def _bits(scheme: Scheme, stored: int) -> float:
    """Returns the bits of a weight with its share of a scale of 16 bits and a zero point."""
    size = scheme.block[1]
    if scheme.strategy != "group" or not size:
        return float(stored)
    return stored + (16 + (0 if scheme.symmetric else stored)) / size


def _read_awq(fields: Fields) -> Format:
    _check_settings(fields, _AWQ)
    fields.only(bits=4, zero_point=True)
    fields.require("bits")
    for name in ("version", "format"):
        fields.one_of(name, ("gemm", "GEMM"), "gemm")
    fields.one_of("backend", ("autoawq", "auto"), "autoawq")
    scheme, among = _group_scheme(fields, 4)
    layout = Layout(".scales", ".qweight", ".weight", functools.partial(awq, scheme=scheme))
    return Format(
        words=f"int4 of AWQ, {among}",
        kind="int4",
        bits=_bits(scheme, 4),
        layouts=(layout,),
        ignored=(r".*\.qzeros",),
    )


def _read_gptq(fields: Fields) -> Format:
    _check_settings(fields, _GPTQ)
    fields.only(pack_dtype="int32", is_marlin_format=False)
    bits = fields.integer("bits")
    if bits not in (2, 4, 8):
        raise fields.wrong("bits", "expected 2, 4 or 8")
    overrides = [name for name in fields.section("dynamic").values if not name.startswith("-:")]
    if overrides:
        raise fields.wrong("dynamic", f"{overrides[0]} has settings of its own; expected only -:")

    stored_as = "checkpoint_format" if fields.get("format") is None else "format"
    form = fields.one_of(stored_as, ("gptq", "gptq_v2"), "gptq")
    scheme, among = _group_scheme(fields, bits)
    decode = functools.partial(gptq, scheme=scheme, adds_one=form == "gptq")
    layout = Layout(".scales", ".qweight", ".weight", decode)
    return Format(
        words=f"int{bits} of GPTQ, {among}",
        kind="int8" if bits == 8 else "int4",
        bits=_bits(scheme, bits),
        layouts=(layout,),
        ignored=(r".*\.(qzeros|g_idx)",),
        zero_biases=True,
    )


FORMATS: dict[str, Callable[[Fields], Format]] = {
    "fp8": _read_fp8,
    "awq": _read_awq,
    "compressed-tensors": _read_compressed_tensors,
    "fbgemm_fp8": _read_fbgemm,
    "gptq": _read_gptq,
    "modelopt": _read_modelopt,
    "mxfp4": _read_mxfp4,
}


def description_of(fields: Fields, directory: Path) -> Fields:
    """Returns the description of a quantisation; empty if the checkpoint is not quantised."""
    section = "quantization_config"
    owner = fields if fields.get(section) is not None else fields.section("text_config")
    if owner.get(section) is not None:
        return owner.section(section)
    # Model Optimizer may describe it in a file of its own.
    path = directory / _FILE
    values = read_json(path) if path.is_file() else {}
    optimizer = Fields(values, str(path)).section("quantization")
    return optimizer if optimizer.get("quant_algo") is not None else optimizer._replace(values={})


def format_of(fields: Fields, directory: Path) -> Format | None:
    """Returns the format of a checkpoint; ``None`` if it is not quantised."""
    description = description_of(fields, directory)
    if not description.values:
        return None
    method = description.get("quant_method")
    # Files of Model Optimizer may have no quant_method.
    if method is None and description.get("quant_algo") is not None:
        method = "modelopt"
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(
            f"{description.where}: quant_method is {short(method)}; those that are read are"
            f" {', '.join(FORMATS)}. Give one of these, or the checkpoint before quantisation"
            " (remove quantization_config if it is that)"
        )
    return FORMATS[method](description)
