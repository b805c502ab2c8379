"""Speculative rollouts for Tunix, Google's library for post-training in JAX."""

from eagle3_jax.tunix.rollout import SpeculativeRollout

__all__ = ["SpeculativeRollout"]
