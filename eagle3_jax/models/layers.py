"""Layers of targets and draft heads: linear, norm, SwiGLU; matrix products under a precision."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, DTypeLike, Float, Int

from eagle3_jax.devices.kernels import ordered_sum
from eagle3_jax.devices.sharding import MLP, Axes, Axis, is_sliceable, put_array, put_shards
from eagle3_jax.models import invariant
from eagle3_jax.models.config import GatedMLP, NormKind
from eagle3_jax.models.quantised import (
    LAYER,
    Fp8Kernel,
    GroupedKernel,
    Int4Kernel,
    Int8Kernel,
    ToQuantise,
    dynamic_product,
    int4_product,
    int8_product,
)


@dataclasses.dataclass(frozen=True)
class Precision:
    """The types of matrix products and activations."""

    name: str  #: Name on the command line.
    operands: DTypeLike  #: Type of weights, and of activations as operands of a product.
    activations: DTypeLike  #: Type of sums in products, of the residual stream and of the caches.
    #: Whether the bits of a row depend on that row alone (``eagle3_jax.models.invariant``).
    invariant: bool = False


FLOAT32 = Precision("float32", jnp.float32, jnp.float32)
BFLOAT16 = Precision("bfloat16", jnp.bfloat16, jnp.bfloat16)
# Half the bytes of float32, with float32 accumulation. On CPUs with bfloat16 dot products a block
# of 2 to 16 rows costs about the same as one, so verification is nearly free there.
MIXED = Precision("mixed", jnp.bfloat16, jnp.float32)
PRECISIONS = {p.name: p for p in (FLOAT32, BFLOAT16, MIXED)}


# Names of parameters that stay float32. They are small, and decide which experts process a token
# and how fast a state decays.
IN_FLOAT32 = frozenset({"router", "correction", "a_log", "dt_bias"})


def stored_type(path: tuple[Any, ...], ndim: int, precision: Precision) -> DTypeLike:
    """Returns the type of a parameter on the device.

    Matrices have the type of ``operands``, vectors and norms that of ``activations``.

    Args:
        path: Keys in the nested dictionary of parameters, as from ``jax.tree_util``.
        ndim: Number of axes.
        precision: The types.
    """
    names = {getattr(entry, "key", None) for entry in path}
    if names & IN_FLOAT32:
        return jnp.float32
    is_matrix = ndim > 1 and "scale" not in names
    return precision.operands if is_matrix else precision.activations


def cast(params: Any, precision: Precision, shardings: Any = None) -> Any:
    """Puts arrays on the device, each in its :func:`stored_type`.

    On a CPU a thread per core copies them into their memory on the device. For other devices the
    host holds, besides memory-mapped files, at most two arrays at a time, and of a stack of experts
    a few.

    Args:
        params: Numpy arrays, or objects that ``np.asarray`` converts; for kernels to be stored in
            eight bits :class:`~eagle3_jax.models.quantised.ToQuantise`.
        precision: The types.
        shardings: A sharding per array. Default: the default device.
    """
    trees = (params,) if shardings is None else (params, shardings)
    on_cpu = jax.default_backend() == "cpu"
    # For other devices the next array is prepared while one is copied.
    num_threads = (os.cpu_count() or 1) if on_cpu else 2
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:

        def put(path: tuple[Any, ...], leaf: Any, sharding: NamedSharding | None = None) -> Any:
            if isinstance(leaf, ToQuantise):
                # Its intermediate results are larger than the kernel.
                return jax.block_until_ready(_put(path, leaf, precision, sharding))
            return threads.submit(_put, path, leaf, precision, sharding)

        arrays = jax.tree_util.tree_map_with_path(put, *trees)
        return jax.tree.map(
            lambda leaf: leaf.result() if _is_pending(leaf) else leaf, arrays, is_leaf=_is_pending
        )


def _is_pending(leaf: Any) -> bool:
    return isinstance(leaf, concurrent.futures.Future)


def _put(
    path: tuple[Any, ...], leaf: Any, precision: Precision, sharding: NamedSharding | None
) -> Any:
    """Puts a parameter on the device: an array in its stored type, or a kernel in eight bits."""
    if not isinstance(leaf, ToQuantise):
        dtype = stored_type(path, leaf.ndim, precision)
        if sharding is None:
            return jax.block_until_ready(put_array(leaf, dtype))
        host = leaf if is_sliceable(leaf) else np.asarray(leaf)
        return jax.block_until_ready(put_shards(host, dtype, sharding))

    kernel = leaf.kernel()
    if sharding is None:
        return jax.tree.map(jax.device_put, kernel)
    return jax.tree.map(
        lambda part, shards: put_shards(part, part.dtype, shards), kernel, kernel.divided(sharding)
    )


def matmul_precision(dtype: DTypeLike) -> lax.Precision | None:
    """Returns the ``precision`` argument of products: float32 keeps all bits (docs/design.md, 12).

    By default NVIDIA's tensor cores round them to TensorFloat-32 and TPUs to bfloat16. A precision
    set by the user (``jax_default_matmul_precision``) takes precedence.
    """
    user_precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    needs_highest = user_precision is None and jnp.dtype(dtype) == jnp.float32
    return lax.Precision.HIGHEST if needs_highest else None


def contract(
    x: Array, kernel: Array, dtype: DTypeLike, *, axes: tuple[int, int] = (-1, 0)
) -> Array:
    """Returns the product over one axis of each operand, with sums in ``dtype``."""
    over = ((axes[0] % x.ndim,), (axes[1],))
    precision = matmul_precision(x.dtype)
    return lax.dot_general(
        x, kernel, (over, ((), ())), preferred_element_type=dtype, precision=precision
    )


def _contract_as_two_rows(
    x: Array, kernel: Array, dtype: DTypeLike, *, axes: tuple[int, int]
) -> Array:
    """Returns the product of a single row with a kernel, computed for two equal rows."""
    pair = jnp.concatenate([x.reshape(1, -1)] * 2)
    out = contract(pair, kernel, dtype, axes=axes)
    return out[:1].reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _product(
    x: Array, kernel: Array, operands: DTypeLike, activations: DTypeLike, inputs: int = 0
) -> Array:
    """Returns the product over the last axis of ``x`` and axis ``inputs`` of the kernel."""
    x = x.astype(operands)
    kernel = kernel.astype(operands)
    options: dict[str, Any] = {"dtype": activations, "axes": (-1, inputs)}
    as_given = functools.partial(contract, **options)
    has_one_row = x.size <= x.shape[-1]
    if not has_one_row:
        return as_given(x, kernel)

    # XLA's CPU backend has no fast path for a single row with operands narrower than the sums
    # (measured: seven times slower than two rows); TPUs run it on the vector unit.
    as_two_rows = functools.partial(_contract_as_two_rows, **options)
    cpu = as_two_rows if operands != activations else as_given
    return lax.platform_dependent(x, kernel, cpu=cpu, tpu=as_two_rows, default=as_given)


def _product_fwd(x: Array, kernel: Array, operands: DTypeLike, activations: DTypeLike, inputs: int):
    return _product(x, kernel, operands, activations, inputs), (x, kernel)


def _product_bwd(
    operands: DTypeLike,
    activations: DTypeLike,
    inputs: int,
    saved: tuple[Array, Array],
    grad: Array,
) -> tuple[Array, Array]:
    # JAX's own rule multiplies a float32 cotangent with a bfloat16 operand, for which products are
    # slow.
    x, kernel = saved
    rows = x.reshape(-1, x.shape[-1]).astype(operands)
    grads = grad.reshape(-1, grad.shape[-1]).astype(operands)
    grad_x = contract(grads, kernel.astype(operands), activations, axes=(-1, 1 - inputs))

    # The gradient has the axes of the kernel: xᵀ g, or gᵀ x for a transposed kernel.
    factors = (rows, grads) if inputs == 0 else (grads, rows)
    grad_kernel = contract(*factors, activations, axes=(0, 0))
    return grad_x.reshape(x.shape).astype(x.dtype), grad_kernel.astype(kernel.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def product(
    x: Float[Array, "*rows D_in"],
    kernel: Float[Array, "D_in D_out"] | GroupedKernel | Int8Kernel,
    precision: Precision,
) -> Float[Array, "*rows D_out"]:
    """Multiplies with weights under a named precision.

    For an FP8 kernel with one scale per output, the scales are multiplied after the product, in
    float32. With scales for blocks of inputs, the kernel is first converted to the type of the
    operands. For an int8 kernel the operands of the precision do not matter: both factors are int8.
    For an int4 kernel on accelerators and few rows, the sums of every group are multiplied by its
    scale.
    """
    if isinstance(kernel, Int8Kernel):
        multiply = functools.partial(int8_product, kernel=kernel)
        if precision.invariant:
            out = invariant.in_tiles(multiply, x.reshape(-1, x.shape[-1]))
            return out.reshape(*x.shape[:-1], -1).astype(precision.activations)
        return multiply(x).astype(precision.activations)

    if not isinstance(kernel, GroupedKernel):
        if precision.invariant:
            return _invariant_product(x, kernel, precision)
        return _product(x, kernel, precision.operands, precision.activations)

    if isinstance(kernel, Fp8Kernel) and kernel.dynamic:
        out: Array = dynamic_product(x, kernel)
    elif isinstance(kernel, Int4Kernel) and _sums_are_small(x, kernel):
        options = matmul_precision(precision.operands)
        out = int4_product(x, kernel, precision.operands, options)
    elif isinstance(kernel, Fp8Kernel) and kernel.per_channel:
        out = _product(x, kernel.values.T, precision.operands, jnp.float32)
        out *= lax.broadcast_to_rank(kernel.scale[0], out.ndim)
    else:
        if isinstance(kernel, Int4Kernel):
            kernel = kernel.replace(values=_after(x, kernel.values))
        dense = kernel.dense(precision.operands)
        out = _product(x, dense, precision.operands, precision.activations)
    return out.astype(precision.activations)


def _after(x: Array, values: Array) -> Array:
    """Returns ``values``, as a result that XLA cannot compute before ``x``.

    Otherwise XLA dequantises the kernels of all layers first, and memory holds all of them. Its CPU
    backend drops barriers before it orders steps.
    """
    bits = lax.bitcast_convert_type(x.reshape(-1)[0].astype(jnp.float32), jnp.int32)
    # Always 0, which XLA does not see.
    zero = lax.shift_right_logical(bits & 1, 1)
    return values ^ zero.astype(values.dtype)


def _sums_are_small(x: Array, kernel: Int4Kernel) -> bool:
    """Tells whether the sums of all groups take no more bytes than the kernel in bfloat16."""
    rows = x.size // x.shape[-1]
    return not kernel.is_paired and 2 * rows <= kernel.block


def product_by_table(
    x: Float[Array, "*rows D"], table: Float[Array, "V D"] | Int8Kernel, precision: Precision
) -> Float[Array, "*rows V"]:
    """Returns ``x @ table.T``: logits from an embedding table that is the output matrix too.

    The table is not transposed first: for one row in mixed precision XLA's CPU backend would then
    convert all of it to float32 in every step (measured: 55 ms instead of 5 ms for 49,152 by 576).
    """
    if isinstance(table, Int8Kernel):
        return product(x, table, precision)
    if precision.invariant:
        return _invariant_product(x, table, precision, inputs=1)
    return _product(x, table, precision.operands, precision.activations, 1)


def _invariant_product(x: Array, kernel: Array, precision: Precision, inputs: int = 0) -> Array:
    operands = precision.operands
    return invariant.product(
        x.astype(operands), kernel.astype(operands), precision.activations, inputs=inputs
    )


def product_by_head(
    x: Float[Array, "B T heads D_in"],
    kernels: Float[Array, "heads D_in D_out"],
    precision: Precision,
) -> Float[Array, "B T heads D_out"]:
    """Multiplies each head with a kernel of its own, under a named precision."""
    batch, count, heads, _ = x.shape
    rows = x.reshape(batch * count, heads, -1)
    rows = rows.swapaxes(0, 1).astype(precision.operands)
    # Not einsum, which may swap the operands: XLA's CPU backend multiplies bfloat16 only in this
    # order.
    out = lax.dot_general(
        rows,
        kernels.astype(precision.operands),
        (((2,), (1,)), ((0,), (0,))),
        preferred_element_type=precision.activations,
        precision=matmul_precision(precision.operands),
    )
    return out.swapaxes(0, 1).reshape(batch, count, heads, -1)


@jax.custom_vjp
def _rows(table: Array, tokens: Array) -> Array:
    """Returns ``table[tokens]``.

    On CPUs bfloat16 is read as integers. Otherwise XLA would convert the whole table.
    """
    if table.dtype != jnp.bfloat16:
        return table[tokens]
    return lax.platform_dependent(
        table, tokens, cpu=_rows_by_bits, default=lambda table, tokens: table[tokens]
    )


def _rows_by_bits(table: Array, tokens: Array) -> Array:
    bits = lax.bitcast_convert_type(table, jnp.uint16)[tokens]
    return lax.bitcast_convert_type(bits, table.dtype)


def _rows_fwd(table: Array, tokens: Array):
    return _rows(table, tokens), (table, tokens)


def _rows_bwd(saved: tuple[Array, Array], grad: Array):
    table, tokens = saved
    # Tokens are integers, which have no gradient.
    return jnp.zeros_like(table).at[tokens].add(grad), None


_rows.defvjp(_rows_fwd, _rows_bwd)


def embed(
    table: Float[Array, "V D"] | Int8Kernel, tokens: Int[Array, "B T"], precision: Precision
) -> Float[Array, "B T D"]:
    """Returns rows of an embedding table in the type of activations."""
    if isinstance(table, Int8Kernel):
        return table.rows(tokens).astype(precision.activations)
    return _rows(table, tokens).astype(precision.activations)


def scaled(x: Float[Array, "*rows D"], factor: float) -> Float[Array, "*rows D"]:
    """Returns ``x`` times a factor of the configuration, rounded once."""
    if factor == 1.0:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def normal_param(
    rngs: nnx.Rngs, shape: tuple[int, ...], scale: float, **metadata: Any
) -> nnx.Param:
    """Returns a parameter of random numbers with the standard deviation ``scale``."""
    return nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * scale, **metadata)


class Linear(nnx.Module):
    """``y = x W + b``.

    The kernel is ``[in, out]``, and ``axes`` name both axes (:mod:`eagle3_jax.devices.sharding`).
    It may be in eight bits (:mod:`eagle3_jax.models.quantised`) if ``product`` allows it.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        axes: Axes = (),
        bias: bool = False,
        product: str = LAYER,
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        self.kernel = normal_param(rngs, (d_in, d_out), d_in**-0.5, axes=axes, product=product)
        self.bias = nnx.Param(jnp.zeros((d_out,), jnp.float32), axes=axes[1:]) if bias else None
        self.precision = precision

    def __call__(self, x: Float[Array, "*rows D_in"]) -> Float[Array, "*rows D_out"]:
        y = product(x, self.kernel[...], self.precision)
        if self.bias is None:
            return y
        bias = self.bias[...].astype(y.dtype)
        return y + lax.broadcast_to_rank(bias, y.ndim)


def keep_fused(y: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Barrier before splitting the result of a fused projection.

    Without it XLA:TPU reshapes the weights instead of the result: 100 MiB per layer and round.
    """
    return lax.platform_dependent(y, tpu=lax.optimization_barrier, default=lambda y: y)


def keep_stream(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Barrier after a layer, so that its kernels do not depend on other readers of the stream.

    Without it XLA:GPU chooses the layers after which the stream is written, and the norms between
    them sum it in other orders: a head that reads the features of layer 2 changes bits of later
    layers (docs/design.md, 15).
    """
    return lax.platform_dependent(x, cuda=lax.optimization_barrier, default=lambda x: x)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x²) + eps) · w`` (Zhang & Sennrich, 2019), computed in float32.

    The model's :data:`~eagle3_jax.models.config.NormKind` says how ``w`` is applied, and whether
    the mean of ``x`` is subtracted first. With ``heads`` every head has weights of its own. If
    ``invariant``, the bits of a row depend on that row alone (``eagle3_jax.models.invariant``).
    """

    def __init__(
        self,
        width: int,
        eps: float,
        kind: NormKind = "plain",
        heads: int | None = None,
        *,
        invariant: bool = False,
    ):
        initial = jnp.zeros if kind == "zero-centred" else jnp.ones
        self.scale = nnx.Param(initial((width,) if heads is None else (heads, width), jnp.float32))
        self.eps = eps
        self.kind = kind
        self.invariant = invariant

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        if not self.invariant:
            return self._by_operations(x)

        def by_kernel(x: Array) -> Array:
            return invariant.norm(x, self.factor(x), self.eps)

        return lax.platform_dependent(x, cuda=by_kernel, default=self._by_operations)

    def factor(self, x: Float[Array, "*rows D"]) -> Array:
        """Returns what multiplies the normalised ``x``, as an array of as many axes.

        It is in the type of ``x`` or in float32.
        """
        scale = lax.broadcast_to_rank(self.scale[...], x.ndim)
        if self.kind == "plain":
            # The weight multiplies after the cast, as in the PyTorch models.
            return scale.astype(x.dtype)
        scale = scale.astype(jnp.float32)
        return 1.0 + scale if self.kind == "zero-centred" else scale

    def _by_operations(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        centred = x
        if self.kind == "layer":
            centred = x.astype(jnp.float32)
            centred = centred - jnp.mean(centred, axis=-1, keepdims=True)
        y = normalised(centred, self.eps)
        rounded = y.astype(x.dtype) if self.kind == "plain" else y
        return (rounded * self.factor(x)).astype(x.dtype)


def normalised(x: Float[Array, "*rows D"], eps: float) -> Float[Array, "*rows D"]:
    """Returns ``x / sqrt(mean(x²) + eps)``, in float32."""
    y = x.astype(jnp.float32)
    by_mean = functools.partial(_normalise_by_mean, eps=eps)
    has_one_row = x.size <= x.shape[-1]
    if not has_one_row:
        return by_mean(y)

    # XLA's GPU backend turns the norm of one row into one kernel only if no constant is applied to
    # the sum.
    by_sum = functools.partial(_normalise_by_sum, eps=eps)
    return lax.platform_dependent(y, cuda=by_sum, default=by_mean)


def _normalise_by_mean(y: Float[Array, "*rows D"], *, eps: float) -> Float[Array, "*rows D"]:
    mean_square = ordered_sum(y * y) / y.shape[-1]
    return y * lax.rsqrt(mean_square + eps)


def _normalise_by_sum(y: Float[Array, "*rows D"], *, eps: float) -> Float[Array, "*rows D"]:
    """Returns ``y / sqrt(Σ (y² + eps) / D)``."""
    size = y.shape[-1]
    terms = y * y * (1 / size) + eps / size
    mean_square = jnp.sum(terms, axis=-1, keepdims=True)
    return y * lax.rsqrt(mean_square)


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) · up(x))`` (Shazeer, 2020).

    Gate and up are one product with columns ``[width, 2]``. The description may name another
    activation than SiLU.
    """

    def __init__(self, width: int, config: GatedMLP, *, precision: Precision, rngs: nnx.Rngs):
        inner = Axis(MLP, config.width)
        options = {"bias": config.bias, "precision": precision, "rngs": rngs}
        self.gate_up = Linear(width, 2 * config.width, axes=(None, inner), **options)
        self.down = Linear(config.width, width, axes=(inner, None), **options)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        both = keep_fused(self.gate_up(x)).reshape(*x.shape[:-1], -1, 2)
        # GELU is approximated by tanh, as in Gemma.
        activate = jax.nn.silu if self.activation == "silu" else jax.nn.gelu
        return self.down(activate(both[..., 0]) * both[..., 1])
