"""Reads quantised checkpoints exactly: a tensor is computed whenever it is converted to numpy."""

from eagle3_jax.conversion.quantised.formats import Quantisation, read_quantised

__all__ = ["Quantisation", "read_quantised"]
