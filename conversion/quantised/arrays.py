"""Arrays that are computed from quantised tensors at every read, so that memory never holds all of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from eagle3_jax.models.quantised import Fp8Kernel, Int8Kernel

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

# Values as they are stored, and the scale of each; None where the values are the numbers themselves.
Read = Callable[[], tuple[np.ndarray, np.ndarray | None]]
View = Callable[[np.ndarray], np.ndarray]


class Dequantised:
    """``values · scale`` in float32, exactly. Transposing, reshaping and cutting read nothing.

    Attributes:
        shape: Of the array.
        dtype: float32, unless another one is given.
        ndim: Number of axes.
        size: Number of entries.
        stored: Dtype of the values in the file.
        block: Number of inputs of a linear layer that share a scale; ``None`` for all inputs.
        computed: Always true: it is no array of the file.
    """

    computed = True

    def __init__(
        self, shape: Sequence[int], stored: Any, read: Read, *, block: int | None = None, dtype: Any = np.float32
    ):
        """``shape`` is that of the values that ``read`` gives."""
        self._whole = tuple(shape)
        self._read = read
        self._views: tuple[View, ...] = ()
        self.stored = np.dtype(stored)
        self.block = block
        self.dtype = np.dtype(dtype)
        self.shape = self._whole
        self.ndim = len(self._whole)
        self.size = math.prod(self._whole)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole array; always a copy."""
        values, scale = self.parts()
        dense = values.astype(self.dtype)
        if scale is not None:
            dense *= scale
        return dense if dtype is None else dense.astype(dtype, copy=False)

    def parts(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Values as they are stored, and the scale of each."""
        values, scale = self._read()
        scales = None if scale is None else self._viewed(np.broadcast_to(scale, values.shape))
        return self._viewed(values), scales

    @property
    def kept_as(self) -> str:
        """The kind of kernel that holds the values as they are stored: ``fp8``, ``int8``, or empty for none."""
        if self.stored == E4M3:
            return "fp8"
        return "int8" if self.stored == np.int8 and self.block is None else ""

    def stored_kernel(self) -> Fp8Kernel | Int8Kernel | None:
        """Values and scales as they are stored, as a kernel ``[..., D_in, D_out]``; ``None`` for other types."""
        return stored_kernel([(lambda whole: whole, self)], self.shape)

    @property
    def T(self) -> Dequantised:
        """Transposed."""
        return self._view(lambda one: one.T)

    def reshape(self, *shape: Any) -> Dequantised:
        """Reshaped."""
        return self._view(lambda one: one.reshape(*shape))

    def swapaxes(self, first: int, second: int) -> Dequantised:
        """With two axes exchanged."""
        return self._view(lambda one: one.swapaxes(first, second))

    def __getitem__(self, index: Any) -> Dequantised:
        """A part of it."""
        return self._view(lambda one: one[index])

    def _view(self, view: View) -> Dequantised:
        viewed = copy.copy(self)
        viewed._views = (*self._views, view)
        viewed.shape = viewed._viewed(np.broadcast_to(np.float32(0), self._whole)).shape
        viewed.ndim = len(viewed.shape)
        viewed.size = math.prod(viewed.shape)
        return viewed

    def _viewed(self, one: np.ndarray) -> np.ndarray:
        for view in self._views:
            one = view(one)
        return one


def kept_as(parts: Sequence[Any]) -> str:
    """The kind of kernel that several arrays can be as they are stored; empty if they differ in type or blocks."""
    kinds = {getattr(part, "kept_as", "") for part in parts}
    return kinds.pop() if len(kinds) == 1 and len({getattr(part, "block", None) for part in parts}) == 1 else ""


def stored_kernel(parts: Sequence[tuple[View, Any]], shape: Sequence[int]) -> Fp8Kernel | Int8Kernel | None:
    """The kernel that several arrays fill, bit for bit; ``None`` if they cannot be one kernel.

    ``parts`` are the arrays, each with the view of a whole ``[..., D_in, D_out]`` that it fills.
    """
    from eagle3_jax.models.quantised import Fp8Kernel, Int8Kernel

    kind = kept_as([part for _, part in parts])
    if not kind:
        return None
    *stack, inputs, outputs = shape
    block = parts[0][1].block or inputs
    if kind == "fp8":  # FP8 kernels are stored transposed
        values = np.empty((*stack, outputs, inputs), E4M3)
        kernel = values.swapaxes(-1, -2)
    else:
        values = np.empty((*stack, inputs, outputs), np.int8)
        kernel = values
    scale = np.empty((*stack, -(-inputs // block), outputs), np.float32)
    for place, part in parts:
        stored, scales = part.parts()
        of_values = place(kernel)
        of_scale = place(scale)
        of_values[...] = stored.reshape(of_values.shape)
        # The two differ in the axis of inputs alone. The scale of a block is that of its first input.
        firsts = tuple(
            slice(None, None, None if n == m else block) for n, m in zip(of_values.shape, of_scale.shape, strict=True)
        )
        of_scale[...] = scales.reshape(of_values.shape)[firsts]
    if kind == "int8":
        return Int8Kernel(values=values, scale=scale[..., 0, :])
    return Fp8Kernel(values=values, scale=scale, block=block)
