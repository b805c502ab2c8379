"""Shares of a device's memory for JAX and vLLM, which compute on it at the same time."""

from __future__ import annotations

import os

from eagle3_jax.measure.memory import allocate_on_demand

# Shares of the device's memory. PyTorch takes from the remaining memory, because its share cannot
# be set in advance.
SHARE_OF_JAX = 0.4
SHARE_OF_VLLM = 0.3


def share_memory() -> None:
    """Lets JAX take memory as it needs it, up to its share. Call it before JAX uses the device."""
    allocate_on_demand()
    # The older name of the variable; JAX refuses both.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(SHARE_OF_JAX))
