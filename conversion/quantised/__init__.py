"""Reads quantised checkpoints exactly: a tensor is computed whenever it is converted to numpy."""

from eagle3_jax.conversion.quantised.formats import Quantisation, read_quantised
from eagle3_jax.conversion.quantised.sizes import StoredBits, stored_bits

__all__ = ["Quantisation", "StoredBits", "read_quantised", "stored_bits"]
