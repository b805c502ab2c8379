"""Weights in eight bits: FP8 kernels with their scales, how they are made, and what one stands for."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, DTypeLike, Float

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0  # of E4M3; whatever is larger becomes NaN in a cast and not this
FP8_BYTES_PER_WEIGHT = 1  # beside 4 bytes for every output channel, or for every block of inputs of one

WEIGHTS = ("dense", "fp8", "fp8-dynamic")


class Fp8Kernel(struct.PyTreeNode, kw_only=True):
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
    def ndim(self) -> int:
        """Number of the kernel's axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (self.values, self.scale))

    @property
    def per_channel(self) -> bool:
        """Whether an output has one scale, which may be multiplied behind the product."""
        return self.scale.shape[-2] == 1

    def __getitem__(self, index: Any) -> Fp8Kernel:
        """Some kernels of a stack; ``...`` for all of it."""
        return dataclasses.replace(self, values=self.values[index], scale=self.scale[index])

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
        groups, size = self.scale.shape[-2], 1 if inputs is None else sharding.mesh.shape[inputs]
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
    inputs, groups = rows.shape[-1], kernel.scale.shape[-2]
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


@dataclasses.dataclass(frozen=True, eq=False)
class ToQuantise:
    """A parameter that becomes an FP8 kernel when it is put on the device, so that the host never holds all kernels."""

    source: Any  #: The array, or what becomes one. With a method ``fp8()`` it gives the values that a file has for it.
    dynamic: bool = False  #: See :class:`Fp8Kernel`.

    def kernel(self) -> Fp8Kernel:
        """On the host."""
        stored = self.source.fp8() if hasattr(self.source, "fp8") else None
        return quantise(self.source, dynamic=self.dynamic) if stored is None else stored.replace(dynamic=self.dynamic)


def weights_named(name: str) -> str:
    """The same name.

    Raises:
        ValueError: There are no weights of that name.
    """
    if name not in WEIGHTS:
        raise ValueError(f"weights {name!r} are not known; use one of {', '.join(WEIGHTS)}")
    return name


def quantised(params: Any, products: Any, weights: str) -> Any:
    """Parameters of which the kernels of products become FP8 ones as they are put on the device.

    Args:
        params: Arrays of the host, nested.
        products: Whether each of them is a kernel that may become one; in the same nesting
            (:meth:`eagle3_jax.models.decoder.DecoderTarget.param_products`).
        weights: One of :data:`WEIGHTS`.

    Raises:
        ValueError: There are no weights of that name.
    """
    if weights_named(weights) == "dense":
        return params
    dynamic = weights == "fp8-dynamic"
    return jax.tree.map(lambda leaf, product: ToQuantise(leaf, dynamic) if product else leaf, params, products)


def fp8_shapes(shapes: Any, products: Any, *, dynamic: bool = False) -> Any:
    """``jax.ShapeDtypeStruct`` of the same parameters with kernels in FP8, one scale for every output.

    Args:
        shapes: Of every parameter, nested.
        products: As for :func:`quantised`.
        dynamic: See :class:`Fp8Kernel`.
    """

    def of(leaf: Any, product: bool) -> Any:
        if not product:
            return leaf
        *stack, inputs, outputs = leaf.shape
        values = jax.ShapeDtypeStruct((*stack, outputs, inputs), E4M3)
        scale = jax.ShapeDtypeStruct((*stack, 1, outputs), jnp.float32)
        return Fp8Kernel(values=values, scale=scale, block=inputs, dynamic=dynamic)

    return jax.tree.map(of, shapes, products)
