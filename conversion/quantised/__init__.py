"""Quantised checkpoints, read exactly: each tensor is computed when it is asked for."""

from eagle3_jax.conversion.quantised.formats import Quantisation, read_quantised

__all__ = ["Quantisation", "read_quantised"]
