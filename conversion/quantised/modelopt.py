"""FP8 of NVIDIA's Model Optimizer: E4M3, one scale a tensor, described in ``config.json`` or a file beside it."""

from __future__ import annotations

import functools
from pathlib import Path

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import read_json
from eagle3_jax.conversion.quantised.arrays import E4M3
from eagle3_jax.conversion.quantised.decoding import Scheme, scaled
from eagle3_jax.conversion.quantised.format import Format, Layout

_FILE = "hf_quant_config.json"
_LISTS = ("ignore", "exclude_modules", "modules_to_not_convert")


def read(fields: Fields) -> Format:
    """The format, from its ``quantization_config`` or the ``quantization`` of the file beside it."""
    algorithm = fields.get("quant_algo")
    if algorithm != "FP8":
        raise CheckpointError(f"{fields.where}: quant_algo is {short(algorithm)}; only 'FP8' is read")
    return Format(
        words="fp8 of Model Optimizer, one scale a tensor",
        layouts=(
            Layout(
                ".weight_scale", ".weight", ".weight", functools.partial(scaled, scheme=Scheme("tensor"), dtype=E4M3)
            ),
        ),
        dense=[entry for name in _LISTS for entry in fields.words(name)],
        dense_field="the list of modules left out",
        beside=(r".*\.(input_scale|output_scale)", r".*\.[qkv]_scale"),
    )


def beside(directory: Path) -> Format | None:
    """What the file beside ``config.json`` describes; ``None`` where there is none, or it quantises nothing."""
    path = directory / _FILE
    if not path.is_file():
        return None
    fields = Fields(read_json(path), str(path)).section("quantization")
    return None if fields.get("quant_algo") is None else read(fields)
