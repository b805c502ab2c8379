"""Weights in eight bits: FP8 and int8 kernels with their scales, how they are made, and their products."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Int
from scipy.linalg import hadamard

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of E4M3; whatever is larger becomes NaN in a cast and not this
FP8_BYTES_PER_WEIGHT = 1  # beside 4 bytes for every output channel, or for every block of inputs of one

INT8_LARGEST = 127.0  # the scale is symmetric, so -128 is not used

WEIGHTS = ("dense", "fp8", "fp8-dynamic", "int8")
# Values of a parameter's metadata ``product``: whether products read it, and as which matrix. FP8 is for layers only;
# the output matrix is small compared with them, and rounding it rounds the distribution itself.
LAYER = "layer"
OUTPUT = "output"


class EightBitKernel(struct.PyTreeNode, kw_only=True):
    """Values in eight bits and their scales, in the layouts of the two kinds of kernels."""

    values: Any  #: The rounded matrix, or a stack of them.
    scale: Any  #: Scales in float32.

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, or of the stack."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (self.values, self.scale))

    def __getitem__(self, index: Any) -> EightBitKernel:
        """Some kernels of a stack; ``...`` for all of it."""
        return dataclasses.replace(self, values=self.values[index], scale=self.scale[index])


class Fp8Kernel(EightBitKernel, kw_only=True):
    """A kernel ``W[..., i, o] = values[..., o, i] · scale[..., i // block, o]``, or a stack of them.

    The values lie transposed: NVIDIA's FP8 products contract the last axes of both operands, and CPUs read them faster.
    """

    values: Any  #: ``[..., D_out, D_in]`` in E4M3.
    scale: Any  #: ``[..., G, D_out]`` in float32; one group ``G`` where every output has a single scale.
    block: int = struct.field(pytree_node=False)  #: Inputs that share a scale.
    #: Whether products quantise the activations too, each row of them by its own largest value.
    dynamic: bool = struct.field(pytree_node=False, default=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernel, ``[..., D_in, D_out]``."""
        *stack, outputs, inputs = self.values.shape
        return (*stack, inputs, outputs)

    @property
    def per_channel(self) -> bool:
        """Whether an output has one scale, which may be multiplied behind the product."""
        return self.scale.shape[-2] == 1

    def unscaled(self, dtype: DTypeLike) -> Float[Array, "... D_in D_out"]:
        """The values alone, as a kernel lies."""
        return jnp.swapaxes(self.values, -1, -2).astype(dtype)

    def dense(self, dtype: DTypeLike) -> Float[Array, "... D_in D_out"]:
        """The kernel that it stands for: multiplied in float32, then rounded."""
        *stack, groups, outputs = self.scale.shape
        each = jnp.broadcast_to(self.scale[..., None, :], (*stack, groups, self.block, outputs))
        scale = each.reshape(*stack, groups * self.block, outputs)[..., : self.shape[-2], :]
        return (self.unscaled(jnp.float32) * scale).astype(dtype)

    def divided(self, sharding: NamedSharding) -> Fp8Kernel:
        """The shardings of both leaves, from that of the kernel: a scale lies where the values are that it belongs to.

        Devices hold all scales of an output whose inputs are divided within a block.
        """
        *stack, inputs, outputs = (*sharding.spec, *(None,) * (self.ndim - len(sharding.spec)))
        groups = self.scale.shape[-2]
        size = 1 if inputs is None else sharding.mesh.shape[inputs]
        aligned = groups % size == 0 and (self.shape[-2] // size) % self.block == 0
        return dataclasses.replace(
            self,
            values=NamedSharding(sharding.mesh, PartitionSpec(*stack, outputs, inputs)),
            scale=NamedSharding(sharding.mesh, PartitionSpec(*stack, inputs if aligned else None, outputs)),
        )


def quantise(kernel: Any, *, dynamic: bool = False) -> Fp8Kernel:
    """A kernel in FP8 on the host, ``s = max |W| / 448`` for every output; rounded to nearest, ties to even.

    Args:
        kernel: ``[..., D_in, D_out]``, of numpy or what becomes it.
        dynamic: See :class:`Fp8Kernel`.
    """
    weights = np.swapaxes(np.asarray(kernel), -1, -2).astype(np.float32)
    largest = np.abs(weights).max(axis=-1, keepdims=True)
    scale = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    values = np.clip(weights / scale, -LARGEST, LARGEST).astype(E4M3)
    return Fp8Kernel(values=values, scale=np.swapaxes(scale, -1, -2), block=weights.shape[-1], dynamic=dynamic)


def dynamic_product(x: Float[Array, "*rows D_in"], kernel: Fp8Kernel) -> Float[Array, "*rows D_out"]:
    """``x @ W`` in float32 with both operands in E4M3: a row of ``x``, or its inputs of a block, by its own scale.

    Both are given to the hardware as they are and the scales are multiplied behind it, so that a GPU with FP8 products
    uses one. The result is that of the rounded operands summed in float32.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    inputs = rows.shape[-1]
    groups = kernel.scale.shape[-2]
    values = kernel.values
    if groups == 1:
        out = _scaled(rows, values, kernel.scale[0])
    else:
        spare = ((0, 0), (0, groups * kernel.block - inputs))
        by_block = jnp.moveaxis(jnp.pad(rows, spare).reshape(-1, groups, kernel.block), 1, 0)
        of_block = jnp.moveaxis(jnp.pad(values, spare).reshape(-1, groups, kernel.block), 1, 0)
        # One block after the other: all at once would hold a sum of its own for each.
        zero = jnp.zeros((rows.shape[0], values.shape[0]), jnp.float32)
        out, _ = lax.scan(lambda sum, one: (sum + _scaled(*one), None), zero, (by_block, of_block, kernel.scale))
    return out.reshape(*x.shape[:-1], -1)


def _scaled(rows: Float[Array, "T D"], values: Array, scale: Float[Array, " D_out"]) -> Float[Array, "T D_out"]:
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    of_row = jnp.where(largest > 0, largest / LARGEST, 1.0)
    quantised = jnp.clip(rows / of_row, -LARGEST, LARGEST).astype(E4M3)
    # HIGHEST keeps tensor cores from summing in fewer bits than float32 has.
    sums = lax.dot_general(
        quantised, values, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )
    return sums * of_row * scale


class Int8Kernel(EightBitKernel, kw_only=True):
    """A kernel ``H W[..., i, o] = values[..., i, o] · scale[..., o]``, a stack of them, or a table of embeddings.

    Products quantise the activations too, each row by its own largest value (W8A8). A few activations are far larger
    than the others and would take the precision of their row, so both factors are rotated first: ``x W = (x H)(H W)``
    for a symmetric orthogonal ``H``, blocks of a Hadamard matrix (QuaRot, arXiv 2404.00456). The sums are integers.
    """

    values: Any  #: ``[..., D_in, D_out]`` in int8; of a table ``[V, D]``.
    scale: Any  #: ``[..., D_out]`` in float32; of a table ``[V]``.
    is_table: bool = struct.field(pytree_node=False, default=False)  #: Whether outputs are the first axis.
    rotation: int = struct.field(pytree_node=False, default=1)  #: Size of the blocks of ``H``; 1 for no rotation.

    dynamic: ClassVar[bool] = True  #: Products quantise the activations; see :class:`Fp8Kernel`.

    def rows(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Dequantised rows of a table, in float32."""
        return rotated(self.values[tokens].astype(jnp.float32) * self.scale[tokens][..., None], self.rotation)

    @property
    def T(self) -> Int8Kernel:
        """Transposed: a table becomes a kernel."""
        return dataclasses.replace(self, values=self.values.swapaxes(-1, -2), is_table=not self.is_table)

    def dense(self, dtype: DTypeLike) -> Float[Array, "... D_in D_out"]:
        """The dequantised matrix ``W``: computed in float32, then rounded to ``dtype``."""
        values = jnp.asarray(self.values)
        by_output = values if self.is_table else jnp.swapaxes(values, -1, -2)
        matrix = rotated(by_output.astype(jnp.float32) * self.scale[..., None], self.rotation)
        return (matrix if self.is_table else jnp.swapaxes(matrix, -1, -2)).astype(dtype)

    def divided(self, sharding: NamedSharding) -> Int8Kernel:
        """The shardings of both leaves, from that of the matrix: scales are divided as outputs are."""
        *stack, first, last = (*sharding.spec, *(None,) * (self.ndim - len(sharding.spec)))
        outputs = first if self.is_table else last
        return dataclasses.replace(
            self,
            values=NamedSharding(sharding.mesh, PartitionSpec(*stack, first, last)),
            scale=NamedSharding(sharding.mesh, PartitionSpec(*stack, outputs)),
        )


def quantise_int8(kernel: Any, *, is_table: bool = False) -> Int8Kernel:
    """A matrix in int8 on the default device, ``s = max |H W| / 127`` for each output; nearest, ties to even.

    Args:
        kernel: ``[..., D_in, D_out]`` or a table ``[V, D]``: an array of numpy, or an object that becomes one.
        is_table: Whether outputs are the first axis.
    """
    return _quantise_int8(np.asarray(kernel).astype(np.float32, copy=False), is_table)


@functools.partial(jax.jit, static_argnames="is_table")  # numpy takes ten times as long
def _quantise_int8(weights: Any, is_table: bool) -> Int8Kernel:
    by_output = weights if is_table else jnp.swapaxes(weights, -1, -2)
    rotation = _rotation_size(by_output.shape[-1])
    by_output = rotated(by_output, rotation)
    largest = jnp.max(jnp.abs(by_output), axis=-1)
    scale = jnp.where(largest > 0, largest / INT8_LARGEST, 1.0)
    values = jnp.round(by_output / scale[..., None]).astype(jnp.int8)
    values = values if is_table else jnp.swapaxes(values, -1, -2)
    return Int8Kernel(values=values, scale=scale, is_table=is_table, rotation=rotation)


def _rotation_size(inputs: int) -> int:
    """The largest power of two that divides the inputs, at most 64."""
    return math.gcd(inputs, 64)


def rotated(x: Float[Array, "*rows D"], size: int) -> Float[Array, "*rows D"]:
    """``x H`` over the last axis, where ``H`` has blocks of a Hadamard matrix of this size, divided by its root.

    ``H`` is its own inverse.
    """
    if size == 1:
        return x
    block = (hadamard(size) / math.sqrt(size)).astype(np.float32)
    return jnp.matmul(x.reshape(-1, size), block, precision=lax.Precision.HIGHEST).reshape(x.shape)


def int8_product(x: Float[Array, "*rows D_in"], kernel: Int8Kernel) -> Float[Array, "*rows D_out"]:
    """``x @ W`` in float32 with both factors in int8; sums in int32.

    A row of ``x H`` is divided by a 127th of its largest magnitude and rounded to nearest.
    """
    rows = rotated(x.reshape(-1, x.shape[-1]).astype(jnp.float32), kernel.rotation)
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    of_row = jnp.where(largest > 0, largest / INT8_LARGEST, 1.0)
    quantised_rows = jnp.round(rows / of_row).astype(jnp.int8)
    contracted = 1 if kernel.is_table else 0

    def sums_of(rows: Array, values: Array) -> Array:
        return lax.dot_general(rows, values, (((1,), (contracted,)), ((), ())), preferred_element_type=jnp.int32)

    def in_a_pair(rows: Array, values: Array) -> Array:
        return sums_of(jnp.concatenate([rows, rows]), values)[:1]

    # XLA's CPU backend multiplies a single row of int8 fifteen times slower than two (measured: 45 ms and 3 ms for an
    # output matrix of 49,152 by 576).
    cpu = in_a_pair if len(rows) == 1 else sums_of
    sums = lax.platform_dependent(quantised_rows, kernel.values, cpu=cpu, default=sums_of)
    out = sums.astype(jnp.float32) * of_row * kernel.scale
    return out.reshape(*x.shape[:-1], -1)


@dataclasses.dataclass(frozen=True, eq=False)
class ToQuantise:
    """A parameter that becomes a kernel in eight bits when it is put on the device.

    So the host never holds all kernels.
    """

    #: The array, or an object that becomes one. With ``kept_as`` of the same kind, ``stored_kernel()`` is the kernel.
    source: Any
    weights: str  #: One of :data:`WEIGHTS`, except ``dense``.
    is_table: bool = False  #: See :class:`Int8Kernel`.

    def kernel(self) -> Fp8Kernel | Int8Kernel:
        """The kernel, on the host."""
        dynamic = self.weights == "fp8-dynamic"
        if self.weights.startswith(getattr(self.source, "kept_as", "") or "none"):
            stored = self.source.stored_kernel()
            return stored.replace(dynamic=True) if dynamic else stored
        if self.weights == "int8":
            return quantise_int8(self.source, is_table=self.is_table)
        return quantise(self.source, dynamic=dynamic)


def weights_named(name: str) -> str:
    """The same name.

    Raises:
        ValueError: There are no weights of that name.
    """
    if name not in WEIGHTS:
        raise ValueError(f"weights {name!r} are not known; use one of {', '.join(WEIGHTS)}")
    return name


def quantised(params: Any, products: Any, weights: str) -> Any:
    """Parameters of which the kernels of products become eight-bit ones as they are put on the device.

    Args:
        params: Arrays of the host, nested.
        products: :data:`LAYER`, :data:`OUTPUT` or an empty text for each of them; in the same nesting
            (:meth:`eagle3_jax.models.decoder.DecoderTarget.param_products`).
        weights: One of :data:`WEIGHTS`.

    Raises:
        ValueError: There are no weights of that name.
    """
    if weights_named(weights) == "dense":
        return params

    def convert(path: tuple[Any, ...], leaf: Any, product: str) -> Any:
        if not is_quantised(product, weights):
            return leaf
        return ToQuantise(leaf, weights, is_table=is_table(path))

    return jax.tree_util.tree_map_with_path(convert, params, products)


def is_quantised(product: str, weights: str) -> bool:
    """Whether ``weights`` stores a parameter in eight bits; ``product`` is :data:`LAYER`, :data:`OUTPUT` or empty."""
    return product == LAYER or (product == OUTPUT and weights == "int8")


def is_table(path: tuple[Any, ...]) -> bool:
    """Whether a path of ``jax.tree_util`` leads to a table of embeddings, whose outputs are its first axis."""
    return getattr(path[-1], "key", None) == "embedding"


def eight_bit_shapes(shapes: Any, products: Any, weights: str) -> Any:
    """``jax.ShapeDtypeStruct`` of the same parameters in eight bits, with one scale for each output.

    Args:
        shapes: Of every parameter, nested.
        products: As for :func:`quantised`.
        weights: One of :data:`WEIGHTS`, except ``dense``.
    """

    def convert(path: tuple[Any, ...], leaf: Any, product: str) -> Any:
        if not is_quantised(product, weights):
            return leaf
        *stack, inputs, outputs = leaf.shape
        if weights == "int8":
            table = is_table(path)
            rows, columns = (inputs, outputs) if table else (outputs, inputs)
            return Int8Kernel(
                values=jax.ShapeDtypeStruct(leaf.shape, jnp.int8),
                scale=jax.ShapeDtypeStruct((*stack, rows), jnp.float32),
                is_table=table,
                rotation=_rotation_size(columns),
            )
        values = jax.ShapeDtypeStruct((*stack, outputs, inputs), E4M3)
        scale = jax.ShapeDtypeStruct((*stack, 1, outputs), jnp.float32)
        return Fp8Kernel(values=values, scale=scale, block=inputs, dynamic=weights == "fp8-dynamic")

    return jax.tree_util.tree_map_with_path(convert, shapes, products)
