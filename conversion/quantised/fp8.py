"""``quant_method: fp8``: E4M3 in blocks of 128 by 128, as DeepSeek publishes, with scales in float32 or exponents."""

from __future__ import annotations

import functools

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.quantised.arrays import E4M3
from eagle3_jax.conversion.quantised.decoding import Scheme, scaled
from eagle3_jax.conversion.quantised.format import Format, Layout

_LISTS = ("modules_to_not_convert", "ignored_layers")


def read(fields: Fields) -> Format:
    """The format, from its ``quantization_config``."""
    if fields.get("fmt") not in (None, "e4m3", "float8_e4m3fn"):
        raise CheckpointError(f"{fields.where}: fmt is {short(fields.get('fmt'))}; only 'e4m3' is read")
    scale_fmt = fields.get("scale_fmt")
    if scale_fmt not in (None, "float", "ue8m0"):
        raise CheckpointError(f"{fields.where}: scale_fmt is {short(scale_fmt)}; 'float' and 'ue8m0' are read")
    block = fields.get("weight_block_size")
    if block is None:
        words, scheme = "fp8, one scale a tensor", Scheme("tensor", exponents=scale_fmt == "ue8m0")
    else:
        size = block_size(block, f"{fields.where}: weight_block_size")
        words = f"fp8, a scale for {size[0]} by {size[1]} weights"
        scheme = Scheme("block", size, exponents=scale_fmt == "ue8m0")
    dense = [entry for name in _LISTS for entry in fields.words(name)]
    return Format(
        words=words,
        layouts=(Layout("_scale_inv", "", "", functools.partial(scaled, scheme=scheme, dtype=E4M3)),),
        dense=dense,
        dense_field="modules_to_not_convert",
        beside=(r".*\.(input_scale|activation_scale)", r".*\.[kv]_scale"),
    )


def block_size(value: object, what: str) -> tuple[int, int]:
    """Outputs and inputs of a block.

    Raises:
        CheckpointError: It is no such pair.
    """
    if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and 1 <= n <= 65536 for n in value):
        raise CheckpointError(f"{what} is {short(value)}; expected two sizes such as [128, 128]")
    return value[0], value[1]
