"""Decodes quantised tensors to weights in float32: one function a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.quantised.arrays import E4M3, Dequantised

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FLOATS = ("float32", "bfloat16", "float16")
_EXPONENTS = ("uint8", "float8_e8m0fnu")


class Stored(NamedTuple):
    """A quantised tensor as it is stored."""

    name: str  #: Name of its values.
    values: np.ndarray  #: The values.
    scale_name: str  #: Name of its scales.
    scale: np.ndarray  #: The scales.
    tensors: Mapping[str, np.ndarray]  #: All tensors of the file.


class Scheme(NamedTuple):
    """How weights share scales."""

    #: The weights of a scale: ``tensor``, ``channel``, ``group`` (of inputs) or ``block`` (of
    #: both).
    strategy: str
    block: tuple[int, int] = (1, 1)  #: Outputs and inputs of a block; 1 and the inputs of a group.
    bits: int = 8  #: Bits of an integer.
    #: Whether scales are powers of two that may be stored as their exponents.
    exponents: bool = False


def scaled(stored: Stored, scheme: Scheme, dtype: Any) -> Dequantised:
    """Decodes values ``[..., out, in]`` as ``W = q · s``."""
    values = stored.values
    _check_type(stored.name, values, (str(np.dtype(dtype)),))
    if values.ndim < 2:
        raise CheckpointError(
            f"{stored.name} has shape {list(values.shape)}; only matrices are quantised"
        )
    scale = _scales(stored, scheme, values.shape)
    block = scheme.block[1] if scheme.strategy in ("group", "block") else None
    return Dequantised(values.shape, values.dtype, lambda: (values, scale()), block=block)


def packed(stored: Stored, scheme: Scheme) -> Dequantised:
    """Decodes integers of a few bits as ``W = (u - half of the range) · s``.

    The lowest bits of a word come first.
    """
    words = stored.values
    per_word = 32 // scheme.bits
    stem = stored.name.removesuffix("_packed")
    _check_type(stored.name, words, ("int32",))

    # The last word of a row may have unused bits, so the words do not tell the number of inputs.
    shape = stored.tensors.get(f"{stem}_shape")
    if shape is None or shape.shape != (2,):
        raise CheckpointError(
            f"{stored.name} comes without {stem}_shape of two numbers; it says how much of it"
            " counts"
        )

    outputs, inputs = (int(size) for size in shape)
    _check_shape(stored.name, words, (outputs, -(-inputs // per_word)))
    scale = _scales(stored, scheme, (outputs, inputs))

    def read() -> tuple[np.ndarray, np.ndarray]:
        return _unpacked(words, scheme.bits)[:, :inputs], scale()

    return Dequantised((outputs, inputs), np.int16, read)


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the integers in words ``[out, in / (32 / bits)]``."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    mask = np.uint32(2**bits - 1)
    unsigned = (words.view(np.uint32)[..., None] >> shifts) & mask
    return unsigned.reshape(len(words), -1).astype(np.int16) - np.int16(2 ** (bits - 1))


def mxfp4(stored: Stored) -> Dequantised:
    """Decodes blocks of 32 inputs in four bits: ``[E, out, K/32, 16]`` to ``[E, in, out]``.

    The inputs of a block share an exponent.
    """
    blocks = stored.values
    exponents = stored.scale
    _check_type(stored.name, blocks, ("uint8",))
    _check_type(stored.scale_name, exponents, _EXPONENTS)
    if blocks.ndim != 4 or blocks.shape[-1] != 16:
        raise CheckpointError(
            f"{stored.name} has shape {list(blocks.shape)}; expected [experts, outputs, blocks, 16]"
        )
    _check_shape(stored.scale_name, exponents, blocks.shape[:-1])

    shape = (*blocks.shape[:2], blocks.shape[2] * 32)

    def read() -> tuple[np.ndarray, None]:
        return _mxfp4_weights(blocks, exponents).reshape(shape), None

    return Dequantised(shape, np.uint8, read).swapaxes(1, 2)


def _mxfp4_weights(blocks: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Returns the weights ``[E, out, K/32, 32]`` of blocks of pairs ``[E, out, K/32, 16]``."""
    weights = np.empty((*exponents.shape, 16, 2), np.float32)
    # Expert by expert, because intermediate results are large.
    for index, codes in enumerate(blocks):
        mantissas = np.stack([FP4[codes & 15], FP4[codes >> 4]], -1)
        weights[index] = mantissas * _numbers(exponents[index])[..., None, None]
    return weights


def fused_experts(stored: Stored) -> Dequantised:
    """Decodes stacked experts ``[E, in, out]`` in E4M3.

    Their scale is ``[E, 1, out]`` or ``[E, out, 1]``.
    """
    values = stored.values
    scale = stored.scale
    _check_type(stored.name, values, (str(E4M3),))
    _check_type(stored.scale_name, scale, _FLOATS)
    if values.ndim != 3:
        raise CheckpointError(
            f"{stored.name} has shape {list(values.shape)}; expected [experts, inputs, outputs]"
        )
    experts, _, outputs = values.shape
    _check_shape(stored.scale_name, scale, (experts, 1, outputs), (experts, outputs, 1))

    def read() -> tuple[np.ndarray, np.ndarray]:
        return values, _numbers(scale).reshape(experts, 1, outputs)

    return Dequantised(values.shape, values.dtype, read)


def _scales(stored: Stored, scheme: Scheme, shape: Sequence[int]) -> Callable[[], np.ndarray]:
    """Returns a function that computes the scales, as an array that broadcasts to the values."""
    scale = stored.scale
    _check_type(stored.scale_name, scale, (*_FLOATS, *_EXPONENTS) if scheme.exponents else _FLOATS)
    *stack, outputs, inputs = shape

    if scheme.strategy == "tensor":
        _check_shape(stored.scale_name, scale, (1,), (1,) * scale.ndim)
        return lambda: _numbers(scale).reshape((1,) * len(shape))

    if scheme.strategy == "channel":
        _check_shape(stored.scale_name, scale, (*stack, outputs, 1), (*stack, outputs))
        return lambda: _numbers(scale).reshape(*stack, outputs, 1)

    rows, columns = scheme.block
    _check_shape(stored.scale_name, scale, (*stack, -(-outputs // rows), -(-inputs // columns)))

    # The last block of an axis may be cut off.
    def per_value() -> np.ndarray:
        by_row = np.repeat(_numbers(scale), rows, -2)
        return np.repeat(by_row, columns, -1)[..., :outputs, :inputs]

    return per_value


def _numbers(scale: np.ndarray) -> np.ndarray:
    if str(scale.dtype) in _EXPONENTS:
        return scale.view(np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    return scale.astype(np.float32)


def _check_type(name: str, value: np.ndarray, expected: Sequence[str]) -> None:
    if str(value.dtype) not in expected:
        raise CheckpointError(
            f"{name} is stored as {value.dtype}; its quantisation asks for {' or '.join(expected)}"
        )


def _check_shape(name: str, value: np.ndarray, *allowed: tuple[int, ...]) -> None:
    if value.shape not in allowed:
        raise CheckpointError(
            f"{name} has shape {list(value.shape)}; its quantisation asks for {list(allowed[0])}"
        )
