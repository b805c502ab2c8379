"""Arrays that are computed from quantised tensors at every read: memory never holds all of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np

if TYPE_CHECKING:
    from eagle3_jax.models.quantised import QuantisedKernel

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
INT4 = np.dtype(ml_dtypes.int4)


class Parts(NamedTuple):
    """What ``(values - zero) · scale`` is computed from."""

    values: np.ndarray  #: The stored values; integers of four bits are in int8.
    scale: np.ndarray | None = None  #: The scale of each value; ``None`` for no scales.
    zero: np.ndarray | None = None  #: The zero point of each value; ``None`` for zeros.


# Returns arrays that broadcast to the shape of the values.
Read = Callable[[], tuple[np.ndarray, np.ndarray | None] | Parts]
View = Callable[[np.ndarray], np.ndarray]


class Shaped:
    """An array with a shape, which is computed at every read."""

    shape: tuple[int, ...]  #: Shape of the array.
    dtype: np.dtype  #: Type of its numbers.

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return self.size * self.dtype.itemsize

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


class Dequantised(Shaped):
    """``(values - zero) · scale`` in float32, exactly.

    Transposing, reshaping and cutting read nothing.

    Attributes:
        shape: Shape of the array.
        dtype: Type of the computed numbers. Default: float32.
        stored: Dtype of the values in the file.
        block: Number of inputs of a linear layer that share a scale; ``None`` for all inputs.
        computed: Always true, unlike for an array of the file.
    """

    computed = True

    def __init__(
        self,
        shape: Sequence[int],
        stored: Any,
        read: Read,
        *,
        block: int | None = None,
        dtype: Any = np.float32,
    ):
        """See the class; ``read`` returns values of shape ``shape``."""
        self._read_shape = tuple(shape)
        self._read = read
        self._views: tuple[View, ...] = ()
        self.stored = np.dtype(stored)
        self.block = block
        self.dtype = np.dtype(dtype)
        self.shape = self._read_shape

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Computes a new array."""
        parts = self.parts()
        dense = parts.values.astype(self.dtype)
        if parts.zero is not None:
            dense -= parts.zero
        if parts.scale is not None:
            dense *= parts.scale
        return dense.astype(dtype or self.dtype, copy=False)

    def parts(self) -> Parts:
        """Returns the stored values with the scale and the zero point of each."""
        values, scale, *zero = self._read()
        parts = Parts(values, scale, *zero)
        shape = parts.values.shape

        def per_value(part: np.ndarray | None) -> np.ndarray | None:
            return None if part is None else self._viewed(np.broadcast_to(part, shape))

        return Parts(self._viewed(parts.values), per_value(parts.scale), per_value(parts.zero))

    @property
    def kept_as(self) -> str:
        """The kind of kernel that keeps the stored values; empty for none.

        It is ``fp8``, ``int8`` or ``int4``.
        """
        if self.stored in (E4M3, INT4):
            return "fp8" if self.stored == E4M3 else "int4"
        return "int8" if self.stored == np.int8 and self.block is None else ""

    def stored_kernel(self) -> QuantisedKernel | None:
        """Returns a kernel ``[..., D_in, D_out]`` of the stored values and scales.

        Returns ``None`` for types that no kernel stores.
        """
        return stored_kernel([(_unchanged, self)], self.shape)

    @property
    def T(self) -> Dequantised:
        """The transposed array."""
        return self._view(lambda array: array.T)

    def reshape(self, *shape: Any) -> Dequantised:
        """Reshapes the array."""
        return self._view(lambda array: array.reshape(*shape))

    def swapaxes(self, first: int, second: int) -> Dequantised:
        """Exchanges two axes."""
        return self._view(lambda array: array.swapaxes(first, second))

    def __getitem__(self, index: Any) -> Dequantised:
        """Returns a part of the array."""
        return self._view(lambda array: array[index])

    def _view(self, view: View) -> Dequantised:
        viewed = copy.copy(self)
        viewed._views = (*self._views, view)
        # A broadcast number has the shape and takes no memory.
        placeholder = np.broadcast_to(np.float32(0), self._read_shape)
        viewed.shape = viewed._viewed(placeholder).shape
        return viewed

    def _viewed(self, array: np.ndarray) -> np.ndarray:
        for view in self._views:
            array = view(array)
        return array


def _unchanged(array: np.ndarray) -> np.ndarray:
    return array


def kept_as(parts: Sequence[Any]) -> str:
    """Returns the kind of kernel that keeps the stored values of several arrays.

    It is empty if their types or blocks differ.
    """
    kinds = {getattr(part, "kept_as", "") for part in parts}
    blocks = {getattr(part, "block", None) for part in parts}
    return kinds.pop() if len(kinds) == len(blocks) == 1 else ""


def stored_kernel(
    parts: Sequence[tuple[View, Any]], shape: Sequence[int]
) -> QuantisedKernel | None:
    """Returns the kernel that several arrays fill, bit for bit; ``None`` if no kernel can.

    Args:
        parts: The arrays. The function next to each returns the view of a kernel ``[..., D_in,
            D_out]`` that it fills.
        shape: Shape of the kernel.
    """
    from eagle3_jax.models.quantised import Fp8Kernel, Int4Kernel, Int8Kernel

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
    zero = np.zeros(scale.shape, np.int8)

    for view, part in parts:
        stored = part.parts()
        value_view = view(kernel)
        scale_view = view(scale)
        value_view[...] = stored.values.reshape(value_view.shape)

        # The two views differ in the axis of inputs alone. The scale of a block is that of its
        # first input.
        sizes = zip(value_view.shape, scale_view.shape, strict=True)
        steps = [None if num_values == num_scales else block for num_values, num_scales in sizes]
        first_inputs = tuple(slice(None, None, step) for step in steps)
        scale_view[...] = stored.scale.reshape(value_view.shape)[first_inputs]
        if stored.zero is not None:
            view(zero)[...] = stored.zero.reshape(value_view.shape)[first_inputs]

    if kind == "int8":
        return Int8Kernel(values=values, scale=scale[..., 0, :])
    if kind == "int4":
        return Int4Kernel.packed(values, scale, zero, block)
    return Fp8Kernel(values=values, scale=scale, block=block)
