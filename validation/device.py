"""Options of a run with ``--gpu``: three programs share the device, and float32 stays float32."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from typing import Any

import jax

from eagle3_jax.files.writing import cache_directory
from eagle3_jax.measure.memory import is_out_of_memory

WHAT_TO_DO = (
    "run its level alone (--level), with a smaller --target, or with other shares of the device "
    "(XLA_CLIENT_MEM_FRACTION, --vllm-memory)"
)

# Results may not depend on the kernels that the autotuner picks, nor on the order of a sum.
# Compiled ahead of time, XLA of jax 0.11 and 0.12 then finds no configuration of its Triton kernels
# for products, so these are cuBLAS's.
DETERMINISTIC: dict[str, Any] = {
    "xla_gpu_deterministic_ops": True,
    "xla_gpu_enable_triton_gemm": False,
}
# Nor may one program keep bits of a bfloat16 between two operations that another program rounds
# away.
ROUNDED_AS_WRITTEN: dict[str, Any] = {"xla_allow_excess_precision": False}


def share_of_jax() -> float:
    """The share of the device that JAX may take, by either of its variables or its default."""
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    return float(next((os.environ[name] for name in names if name in os.environ), 0.75))


def exact_options() -> dict[str, Any]:
    """Options of the compiler for programs whose bits are compared.

    On CPUs the same programs are compiled as users have them: there, one backend has one way to
    round.
    """
    return DETERMINISTIC if jax.default_backend() == "cpu" else DETERMINISTIC | ROUNDED_AS_WRITTEN


def environment_of_vllm() -> dict[str, str]:
    """Variables that make vLLM's float32 float32 on NVIDIA.

    Its attention is written in Triton, whose products of float32 are TensorFloat-32 unless told;
    kernels compiled with other options must not be taken from a cache. cuBLAS gets the option too,
    although PyTorch asks for float32.
    """
    return {
        "TRITON_F32_DEFAULT": "ieee",
        "TRITON_CACHE_DIR": str(cache_directory("compiled").with_name("triton-ieee")),
        "NVIDIA_TF32_OVERRIDE": "0",
    }


def products(level: str) -> contextlib.AbstractContextManager:
    """The precision of products in a check: all bits of float32.

    Speeds are measured as users have them.
    """
    return contextlib.nullcontext() if level == "L9" else jax.default_matmul_precision("highest")


def release_memory() -> None:
    """Free unused memory. PyTorch keeps freed memory until it is told to release it."""
    gc.collect()
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason_of_exhaustion(error: BaseException) -> str | None:
    """Why a check did not run for lack of memory, and what to do; ``None`` for other errors."""
    if not is_out_of_memory(error):
        return None
    message = " ".join(str(error).split())
    return f"out of memory ({type(error).__name__}: {message[:160]}); {WHAT_TO_DO}"
