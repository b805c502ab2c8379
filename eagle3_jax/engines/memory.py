"""Shares of a device's memory for several programs, and errors of memory."""

from __future__ import annotations

import os
import re

# Of the device's memory, where vLLM computes on it too. PyTorch, which cannot be told beforehand, takes from the rest.
SHARE_OF_JAX = 0.4
SHARE_OF_VLLM = 0.3
SHARE_OF_ENGINES = 0.4


def share_memory(*, beside_vllm: bool = True) -> None:
    """Let JAX take memory as it needs it, and next to vLLM at most its share. Call it before the device is used."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if beside_vllm and "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # its older name; JAX refuses both
        os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", str(SHARE_OF_JAX))


def share_of_engine(engines: int) -> float:
    """The share of each of several vLLM engines that are loaded at once."""
    return min(SHARE_OF_VLLM, SHARE_OF_ENGINES / max(engines, 1))


# PyTorch (also through cuBLAS), JAX, and vLLM on its start, in the words that they have for it.
_WORDS = re.compile(
    r"out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED|ALLOC_FAILED|Free memory on device|"
    r"No available memory for the cache|estimated maximum model length",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that memory did not suffice."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, AssertionError):  # a failed check, which may quote such an error
            return False
        # torch.OutOfMemoryError and JAX's error are RuntimeErrors.
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _WORDS.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False
