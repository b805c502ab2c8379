"""Speculative rollouts for Tunix, Google's library for post-training in JAX."""

try:
    from eagle3_jax.tunix.rollout import SpeculativeRollout
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"eagle3_jax.tunix needs {error.name}, which is not installed; install the extra `tunix`:"
        " pip install -e '.[tunix]'",
        name=error.name,
    ) from None

__all__ = ["SpeculativeRollout"]
