"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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
