"""Weights in few bits: FP8, int8 and int4 kernels with scales, their quantisation, and products."""

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

E4M3 = jnp.float8_e4m3fn
# A cast to E4M3 turns larger numbers into NaN.
LARGEST = 448.0

# The scale is symmetric, so -128 is not used.
INT8_LARGEST = 127.0

# Inputs that share a scale in most published files of four bits.
INT4_BLOCK = 128

WEIGHTS = ("dense", "fp8", "fp8-dynamic", "int8", "int4")
# Values of a parameter's metadata ``product``: the kind of matrix that it is in products; empty if
# it is in none. FP8 is for layers only: the output matrix is small compared with them, and its
# rounding rounds the distribution itself.
LAYER = "layer"
OUTPUT = "output"


class QuantisedKernel(struct.PyTreeNode, kw_only=True):
    """A matrix of values in eight or four bits with scales, or a stack of such matrices.

    The subclasses define the layouts.
    """

    values: Any  #: The rounded values.
    scale: Any  #: Scales in float32.

    def divided(self, sharding: NamedSharding) -> QuantisedKernel:
        """Returns the shardings of all leaves for a sharding of the matrix."""
        raise NotImplementedError

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
        return sum(map(stored_bytes, jax.tree.leaves(self)))

    def __getitem__(self, index: Any) -> QuantisedKernel:
        """Returns some kernels of a stack; ``...`` returns all of them."""
        return jax.tree.map(lambda leaf: leaf[index], self)


def stored_bytes(leaf: Any) -> int:
    """Counts the bytes of an array on an accelerator, where two values of int4 take one."""
    size = math.prod(leaf.shape)
    return size // 2 if leaf.dtype == jnp.int4 else size * leaf.dtype.itemsize


class GroupedKernel(QuantisedKernel, kw_only=True):
    """A kernel ``W[..., i, o] = (v[..., i, o] - z[..., g, o]) · scale[..., g, o]``, or a stack.

    Group ``g`` is ``i // block``. Without zero points ``z`` is 0.
    """

    scale: Any  #: ``[..., G, D_out]`` in float32; ``G`` is 1 if every output has a single scale.
    block: int = struct.field(pytree_node=False)  #: Number of inputs that share a scale.

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel, ``[..., D_in, D_out]``."""
        *stack, outputs, inputs = self.values.shape
        return (*stack, inputs, outputs)

    @property
    def per_channel(self) -> bool:
        """Whether every output has a single scale, which can be applied after the product."""
        return self.scale.shape[-2] == 1

    def unscaled(self, dtype: DTypeLike) -> Float[Array, "... D_in D_out"]:
        """Returns ``v - z`` in the shape of the kernel."""
        return jnp.swapaxes(self.values, -1, -2).astype(dtype)

    def dense(self, dtype: DTypeLike) -> Float[Array, "... D_in D_out"]:
        """Returns the dequantised kernel: computed in float32, then rounded to ``dtype``."""
        scale = self._by_input(self.scale)
        return (self.unscaled(jnp.float32) * scale).astype(dtype)

    def divided(self, sharding: NamedSharding) -> GroupedKernel:
        """Returns the shardings of all leaves for a sharding of the kernel.

        A scale is on the devices of its values. If the sharding divides a block of inputs, every
        device has all scales.
        """
        *stack, inputs, outputs = _full_spec(sharding, self.ndim)
        groups = self.scale.shape[-2]
        size = 1 if inputs is None else sharding.mesh.shape[inputs]
        aligned = groups % size == 0 and (self.shape[-2] // size) % self.block == 0

        of_groups = NamedSharding(
            sharding.mesh, PartitionSpec(*stack, inputs if aligned else None, outputs)
        )
        shardings: GroupedKernel = jax.tree.map(lambda _: of_groups, self)
        spec = self._values_spec(stack, inputs, outputs, aligned)
        return dataclasses.replace(shardings, values=NamedSharding(sharding.mesh, spec))

    def _values_spec(
        self, stack: list[Any], inputs: Any, outputs: Any, aligned: bool
    ) -> PartitionSpec:
        return PartitionSpec(*stack, outputs, inputs)

    def _by_input(self, numbers: Any) -> Array:
        """Returns the number of every value, from one for each group and output."""
        *stack, groups, outputs = numbers.shape
        by_input = jnp.broadcast_to(numbers[..., None, :], (*stack, groups, self.block, outputs))
        # The last block may have fewer inputs.
        return by_input.reshape(*stack, groups * self.block, outputs)[..., : self.shape[-2], :]


class Fp8Kernel(GroupedKernel, kw_only=True):
    """A kernel ``W[..., i, o] = values[..., o, i] · scale[..., i // block, o]``, or a stack.

    The values are stored transposed: NVIDIA's FP8 products contract the last axes of both operands,
    and CPUs read them faster.
    """

    values: Any  #: ``[..., D_out, D_in]`` in E4M3.
    #: Whether products quantise the activations too, each row with a scale from its largest value.
    dynamic: bool = struct.field(pytree_node=False, default=False)


def quantise(kernel: Any, *, dynamic: bool = False) -> Fp8Kernel:
    """Quantises a kernel to FP8 on the host.

    The scale of an output is ``max |W| / 448``. Values are rounded to nearest, ties to even.

    Args:
        kernel: ``[..., D_in, D_out]``: a numpy array, or an object that ``np.asarray`` converts.
        dynamic: See :class:`Fp8Kernel`.
    """
    weights = np.swapaxes(np.asarray(kernel), -1, -2).astype(np.float32)
    largest = np.abs(weights).max(axis=-1, keepdims=True)
    # An output of zeros may have any scale but zero.
    scale = np.where(largest > 0, largest / np.float32(LARGEST), np.float32(1)).astype(np.float32)
    values = np.clip(weights / scale, -LARGEST, LARGEST).astype(E4M3)
    return Fp8Kernel(
        values=values, scale=np.swapaxes(scale, -1, -2), block=weights.shape[-1], dynamic=dynamic
    )


def dynamic_product(
    x: Float[Array, "*rows D_in"], kernel: Fp8Kernel
) -> Float[Array, "*rows D_out"]:
    """Returns ``x @ W`` in float32, with both operands in E4M3.

    Every row of ``x`` has its own scale. If the kernel has scales for blocks of inputs, so has
    every row. The operands of the product are in E4M3 and the scales are applied after it, so GPUs
    with FP8 products use them. The result is the float32 sum over rounded operands.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    inputs = rows.shape[-1]
    groups = kernel.scale.shape[-2]
    values = kernel.values
    if groups == 1:
        out = _scaled_product(rows, values, kernel.scale[0])
        return out.reshape(*x.shape[:-1], -1)

    # Block after block: computing all at once would need memory for the sums of every block.
    def add(total: Array, block: tuple[Array, Array, Array]) -> tuple[Array, None]:
        return total + _scaled_product(*block), None

    spare = ((0, 0), (0, groups * kernel.block - inputs))
    by_block = jnp.moveaxis(jnp.pad(rows, spare).reshape(-1, groups, kernel.block), 1, 0)
    of_block = jnp.moveaxis(jnp.pad(values, spare).reshape(-1, groups, kernel.block), 1, 0)
    zeros = jnp.zeros((rows.shape[0], values.shape[0]), jnp.float32)
    out, _ = lax.scan(add, zeros, (by_block, of_block, kernel.scale))
    return out.reshape(*x.shape[:-1], -1)


def _scaled_product(
    rows: Float[Array, "T D"], values: Array, scale: Float[Array, " D_out"]
) -> Float[Array, "T D_out"]:
    """Returns ``rows @ (scale · values)ᵀ`` with the rows quantised."""
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    row_scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    quantised_rows = jnp.clip(rows / row_scale, -LARGEST, LARGEST).astype(E4M3)
    # HIGHEST makes tensor cores sum in float32 instead of fewer bits.
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    sums = lax.dot_general(quantised_rows, values, (((1,), (1,)), ((), ())), **options)
    return sums * row_scale * scale[None]


def _full_spec(sharding: NamedSharding, ndim: int) -> tuple[Any, ...]:
    """Returns the mesh axis of each of ``ndim`` array axes; ``None`` for an undivided one."""
    undivided = (None,) * (ndim - len(sharding.spec))
    return (*sharding.spec, *undivided)


class Int8Kernel(QuantisedKernel, kw_only=True):
    """A kernel ``H W[..., i, o] = values[..., i, o] · scale[..., o]``, a stack, or a table.

    A table has the embeddings of a vocabulary.

    Products quantise the activations too, each row with a scale from its largest value (W8A8). A
    few activations are far larger than the others, which would leave few bits for the rest of their
    row. So both factors are rotated first: ``x W = (x H)(H W)`` for a symmetric orthogonal ``H``,
    blocks of a Hadamard matrix (QuaRot, arXiv 2404.00456). The sums are integers.
    """

    values: Any  #: ``[..., D_in, D_out]`` in int8; ``[V, D]`` for a table.
    scale: Any  #: ``[..., D_out]`` in float32; ``[V]`` for a table.
    #: Whether outputs are the first axis.
    is_table: bool = struct.field(pytree_node=False, default=False)
    #: Size of the blocks of ``H``; 1 for no rotation.
    rotation: int = struct.field(pytree_node=False, default=1)

    dynamic: ClassVar[bool] = True  #: Products quantise the activations; see :class:`Fp8Kernel`.

    def rows(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Returns dequantised rows of a table, in float32."""
        scaled = self.values[tokens].astype(jnp.float32) * self.scale[tokens][..., None]
        # H is its own inverse.
        return rotated(scaled, self.rotation)

    @property
    def T(self) -> Int8Kernel:
        """The transposed matrix: of a table, the kernel."""
        return dataclasses.replace(
            self, values=self.values.swapaxes(-1, -2), is_table=not self.is_table
        )

    def dense(self, dtype: DTypeLike) -> Float[Array, "... D_in D_out"]:
        """Returns the dequantised matrix ``W``: computed in float32, then rounded to ``dtype``."""
        if not self.is_table:
            return jnp.swapaxes(self.T.dense(dtype), -1, -2)
        values = jnp.asarray(self.values).astype(jnp.float32)
        return rotated(values * self.scale[..., None], self.rotation).astype(dtype)

    def divided(self, sharding: NamedSharding) -> Int8Kernel:
        """Returns the shardings of both leaves for a sharding of the matrix.

        Scales are divided as outputs are.
        """
        *stack, first, last = _full_spec(sharding, self.ndim)
        outputs = first if self.is_table else last
        values = NamedSharding(sharding.mesh, PartitionSpec(*stack, first, last))
        scale = NamedSharding(sharding.mesh, PartitionSpec(*stack, outputs))
        return dataclasses.replace(self, values=values, scale=scale)


class Int4Kernel(GroupedKernel, kw_only=True):
    """A kernel of integers from -8 to 7 in groups of inputs, or a stack; see the base class.

    XLA's GPU backend multiplies by int4 without writing it in a wider type, in the layout of
    :class:`Fp8Kernel`. XLA's CPU backend takes a byte for a value of int4, so CPUs have pairs in a
    byte: the first half of a group in the low bits, plus 8, and the second half in the high bits.
    """

    values: Any  #: ``[..., D_out, D_in]`` in int4, or on CPUs ``[..., D_in / 2, D_out]`` in uint8.
    zero: Any = None  #: Zero points ``[..., G, D_out]`` in int8; ``None`` if all are 0.

    @classmethod
    def packed(
        cls, values: np.ndarray, scale: np.ndarray, zero: np.ndarray, block: int
    ) -> Int4Kernel:
        """Stores a kernel as the default device reads it.

        Args:
            values: ``[..., D_in, D_out]`` from -8 to 7. ``block`` divides ``D_in``.
            scale: ``[..., G, D_out]`` in float32.
            zero: ``[..., G, D_out]`` from -8 to 7.
            block: An even number of inputs.
        """
        fields = {"scale": scale, "zero": zero if zero.any() else None, "block": block}
        if jax.default_backend() != "cpu":
            return cls(values=np.swapaxes(values, -1, -2).astype(jnp.int4), **fields)

        *stack, inputs, outputs = values.shape
        halves = (values + 8).astype(np.uint8).reshape(*stack, -1, 2, block // 2, outputs)
        pairs = halves[..., 0, :, :] | (halves[..., 1, :, :] << 4)
        return cls(values=pairs.reshape(*stack, inputs // 2, outputs), **fields)

    @property
    def is_paired(self) -> bool:
        """Whether a byte holds two values."""
        return self.values.dtype == jnp.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel, ``[..., D_in, D_out]``."""
        if not self.is_paired:
            return super().shape
        *stack, pairs, outputs = self.values.shape
        return (*stack, 2 * pairs, outputs)

    def unscaled(self, dtype: DTypeLike) -> Float[Array, "... D_in D_out"]:
        """Returns ``v - z`` in the shape of the kernel."""
        if self.is_paired:
            *stack, _, outputs = self.values.shape
            groups = self.values.reshape(*stack, -1, self.block // 2, outputs)
            halves = jnp.concatenate([groups & 15, groups >> 4], -2)
            values = halves.reshape(self.shape).astype(jnp.int8) - 8
        else:
            values = jnp.swapaxes(self.values, -1, -2).astype(jnp.int8)
        if self.zero is not None:
            values -= self._by_input(self.zero)
        return values.astype(dtype)

    def _values_spec(
        self, stack: list[Any], inputs: Any, outputs: Any, aligned: bool
    ) -> PartitionSpec:
        if not self.is_paired:
            return super()._values_spec(stack, inputs, outputs, aligned)
        return PartitionSpec(*stack, inputs if aligned else None, outputs)


def int4_product(
    x: Float[Array, "*rows D_in"], kernel: Int4Kernel, operands: DTypeLike, precision: Any
) -> Float[Array, "*rows D_out"]:
    """Returns ``x @ W`` in float32: the sums of every group, times its scale.

    Values are exact in ``operands``, and XLA's GPU backend converts them inside the product. A
    kernel with scales it would first write to memory, in four times the bytes.

    Args:
        x: Activations.
        kernel: A kernel in int4, not in pairs.
        operands: Type of both factors.
        precision: ``precision`` of the product.
    """
    groups = kernel.scale.shape[-2]
    values = kernel.values.reshape(-1, groups, kernel.block)
    rows = x.reshape(-1, groups, kernel.block).astype(operands)
    sums = lax.dot_general(
        rows,
        values.astype(operands),
        (((2,), (2,)), ((1,), (1,))),
        preferred_element_type=jnp.float32,
        precision=precision,
    )
    if kernel.zero is not None:
        # Subtracted from the values, XLA would write their differences to memory.
        of_inputs = jnp.sum(rows.astype(jnp.float32), axis=-1)
        sums -= of_inputs.T[..., None] * kernel.zero.astype(jnp.float32)[:, None]
    return jnp.sum(sums * kernel.scale[:, None], axis=0).reshape(*x.shape[:-1], -1)


def quantise_int8(kernel: Any, *, is_table: bool = False) -> Int8Kernel:
    """Quantises a matrix to int8 on the default device.

    The scale of an output is ``max |H W| / 127``. Values are rounded to nearest, ties to even.

    Args:
        kernel: ``[..., D_in, D_out]`` or a table ``[V, D]``: a numpy array, or an object that
            ``np.asarray`` converts.
        is_table: Whether outputs are the first axis.
    """
    return _quantise_int8(np.asarray(kernel).astype(np.float32, copy=False), is_table)


# Compiled: numpy takes ten times as long.
@functools.partial(jax.jit, static_argnames="is_table")
def _quantise_int8(weights: Any, is_table: bool) -> Int8Kernel:
    by_output = weights if is_table else jnp.swapaxes(weights, -1, -2)
    # The largest power of two that divides the inputs, at most 64.
    rotation = math.gcd(by_output.shape[-1], 64)
    by_output = rotated(by_output, rotation)

    largest = jnp.max(jnp.abs(by_output), axis=-1)
    scale = jnp.where(largest > 0, largest / INT8_LARGEST, 1.0)
    values = jnp.round(by_output / scale[..., None]).astype(jnp.int8)
    values = values if is_table else jnp.swapaxes(values, -1, -2)
    return Int8Kernel(values=values, scale=scale, is_table=is_table, rotation=rotation)


def rotated(x: Float[Array, "*rows D"], size: int) -> Float[Array, "*rows D"]:
    """Returns ``x H`` over the last axis.

    ``H`` is block diagonal. Its blocks are the Hadamard matrix of ``size``, divided by ``√size``,
    so it is its own inverse. With ``size = 1`` it is the identity.
    """
    if size == 1:
        return x
    # Sylvester's construction. scipy has it too, and takes a tenth of a second to import.
    signs = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * (size.bit_length() - 1))
    block = (signs / math.sqrt(size)).astype(np.float32)
    return jnp.matmul(x.reshape(-1, size), block, precision=lax.Precision.HIGHEST).reshape(x.shape)


def int8_product(x: Float[Array, "*rows D_in"], kernel: Int8Kernel) -> Float[Array, "*rows D_out"]:
    """Returns ``x @ W`` in float32 with both factors in int8 and sums in int32.

    The scale of a row of ``x H`` is its largest magnitude divided by 127. Its values are rounded to
    nearest.
    """
    rows = rotated(x.reshape(-1, x.shape[-1]).astype(jnp.float32), kernel.rotation)
    largest = jnp.max(jnp.abs(rows), axis=-1, keepdims=True)
    row_scale = jnp.where(largest > 0, largest / INT8_LARGEST, 1.0)
    quantised_rows = jnp.round(rows / row_scale).astype(jnp.int8)

    axes = (((1,), (1 if kernel.is_table else 0,)), ((), ()))
    sums_of = functools.partial(
        lax.dot_general, dimension_numbers=axes, preferred_element_type=jnp.int32
    )

    def in_a_pair(rows: Array, values: Array) -> Array:
        return sums_of(jnp.concatenate([rows, rows]), values)[:1]

    # XLA's CPU backend multiplies a single row of int8 fifteen times slower than two (measured: 45
    # ms and 3 ms for an output matrix of 49,152 by 576). On NVIDIA GPUs a single row is a sum
    # outside tensor cores, and two are a product. Sums of integers are exact, so the bits are the
    # same.
    paired = in_a_pair if len(rows) == 1 else sums_of
    sums = lax.platform_dependent(
        quantised_rows, kernel.values, cpu=paired, cuda=paired, default=sums_of
    )

    out = sums.astype(jnp.float32) * row_scale * kernel.scale[None]
    return out.reshape(*x.shape[:-1], -1)


@dataclasses.dataclass(frozen=True, eq=False)
class ToQuantise:
    """A parameter that is quantised when it is put on the device.

    So the host never holds all kernels.
    """

    #: The array, or an object that ``np.asarray`` converts. If its ``kept_as`` names the same kind
    #: of kernel, its ``stored_kernel()`` is used.
    source: Any
    weights: str  #: One of :data:`WEIGHTS`, except ``dense``.
    is_table: bool = False  #: See :class:`Int8Kernel`.

    def kernel(self) -> QuantisedKernel:
        """Returns the kernel."""
        dynamic = self.weights == "fp8-dynamic"
        # A checkpoint that has the kernel in this form keeps its own values and scales.
        if self.weights.startswith(getattr(self.source, "kept_as", "") or "none"):
            stored = self.source.stored_kernel()
            return stored.replace(dynamic=True) if dynamic else stored
        if self.weights == "int8":
            return quantise_int8(self.source, is_table=self.is_table)
        return quantise(self.source, dynamic=dynamic)

    def kernel_shape(self) -> QuantisedKernel:
        """Returns the ``jax.ShapeDtypeStruct`` of a kernel.

        It has one scale for each output, in int4 one for each group of :data:`INT4_BLOCK` inputs.
        """
        if self.weights == "int8":
            quantise_source = functools.partial(_quantise_int8, is_table=self.is_table)
            return jax.eval_shape(quantise_source, self.source)

        *stack, inputs, outputs = self.source.shape
        if self.weights == "int4":
            block = inputs if inputs % INT4_BLOCK else INT4_BLOCK
            return Int4Kernel(
                values=jax.ShapeDtypeStruct((*stack, outputs, inputs), jnp.int4),
                scale=jax.ShapeDtypeStruct((*stack, inputs // block, outputs), jnp.float32),
                block=block,
            )
        values = jax.ShapeDtypeStruct((*stack, outputs, inputs), E4M3)
        scale = jax.ShapeDtypeStruct((*stack, 1, outputs), jnp.float32)
        return Fp8Kernel(
            values=values, scale=scale, block=inputs, dynamic=self.weights == "fp8-dynamic"
        )


def check_weights(weights: str) -> None:
    """Checks the name of a way to store kernels.

    Raises:
        ValueError: It is not in :data:`WEIGHTS`.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights {weights!r} are not known; use one of {', '.join(WEIGHTS)}")


def quantised(params: Any, products: Any, weights: str) -> Any:
    """Returns the parameters with kernels marked to be quantised when they are put on the device.

    Args:
        params: Arrays of the host, nested.
        products: :data:`LAYER`, :data:`OUTPUT` or an empty text for each parameter, in the same
            nesting (:meth:`eagle3_jax.models.decoder.DecoderTarget.param_products`).
        weights: One of :data:`WEIGHTS`.

    With ``int4``, only kernels that a file has in int4 are kept so; nothing is rounded to four
    bits.

    Raises:
        ValueError: ``weights`` is not in :data:`WEIGHTS`.
    """
    check_weights(weights)
    if weights == "dense":
        return params
    if weights == "int4":
        products = jax.tree.map(
            lambda leaf, product: product if getattr(leaf, "kept_as", "") == "int4" else "",
            params,
            products,
        )
    return _marked(params, products, weights)


def _marked(params: Any, products: Any, weights: str) -> Any:
    kinds = (LAYER, OUTPUT) if weights == "int8" else (LAYER,)

    def mark(path: tuple[Any, ...], leaf: Any, product: str) -> Any:
        is_table = getattr(path[-1], "key", None) == "embedding"
        return ToQuantise(leaf, weights, is_table) if product in kinds else leaf

    return jax.tree_util.tree_map_with_path(mark, params, products)


def quantised_shapes(shapes: Any, products: Any, weights: str) -> Any:
    """Returns the ``jax.ShapeDtypeStruct`` of parameters in eight or four bits.

    A kernel has the scales of :meth:`ToQuantise.kernel_shape`.

    Args:
        shapes: ``jax.ShapeDtypeStruct`` of every parameter, nested.
        products: As for :func:`quantised`.
        weights: One of :data:`WEIGHTS`, except ``dense``.
    """
    marked = _marked(shapes, products, weights)
    return jax.tree.map(
        lambda leaf: leaf.kernel_shape() if isinstance(leaf, ToQuantise) else leaf, marked
    )
