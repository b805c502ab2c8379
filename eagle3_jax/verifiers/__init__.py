"""Acceptance rules other than :class:`eagle3_jax.Exact`, one file each.

All of them implement the protocol ``eagle3_jax.types.Verifier``.
"""
