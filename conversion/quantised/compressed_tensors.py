"""``quant_method: compressed-tensors``, as LLM Compressor writes: E4M3, eight bits, or four bits in words."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.quantised.arrays import E4M3
from eagle3_jax.conversion.quantised.decoding import Scheme, packed, scaled
from eagle3_jax.conversion.quantised.format import Format, Layout
from eagle3_jax.conversion.quantised.fp8 import block_size

_FORMATS = ("float-quantized", "int-quantized", "pack-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")


def read(fields: Fields) -> Format:
    """The format, from its ``quantization_config``."""
    form = fields.get("format")
    if form not in _FORMATS:
        raise CheckpointError(f"{fields.where}: format is {short(form)}; those that are read are {', '.join(_FORMATS)}")
    sparsity = fields.section("sparsity_config").get("format")
    if sparsity not in (None, "dense"):
        raise CheckpointError(f"{fields.where}: sparsity_config has the format {short(sparsity)}; only 'dense' is read")
    if fields.section("transform_config").get("config_groups"):
        raise CheckpointError(f"{fields.where}: transform_config rotates activations; that is not computed")
    weights = _weights(fields)
    bits, kind = weights.integer("num_bits"), weights.get("type")
    if not weights.flag("symmetric", True):
        raise CheckpointError(f"{weights.where}: symmetric is false; asymmetric weights are not read")
    scheme, among = _scheme(weights, bits)
    if form == "pack-quantized":
        if kind != "int" or bits not in (4, 8):
            raise _wrong(weights, form, bits, kind)
        words, layout = f"int{bits}", Layout(
            ".weight_scale", ".weight_packed", ".weight", functools.partial(packed, scheme=scheme)
        )  # fmt: skip
    else:
        types = {"float": E4M3, "int": np.dtype(np.int8)}
        if bits != 8 or kind not in types or (form, kind) in (("float-quantized", "int"), ("int-quantized", "float")):
            raise _wrong(weights, form, bits, kind)
        words = "fp8" if kind == "float" else "int8"
        layout = Layout(
            ".weight_scale", ".weight", ".weight", functools.partial(scaled, scheme=scheme, dtype=types[kind])
        )  # fmt: skip
    return Format(
        words=f"{words} of compressed-tensors, {among}",
        layouts=(layout,),
        dense=fields.words("ignore"),
        dense_field="ignore",
        beside=(r".*\.(input_scale|output_scale|weight_shape)", r".*\.[qkv]_scale"),
        refused={
            r".*\.weight_zero_point": "its weights are asymmetric",
            r".*\.weight_g_idx": "the inputs of its groups are reordered",
        },
    )


def _weights(fields: Fields) -> Fields:
    """What all groups of modules say of their weights."""
    groups: dict[str, Any] = {
        name: fields.section("config_groups").section(name) for name in fields.section("config_groups").values
    }
    found = [group.section("weights") for group in groups.values()]
    if not found or not all(one.values for one in found):
        raise CheckpointError(f"{fields.where}: config_groups says nothing of weights; they are what is read")
    telling = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure")
    if any(one.get(name) != found[0].get(name) for one in found for name in telling):
        raise CheckpointError(
            f"{fields.where}: the groups {', '.join(groups)} differ in their weights; one kind is read"
        )
    return found[0]


def _scheme(weights: Fields, bits: int) -> tuple[Scheme, str]:
    strategy = weights.get("strategy")
    if strategy not in _STRATEGIES:
        raise CheckpointError(
            f"{weights.where}: strategy is {short(strategy)}; those that are read are {', '.join(_STRATEGIES)}"
        )
    if strategy == "group":
        size = weights.size("group_size")
        return Scheme("group", (1, size), bits), f"a scale for {size} inputs of an output"
    if strategy == "block":
        block = block_size(weights.get("block_structure"), f"{weights.where}: block_structure")
        return Scheme("block", block, bits), f"a scale for {block[0]} by {block[1]} weights"
    return Scheme(strategy, bits=bits), "one scale a tensor" if strategy == "tensor" else "a scale for every output"


def _wrong(weights: Fields, form: str, bits: int, kind: Any) -> CheckpointError:
    return CheckpointError(f"{weights.where}: num_bits {bits} of type {short(kind)} is not read in the format {form!r}")
