"""Processes with virtual devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

HERE = Path(__file__).parent


def environment(devices: int) -> dict[str, str]:
    """Returns the variables of a process with virtual devices that compiles quickly."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    path = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def run_on_eight_devices(script: str, *names: str) -> dict[str, Any]:
    """Runs a script of ``tests/helpers`` on eight devices and returns its results."""
    # Compilation is most of it; a second run finds its programs where this suite keeps them.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    cache["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    command = [sys.executable, HERE / script, *names]
    done = subprocess.run(
        command, env=environment(8) | cache, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
