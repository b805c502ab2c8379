"""Arrays of the host: memory that JAX shares on a CPU, and copies in another order of axes."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import DTypeLike

# JAX's CPU backend uses memory that begins at a multiple of this without a copy.
_ALIGNMENT = 64
# Rows of the source that are copied together. A cache holds a line of each of them.
_BLOCK = 128


def empty_aligned(shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
    """Returns an array of any numbers, in order, whose memory JAX's CPU backend can share."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def copy_blocks(target: np.ndarray, source: np.ndarray) -> None:
    """Copies an array into another of its shape; fast also if the axes are in another order.

    numpy copies in the order of the target. If that jumps through the source, it is done in blocks
    that a cache holds.
    """
    fastest_read = _fastest_axis(source)
    fastest_written = _fastest_axis(target)
    if fastest_read == fastest_written:
        target[...] = source
        return

    index: list[Any] = [slice(None)] * source.ndim
    for start in range(0, source.shape[fastest_written], _BLOCK):
        index[fastest_written] = slice(start, start + _BLOCK)
        target[tuple(index)] = source[tuple(index)]


def _fastest_axis(array: np.ndarray) -> int:
    """Returns the axis whose neighbours are closest in memory; 0 for a single number."""
    strides = [
        stride if size > 1 else np.inf
        for size, stride in zip(array.shape, np.abs(array.strides), strict=True)
    ]
    return int(np.argmin(strides)) if strides else 0
