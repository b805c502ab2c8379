"""Acceptance rules other than :class:`eagle3_jax.Exact`, one file each: ``eagle3_jax.types.Verifier``."""
