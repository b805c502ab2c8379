"""Whether a GPU is here, and whether this jax computes on it: asked before figures of a CPU pass for a GPU's."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import jax

_NODE = Path("/dev/nvidia0")
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, whatever jax can do with it."""
    if _NODE.exists():
        return True
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return False
    return told.returncode == 0 and "GPU" in told.stdout


def on_gpu() -> bool:
    """Whether jax computes on one."""
    return jax.devices()[0].platform in ("gpu", "cuda")


def cuda_command() -> str:
    """What gives this jax its CUDA, in a checkout and outside."""
    return f"pip install 'jax[cuda13]=={jax.__version__}'"


def gpu_problem(*, wanted: bool = False) -> str | None:
    """Why what is to run on a GPU would not, in one line that says what to do; ``None`` where all is well.

    A machine without a GPU is well, and so is one whose user keeps jax from it (``JAX_PLATFORMS=cpu``), unless a GPU is
    wanted. Touches the device: jax must have been told before how it shares memory.

    Args:
        wanted: Whether there must be a GPU.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    try:
        if on_gpu():
            return None
        seen = f"jax {jax.__version__} sees only {jax.devices()[0].platform}"
    except RuntimeError as error:  # JAX_PLATFORMS names a device that does not start
        seen = f"jax {jax.__version__} sees no device ({' '.join(str(error).split())[:200]})"
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return f"{seen}, for JAX_PLATFORMS is {platforms}; unset it" if wanted else None
    here = has_gpu()
    if not here and not wanted:
        return None
    if any(importlib.util.find_spec(name) for name in _PLUGINS):
        why = "its plugin for CUDA is installed and does not start: CUDA 13 needs a driver of 580 (nvidia-smi); "
        return f"{seen}; {why}JAX_PLATFORMS=cuda python -c 'import jax; jax.devices()' tells the reason"
    where = "an NVIDIA GPU is here" if here else "no NVIDIA GPU is seen here (nvidia-smi, /dev/nvidia0)"
    return f"{seen}, and {where}; a jax with CUDA: {cuda_command()}"
