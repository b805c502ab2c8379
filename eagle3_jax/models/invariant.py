"""Products and norms in which the bits of a row depend on that row alone, not on the other rows.

Compilers choose the algorithm of a product, and the order of the sums in a norm, by the number of
rows. So a token has other bits alone than in a block that verifies a draft, or in a batch. Here
each has one algorithm. On NVIDIA GPUs it is a kernel, written in Pallas, whose tiles depend only on
the weights. Elsewhere rows are multiplied :data:`ROWS` at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, DTypeLike, Float

#: Rows of every product outside GPUs. XLA's CPU backend has its fastest products for two to four.
ROWS = 4
# Fewest steps of a program over the inputs.
_FEWEST_STEPS = 4


class Tile(NamedTuple):
    """Sizes of a program of :func:`product_by_kernel`. Another tile gives other bits."""

    rows: int = 64
    outputs: int = 64
    inputs: int = 128
    warps: int = 4
    stages: int = 4
    #: Intended number of programs: more than a GPU has multiprocessors (132 on an H200).
    programs: int = 256


def product(
    x: Float[Array, "*rows D_in"], kernel: Array, dtype: DTypeLike, *, inputs: int = 0
) -> Float[Array, "*rows D_out"]:
    """Multiplies rows with a matrix.

    Args:
        x: The rows, in the type of the matrix.
        kernel: ``[D_in, D_out]``; ``[D_out, D_in]`` if ``inputs`` is 1.
        dtype: Type of the result. Sums are in float32.
        inputs: Axis of the matrix that is summed over.
    """
    rows = x.reshape(-1, x.shape[-1])
    by_kernel = functools.partial(product_by_kernel, dtype=dtype, inputs=inputs)
    by_tiles = functools.partial(_product_by_tiles, dtype=dtype, inputs=inputs)
    out = lax.platform_dependent(rows, kernel, cuda=by_kernel, default=by_tiles)
    return out.reshape(*x.shape[:-1], -1)


def _product_by_tiles(rows: Array, kernel: Array, dtype: DTypeLike, inputs: int) -> Array:
    """Computes :func:`product` for :data:`ROWS` rows at a time."""
    over = (((1,), (inputs,)), ((), ()))
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    return in_tiles(
        lambda tile: lax.dot_general(
            tile, kernel, over, preferred_element_type=dtype, precision=precision
        ),
        rows,
    )


def in_tiles(
    multiply: Callable[[Array], Array], rows: Float[Array, "M D_in"]
) -> Float[Array, "M D_out"]:
    """Computes ``multiply(rows)`` for :data:`ROWS` rows at a time, which is one shape for XLA."""

    def isolated(tile: Array) -> Array:
        # The barriers keep what is before and after the product out of its kernel.
        return lax.optimization_barrier(multiply(lax.optimization_barrier(tile)))

    count, width = rows.shape
    tiles = jnp.pad(rows, ((0, -count % ROWS), (0, 0))).reshape(-1, ROWS, width)
    out = isolated(tiles[0])[None] if len(tiles) == 1 else lax.map(isolated, tiles)
    return out.reshape(-1, out.shape[-1])[:count]


def product_by_kernel(
    rows: Float[Array, "M D_in"],
    kernel: Array,
    dtype: DTypeLike,
    *,
    inputs: int = 0,
    tile: Tile = Tile(),
    splits: int | None = None,
    interpret: bool = False,
) -> Float[Array, "M D_out"]:
    """Computes :func:`product` with the kernel for NVIDIA GPUs.

    Args:
        rows: The rows.
        kernel: The matrix.
        dtype: Type of the result.
        inputs: Axis of the matrix that is summed over.
        tile: Sizes of a program.
        splits: Parts that the inputs are divided into; their sums are added one after the other.
            Default: by the sizes of the matrix, enough for all multiprocessors.
        interpret: Whether to run the kernel with operations of JAX on any device, for tests.
    """
    count, width = rows.shape
    outputs = kernel.shape[1 - inputs]
    columns = math.ceil(outputs / tile.outputs)
    steps = math.ceil(width / tile.inputs)
    if splits is None:
        splits = max(1, min(round(tile.programs / columns), steps // _FEWEST_STEPS))
    steps_of_split = math.ceil(steps / splits)

    sizes = {"count": count, "width": width, "outputs": outputs, "inputs": inputs, "splits": splits}
    body = functools.partial(_product_kernel, tile=tile, steps=steps_of_split, **sizes)
    out = pl.pallas_call(
        body,
        # Programs that read the same weights start one after the other, so that the L2 cache can
        # serve all but one.
        grid=(math.ceil(count / tile.rows), columns, splits),
        out_shape=jax.ShapeDtypeStruct(
            (splits, count, outputs), jnp.float32 if splits > 1 else dtype
        ),
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=interpret,
        name="product",
    )(rows, kernel)

    # The splits are added in one order, whatever the number of rows is.
    total = functools.reduce(jnp.add, [out[split] for split in range(splits)])
    return rounded(total, dtype)


def _product_kernel(
    rows_ref: Any,
    kernel_ref: Any,
    out_ref: Any,
    *,
    tile: Tile,
    steps: int,
    count: int,
    width: int,
    outputs: int,
    inputs: int,
    splits: int,
) -> None:
    """Computes a tile of outputs for a tile of rows, over one split of the inputs."""
    row = pl.program_id(0) * tile.rows
    column = pl.program_id(1) * tile.outputs
    split = pl.program_id(2)

    are_rows = row + jnp.arange(tile.rows, dtype=jnp.int32) < count
    are_outputs = column + jnp.arange(tile.outputs, dtype=jnp.int32) < outputs
    # Without a mask the loads of the weights are wider.
    is_even = width == splits * steps * tile.inputs and outputs % tile.outputs == 0
    by_output = inputs == 1

    def add_step(step: Array, total: Array) -> Array:
        first = (split * steps + step) * tile.inputs
        are_inputs = first + jnp.arange(tile.inputs, dtype=jnp.int32) < width
        some_inputs = pl.ds(first, tile.inputs)
        some_outputs = pl.ds(column, tile.outputs)
        mask = are_rows[:, None] & are_inputs[None, :]
        factors = triton.load(rows_ref.at[pl.ds(row, tile.rows), some_inputs], mask=mask, other=0)

        axes = (some_inputs, some_outputs)
        inside = (are_inputs, are_outputs)
        if by_output:
            axes = axes[::-1]
            inside = inside[::-1]
        options: dict[str, Any] = {}
        if not is_even:
            options = {"mask": inside[0][:, None] & inside[1][None, :], "other": 0}
        weights = triton.load(kernel_ref.at[axes], **options)
        return total + triton.dot(factors, weights, trans_b=by_output)

    total = lax.fori_loop(0, steps, add_step, jnp.zeros((tile.rows, tile.outputs), jnp.float32))
    written = (split, pl.ds(row, tile.rows), pl.ds(column, tile.outputs))
    mask = are_rows[:, None] & are_outputs[None, :]
    triton.store(out_ref.at[written], total.astype(out_ref.dtype), mask=mask)


def norm(
    x: Float[Array, "*rows D"], scale: Array, eps: float, *, interpret: bool = False
) -> Float[Array, "*rows D"]:
    """Computes ``x / sqrt(mean(x²) + eps)``, times ``scale``, with a kernel for NVIDIA GPUs.

    Args:
        x: The rows.
        scale: ``[1 ... 1 D]``, or ``[1 ... heads D]`` if the axis before the last of ``x`` is that
            of heads. In float32 it multiplies before rounding; in the type of ``x`` after it.
        eps: See the formula.
        interpret: Whether to run the kernel with operations of JAX on any device, for tests.
    """
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    scales = scale.reshape(-1, width)
    # Arrays of Triton have a power of two of elements.
    padded = 1 << (width - 1).bit_length()
    out = pl.pallas_call(
        functools.partial(_norm_kernel, width=width, padded=padded, heads=len(scales), eps=eps),
        grid=(len(rows),),
        out_shape=jax.ShapeDtypeStruct(rows.shape, x.dtype),
        compiler_params=triton.CompilerParams(num_warps=4 if padded >= 1024 else 1, num_stages=1),
        interpret=interpret,
        name="norm",
    )(rows, scales)
    return out.reshape(x.shape)


def _norm_kernel(
    x_ref: Any, scale_ref: Any, out_ref: Any, *, width: int, padded: int, heads: int, eps: float
) -> None:
    """Normalises one row."""
    row = pl.program_id(0)
    channels = jnp.arange(padded, dtype=jnp.int32)
    mask = channels < width
    x = triton.load(x_ref.at[row, channels], mask=mask, other=0).astype(jnp.float32)
    scale = triton.load(scale_ref.at[row % heads, channels], mask=mask, other=0)
    y = x * lax.rsqrt(jnp.sum(x * x) / width + eps)
    y = y.astype(scale.dtype) * scale
    triton.store(out_ref.at[row, channels], y.astype(out_ref.dtype), mask=mask)


def rounded(x: Float[Array, "*any"], dtype: DTypeLike) -> Float[Array, "*any"]:
    """Returns ``x`` in another type.

    The compiler may not skip the rounding, as it may with a mere conversion.
    """
    if x.dtype == dtype:
        return x
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant).astype(dtype)
