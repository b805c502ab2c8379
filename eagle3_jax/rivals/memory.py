"""Whether an error means that a device's memory did not suffice, whoever raised it."""

from __future__ import annotations

import re

# PyTorch (also through cuBLAS), JAX, and vLLM on its start, in the words that they have for it.
_WORDS = re.compile(
    r"out of memory|OutOfMemoryError|RESOURCE_EXHAUSTED|ALLOC_FAILED|Free memory on device|"
    r"No available memory for the cache|estimated maximum model length",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, says that memory did not suffice."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, AssertionError):  # a check that failed, whatever it quotes
            return False
        # torch.OutOfMemoryError and JAX's error are RuntimeErrors.
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _WORDS.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False
