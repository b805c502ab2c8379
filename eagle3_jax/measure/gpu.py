"""Checks that a GPU of this machine is used, so that figures of a CPU are not taken for those of a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import jax

_NODE = Path("/dev/nvidia0")
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, usable by jax or not."""
    if _NODE.exists():
        return True
    try:
        process = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return process.returncode == 0 and "GPU" in process.stdout


def on_gpu() -> bool:
    """Whether jax computes on a GPU."""
    return jax.devices()[0].platform in ("gpu", "cuda")


def gpu_problem(*, required: bool = False) -> str | None:
    """Returns why jax does not compute on the GPU, in one line with the remedy; ``None`` without a problem.

    Unless a GPU is required, a machine without one is no problem, and neither is
    ``JAX_PLATFORMS=cpu``. The check starts the device, so options that share its memory must be set
    before.

    Args:
        required: Whether there must be a GPU.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    try:
        if on_gpu():
            return None
        seen = f"jax {jax.__version__} sees only {jax.devices()[0].platform}"
    except RuntimeError as error:  # JAX_PLATFORMS names a device that does not start
        seen = f"jax {jax.__version__} sees no device ({' '.join(str(error).split())[:200]})"
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"{seen}, for JAX_PLATFORMS is {platforms}; unset it" if required else None
    here = has_gpu()
    if not here and not required:
        return None
    if any(importlib.util.find_spec(name) for name in _PLUGINS):
        why = "its plugin for CUDA is installed and does not start: CUDA 13 needs a driver of 580 (nvidia-smi); "
        return f"{seen}; {why}JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()' tells the reason"
    where = (
        "an NVIDIA GPU is here" if here else "no NVIDIA GPU is seen here (nvidia-smi, /dev/nvidia0)"
    )
    return f"{seen}, and {where}; a jax with CUDA: pip install 'jax[cuda13]=={jax.__version__}'"
