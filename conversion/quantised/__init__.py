"""Quantised checkpoints: what is read of them, exactly, tensor by tensor and only when it is asked for.

A format is a file; each says how a ``quantization_config`` is read and which tensors belong to a quantised one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.quantised import compressed_tensors, fbgemm, fp8, modelopt, mxfp4
from eagle3_jax.conversion.quantised.format import Format, Quantisation, dequantised

FORMATS: dict[str, Callable[[Fields], Format]] = {
    "fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "fbgemm_fp8": fbgemm.read,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
}


def read_quantised(
    tensors: Mapping[str, np.ndarray], fields: Fields, directory: Path
) -> tuple[dict[str, Any], Quantisation | None]:
    """The tensors of a checkpoint with those that are quantised as what they stand for, and how they were stored.

    Args:
        tensors: As they lie in the files.
        fields: Of ``config.json``.
        directory: Of the checkpoint.

    Raises:
        CheckpointError: The quantisation is not one that is read, or the tensors are not those that it describes.
    """
    how = _format(fields, directory)
    return (dict(tensors), None) if how is None else dequantised(tensors, how, str(directory))


def _format(fields: Fields, directory: Path) -> Format | None:
    section = "quantization_config"
    of = fields if fields.get(section) is not None else fields.section("text_config")
    if of.get(section) is None:
        return modelopt.beside(directory)
    said = of.section(section)
    method = said.get("quant_method")
    if method is None and said.get("quant_algo") is not None:
        method = "modelopt"
    if not isinstance(method, str) or method not in FORMATS:
        raise CheckpointError(
            f"{said.where}: quant_method is {short(method)}; those that are read are {', '.join(FORMATS)}. Give one of "
            "these, or the checkpoint before quantisation (remove quantization_config if it is that)"
        )
    return FORMATS[method](said)


__all__ = ["FORMATS", "Format", "Quantisation", "read_quantised"]
