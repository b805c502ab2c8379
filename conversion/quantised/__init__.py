"""Quantised checkpoints, read exactly: each tensor is computed when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.quantised.format import Format, Quantisation, dequantised
from eagle3_jax.conversion.quantised.formats import FORMATS, format_of


def read_quantised(
    tensors: Mapping[str, np.ndarray], fields: Fields, directory: Path
) -> tuple[dict[str, Any], Quantisation | None]:
    """The tensors of a checkpoint without quantisation, and how they were stored."""
    how = format_of(fields, directory)
    return (dict(tensors), None) if how is None else dequantised(tensors, how, str(directory))


__all__ = ["FORMATS", "Format", "Quantisation", "read_quantised"]
