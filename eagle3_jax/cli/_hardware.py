"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from eagle3_jax.cli._errors import Misuse


def measured_dtype(given: str | None) -> str:
    """The precision to measure in: as given, or the fastest that rivals have too on a GPU, and the fastest on a CPU.

    Raises:
        Misuse: A GPU is here that this jax cannot use, so that the figures would be a CPU's.
    """
    from eagle3_jax.reporting.gpu import gpu_problem, on_gpu

    problem = gpu_problem()
    if problem is not None:
        raise Misuse(f"{problem} (JAX_PLATFORMS=cpu measures the CPU)")
    return given or ("bfloat16" if on_gpu() else "mixed")


def hardware() -> str:
    """Processor or accelerator, how many, and the version of jax."""
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        name = f"{_processor()}, {len(os.sched_getaffinity(0))} cores"
    else:
        name = f"{device.device_kind}, 1 of {jax.device_count()}"
    return f"{name}, jax {jax.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n")
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()
