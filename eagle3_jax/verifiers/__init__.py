"""Acceptance rules besides :class:`eagle3_jax.Exact`: one file each, all behind ``eagle3_jax.types.Verifier``."""
