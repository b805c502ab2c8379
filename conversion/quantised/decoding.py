"""Decodes quantised tensors to weights in float32: one function a layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.quantised.arrays import E4M3, INT4, Dequantised, Parts

FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FLOATS = ("float32", "bfloat16", "float16")
_EXPONENTS = ("uint8", "float8_e8m0fnu")
# The place of each output in a word of AWQ, counted in groups of four bits from the lowest.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


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
    symmetric: bool = True  #: Whether zero is stored as zero, without zero points.
    reordered: bool = False  #: Whether the file may name the group of every input.
    #: Whether scales are powers of two that may be stored as their exponents.
    exponents: bool = False


def scaled(stored: Stored, scheme: Scheme, dtype: Any) -> Dequantised:
    """Decodes values ``[..., out, in]`` as ``W = (q - z) · s``; ``z`` is 0 if symmetric."""
    values = stored.values
    _check_type(stored.name, values, (str(np.dtype(dtype)),))
    if values.ndim < 2:
        raise CheckpointError(
            f"{stored.name} has shape {list(values.shape)}; only matrices are quantised"
        )
    scale = _scales(stored, scheme, values.shape)
    block = scheme.block[1] if scheme.strategy in ("group", "block") else None
    if scheme.symmetric:
        return Dequantised(values.shape, values.dtype, lambda: (values, scale()), block=block)

    name = f"{stored.name}_zero_point"
    zero = _neighbour(stored, name)
    _check_type(name, zero, ("int8",))
    zeros = _spread(name, zero, scheme, values.shape)
    return Dequantised(values.shape, np.int16, lambda: Parts(values, scale(), zeros()), block=block)


def packed(stored: Stored, scheme: Scheme) -> Dequantised:
    """Decodes integers of a few bits as ``W = (u - z) · s``.

    The lowest bits of a word come first. ``z`` is half of the range if the weights are symmetric.
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
    block = scheme.block[1] if scheme.strategy == "group" else inputs
    groups = -(-inputs // block)
    _check_type(stored.scale_name, stored.scale, _FLOATS)
    sizes = {"tensor": ((1,), (1, 1)), "channel": ((outputs, 1), (outputs,))}
    _check_shape(stored.scale_name, stored.scale, *sizes.get(scheme.strategy, ((outputs, groups),)))

    zeros = None
    if not scheme.symmetric:
        zeros = _packed_zeros(stored, f"{stem}_zero_point", scheme, (outputs, groups))

    def read() -> Parts:
        scale = _numbers(stored.scale).reshape(-1, groups)
        values = _signed(_unpacked(words, scheme.bits)[:, :inputs], scheme.bits)
        zero = None if zeros is None else zeros()
        return Parts(values, np.broadcast_to(scale, (outputs, groups)), zero)

    order = stored.tensors.get(f"{stem}_g_idx") if scheme.reordered else None
    return _grouped((outputs, inputs), read, block, scheme.bits, f"{stem}_g_idx", order)


def _packed_zeros(
    stored: Stored, name: str, scheme: Scheme, shape: tuple[int, int]
) -> Callable[[], np.ndarray]:
    """Returns a function that reads zero points ``[out, G]``, which are packed by outputs."""
    zero = _neighbour(stored, name)
    outputs, groups = shape
    if scheme.strategy == "tensor":
        _check_type(name, zero, ("int8",))
        _check_shape(name, zero, (1,), (1, 1))
        return lambda: np.broadcast_to(zero.reshape(1, 1), shape)
    _check_type(name, zero, ("int32",))
    _check_shape(name, zero, (-(-outputs * scheme.bits // 32), groups))
    return lambda: _signed(_unpacked(zero.T, scheme.bits)[:, :outputs].T, scheme.bits)


def awq(stored: Stored, scheme: Scheme) -> Dequantised:
    """Decodes words ``[in, out/8]`` of AWQ as ``W = (u - z) · s``.

    The outputs in a word are in the order that AWQ's own product reads them.
    """
    words = stored.values
    stem = stored.name.removesuffix("qweight")
    outputs = stored.scale.shape[-1]
    inputs = len(words)
    block = scheme.block[1] or inputs
    groups = -(-inputs // block)
    zero = _neighbour(stored, f"{stem}qzeros")
    _check_words(stored, (inputs, outputs // 8))
    _check_groups(stored, (groups, outputs), zero, outputs // 8)

    def by_output(packed_words: np.ndarray) -> np.ndarray:
        integers = _unpacked(packed_words, 4).reshape(len(packed_words), -1, 8)
        return _signed(integers[..., _AWQ_PLACES].reshape(len(packed_words), -1), 4).T

    def read() -> Parts:
        return Parts(by_output(words), _numbers(stored.scale).T, by_output(zero))

    return _grouped((outputs, inputs), read, block, 4)


def gptq(stored: Stored, scheme: Scheme, *, adds_one: bool) -> Dequantised:
    """Decodes words ``[in · bits/32, out]`` of GPTQ as ``W = (u - z) · s``.

    Args:
        stored: The words. Next to them are zero points, and the group of every input.
        scheme: The number of bits and of inputs in a group.
        adds_one: Whether the file holds ``z - 1``, as its first format does.
    """
    bits = scheme.bits
    words = stored.values
    stem = stored.name.removesuffix("qweight")
    per_word = 32 // bits
    inputs = len(words) * per_word
    outputs = stored.scale.shape[-1]
    block = scheme.block[1] or inputs
    groups = -(-inputs // block)
    zero = _neighbour(stored, f"{stem}qzeros")
    _check_words(stored, (len(words), outputs))
    _check_groups(stored, (groups, outputs), zero, -(-outputs // per_word))

    # Writers subtract from words, not from zero points: what is borrowed comes from the neighbour.
    # So the addition is one of words too.
    ones = np.uint32((2**32 - 1) // (2**bits - 1) if adds_one else 0)

    def read() -> Parts:
        zeros = _unpacked(zero.view(np.uint32) + ones, bits)[:, :outputs].T
        values = _signed(_unpacked(np.ascontiguousarray(words.T), bits), bits)
        return Parts(values, _numbers(stored.scale).T, _signed(zeros, bits))

    order = stored.tensors.get(f"{stem}g_idx")
    return _grouped((outputs, inputs), read, block, bits, f"{stem}g_idx", order)


def _grouped(
    shape: tuple[int, int],
    read: Callable[[], Parts],
    block: int,
    bits: int,
    order_name: str = "",
    order: np.ndarray | None = None,
) -> Dequantised:
    """Returns weights ``[out, in]`` of scales and zero points ``[out, G]``.

    Args:
        shape: Numbers of outputs and inputs.
        read: Returns values, scales and zero points.
        block: Number of inputs in a group.
        bits: Bits of a value.
        order_name: Name of ``order``.
        order: ``[in]``, the group of every input. Default, or -1 throughout: in turns.
    """
    outputs, inputs = shape
    in_turns = np.arange(inputs, dtype=np.int32) // block
    groups = -(-inputs // block)
    group = in_turns
    if order is not None:
        _check_type(order_name, order, ("int32", "int64"))
        _check_shape(order_name, order, (inputs,))
        if not (order == -1).all():
            group = order
    if group.min(initial=0) < 0 or group.max(initial=0) >= groups:
        raise CheckpointError(f"{order_name} names groups beyond the {groups} that have scales")

    def per_value() -> Parts:
        values, scale, zero = read()
        return Parts(values, *(None if part is None else part[:, group] for part in (scale, zero)))

    # A kernel in four bits has equal groups of neighbouring inputs.
    is_even = inputs % block == block % 2 == 0 and np.array_equal(group, in_turns)
    stored = INT4 if bits == 4 and is_even else np.int16
    return Dequantised((outputs, inputs), stored, per_value, block=block)


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the unsigned integers in words ``[rows, n]``, ``[rows, n · 32/bits]``."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    mask = np.uint32(2**bits - 1)
    unsigned = (words.view(np.uint32)[..., None] >> shifts) & mask
    return unsigned.astype(np.uint8).reshape(len(words), -1)


def _signed(unsigned: np.ndarray, bits: int) -> np.ndarray:
    """Subtracts half of the range."""
    return (unsigned.astype(np.int16) - np.int16(2 ** (bits - 1))).astype(np.int8)


def _neighbour(stored: Stored, name: str) -> np.ndarray:
    value = stored.tensors.get(name)
    if value is None:
        raise CheckpointError(f"{stored.name} comes without {name}; fetch the files again")
    return value


def _check_words(stored: Stored, shape: tuple[int, int]) -> None:
    _check_type(stored.name, stored.values, ("int32",))
    _check_shape(stored.name, stored.values, shape)


def _check_groups(stored: Stored, shape: tuple[int, int], zero: np.ndarray, num_words: int) -> None:
    """Checks scales ``[G, out]`` and words of zero points ``[G, n]``."""
    name = stored.name.removesuffix("qweight") + "qzeros"
    _check_type(stored.scale_name, stored.scale, _FLOATS)
    _check_shape(stored.scale_name, stored.scale, shape)
    _check_type(name, zero, ("int32",))
    _check_shape(name, zero, (shape[0], num_words))


def nvfp4(stored: Stored, scheme: Scheme, *, suffix: str, divides: bool) -> Dequantised:
    """Decodes pairs of FP4 ``[..., out, in/2]`` as ``W = v · (s · g)``, the first in the low half.

    Args:
        stored: The pairs, and the scales of their blocks in E4M3.
        scheme: The number of inputs in a block.
        suffix: Ending of the name of ``g``, a number in float32, in place of that of the scales.
        divides: Whether the file holds ``1 / g``.
    """
    pairs = stored.values
    _check_type(stored.name, pairs, ("uint8",))
    _check_type(stored.scale_name, stored.scale, (str(E4M3),))
    if pairs.ndim < 2:
        raise CheckpointError(f"{stored.name} has shape {list(pairs.shape)}; expected a matrix")
    name = stored.name.rpartition(".")[0] + suffix
    factor = _neighbour(stored, name)
    _check_type(name, factor, ("float32",))
    _check_shape(name, factor, (1,), ())

    shape = (*pairs.shape[:-1], 2 * pairs.shape[-1])
    block = scheme.block[1]
    _check_shape(stored.scale_name, stored.scale, (*shape[:-1], -(-shape[-1] // block)))

    def read() -> tuple[np.ndarray, np.ndarray]:
        values = np.stack([FP4[pairs & 15], FP4[pairs >> 4]], -1).reshape(shape)
        scale = stored.scale.astype(np.float32)
        scale = scale / factor.reshape(()) if divides else scale * factor.reshape(())
        return values, np.repeat(scale, block, -1)[..., : shape[-1]]

    return Dequantised(shape, np.uint8, read, block=block)


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
    types = (*_FLOATS, *_EXPONENTS) if scheme.exponents else _FLOATS
    _check_type(stored.scale_name, stored.scale, types)
    return _spread(stored.scale_name, stored.scale, scheme, shape)


def _spread(
    name: str, scale: np.ndarray, scheme: Scheme, shape: Sequence[int]
) -> Callable[[], np.ndarray]:
    """Returns a function that computes scales or zero points of values of some shape."""
    *stack, outputs, inputs = shape

    if scheme.strategy == "tensor":
        _check_shape(name, scale, (1,), (1,) * scale.ndim)
        return lambda: _numbers(scale).reshape((1,) * len(shape))

    if scheme.strategy == "channel":
        _check_shape(name, scale, (*stack, outputs, 1), (*stack, outputs))
        return lambda: _numbers(scale).reshape(*stack, outputs, 1)

    rows, columns = scheme.block
    _check_shape(name, scale, (*stack, -(-outputs // rows), -(-inputs // columns)))

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
