"""Memory of a device that another program uses too, and errors of memory."""

from __future__ import annotations

import os
import re

# The words for exhausted memory of PyTorch (also through cuBLAS), of JAX, and of vLLM while it
# starts.
_WORDS = re.compile(
    r"out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED|ALLOC_FAILED|Free memory on device|"
    r"No available memory for the cache|estimated maximum model length",
    re.IGNORECASE,
)


def allocate_on_demand() -> None:
    """Lets JAX take a GPU's memory as it needs it, so that PyTorch gets some. Call it before JAX uses the device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or an error that caused it, reports that memory was exhausted."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, AssertionError):  # a failed check, which may quote such an error
            return False
        # torch.OutOfMemoryError and JAX's error are RuntimeErrors.
        if isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and _WORDS.search(str(error))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
