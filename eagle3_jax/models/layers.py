"""The pieces that targets and draft heads are built of: linear, norm, attention, SwiGLU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, DTypeLike, Float, Int

from eagle3_jax.cache import KeyValue, Segment
from eagle3_jax.models.config import GatedMLP
from eagle3_jax.sharding import MLP, Axes, Axis, put_shards


@dataclasses.dataclass(frozen=True)
class Precision:
    """In which type products are multiplied and in which type they are summed and passed on.

    Attributes:
        name: What the command line calls it.
        operands: Type of weights, and of activations as they enter a product.
        activations: Type in which products accumulate, of the residual stream and of the caches.
    """

    name: str
    operands: DTypeLike
    activations: DTypeLike


FLOAT32 = Precision("float32", jnp.float32, jnp.float32)
BFLOAT16 = Precision("bfloat16", jnp.bfloat16, jnp.bfloat16)
# Half the bytes of float32 with its accumulation. On CPUs with bfloat16 dot products a block of 2 to 16 rows
# costs about the same as one, which is what makes verification nearly free there.
MIXED = Precision("mixed", jnp.bfloat16, jnp.float32)
PRECISIONS = {p.name: p for p in (FLOAT32, BFLOAT16, MIXED)}


def cast(params: Any, precision: Precision, shardings: Any = None) -> Any:
    """Arrays on the device: matrices in the type they are multiplied in, vectors in that of the activations.

    One after the other, so that the host never holds more than one of them beside what it maps from files.

    Args:
        params: Arrays of numpy, or what becomes one when it is asked for.
        precision: Names the types.
        shardings: Where each of them goes; to the default device when left out.
    """

    def put(leaf: Any, sharding: NamedSharding | None = None) -> jax.Array:
        dtype = precision.operands if leaf.ndim > 1 else precision.activations
        # On the host, where it is one pass; on the device every shape would be a program to compile.
        host = np.asarray(leaf)
        one = jax.device_put(host.astype(dtype)) if sharding is None else put_shards(host, dtype, sharding)
        return jax.block_until_ready(one)

    return jax.tree.map(put, params) if shardings is None else jax.tree.map(put, params, shardings)


def _exact(dtype: DTypeLike) -> lax.Precision | None:
    """How products of operands of this type are asked for: float32 with all of its bits (docs/decisions/0012).

    Left to themselves, NVIDIA's tensor cores round it to TensorFloat-32 and TPUs to bfloat16. Who has told JAX a
    precision (``jax_default_matmul_precision``) gets that one.
    """
    told = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return lax.Precision.HIGHEST if told is None and jnp.dtype(dtype) == jnp.float32 else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(x: Array, kernel: Array, operands: DTypeLike, activations: DTypeLike) -> Array:
    """``x @ kernel`` over the last axis of ``x`` in the given types."""
    x, kernel = x.astype(operands), kernel.astype(operands)
    contract = functools.partial(lax.dot_general, preferred_element_type=activations, precision=_exact(operands))

    def as_it_is(x: Array, kernel: Array) -> Array:
        return contract(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))

    def in_a_pair(x: Array, kernel: Array) -> Array:
        out = contract(jnp.concatenate([x.reshape(1, -1)] * 2), kernel, (((1,), (0,)), ((), ())))
        return out[:1].reshape(*x.shape[:-1], -1)

    if x.size > x.shape[-1]:
        return as_it_is(x, kernel)
    # A single row has no fast path in XLA's CPU backend where the operands are narrower than the sums (measured seven
    # times slower than two rows), and on TPUs goes to the vector unit.
    cpu = in_a_pair if operands != activations else as_it_is
    return lax.platform_dependent(x, kernel, cpu=cpu, tpu=in_a_pair, default=as_it_is)


def _product_fwd(x: Array, kernel: Array, operands: DTypeLike, activations: DTypeLike):
    return _product(x, kernel, operands, activations), (x, kernel)


def _product_bwd(operands: DTypeLike, activations: DTypeLike, saved: tuple[Array, Array], grad: Array):
    # JAX's own rule would multiply a float32 cotangent with a bfloat16 operand, which falls back to slow products.
    x, kernel = saved
    rows, grads = x.reshape(-1, x.shape[-1]).astype(operands), grad.reshape(-1, grad.shape[-1]).astype(operands)
    contract = functools.partial(lax.dot_general, preferred_element_type=activations, precision=_exact(operands))
    grad_x = contract(grads, kernel.astype(operands), (((1,), (1,)), ((), ())))
    grad_kernel = contract(rows, grads, (((0,), (0,)), ((), ())))
    return grad_x.reshape(x.shape).astype(x.dtype), grad_kernel.astype(kernel.dtype)


_product.defvjp(_product_fwd, _product_bwd)


def product(
    x: Float[Array, "*rows D_in"], kernel: Float[Array, "D_in D_out"], precision: Precision
) -> Float[Array, "*rows D_out"]:
    """Matrix product under a named precision; the only place where the library multiplies by weights."""
    return _product(x, kernel, precision.operands, precision.activations)


@jax.custom_vjp
def _rows(table: Array, tokens: Array) -> Array:
    """``table[tokens]``; of a bfloat16 table by its bits on CPUs, where XLA would widen the whole table first."""
    if table.dtype != jnp.bfloat16:
        return table[tokens]

    def by_bits(table: Array, tokens: Array) -> Array:
        bits = lax.bitcast_convert_type(table, jnp.uint16)[tokens]
        return lax.bitcast_convert_type(bits, table.dtype)

    return lax.platform_dependent(table, tokens, cpu=by_bits, default=lambda table, tokens: table[tokens])


def _rows_fwd(table: Array, tokens: Array):
    return _rows(table, tokens), (table, tokens)


def _rows_bwd(saved: tuple[Array, Array], grad: Array):
    table, tokens = saved  # bits have no gradient of their own
    return jnp.zeros_like(table).at[tokens].add(grad), None


_rows.defvjp(_rows_fwd, _rows_bwd)


def embed(table: Float[Array, "V D"], tokens: Int[Array, "B T"], precision: Precision) -> Float[Array, "B T D"]:
    """Rows of an embedding table in the type of activations."""
    return _rows(table, tokens).astype(precision.activations)


class Linear(nnx.Module):
    """``y = x W + b``; the kernel is stored ``[in, out]``, and ``axes`` are those two (:mod:`eagle3_jax.sharding`)."""

    def __init__(
        self, d_in: int, d_out: int, *, axes: Axes = (), bias: bool = False, precision: Precision, rngs: nnx.Rngs
    ):
        scale = d_in**-0.5
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (d_in, d_out), jnp.float32) * scale, axes=axes)
        self.bias = nnx.Param(jnp.zeros((d_out,), jnp.float32), axes=axes[1:]) if bias else None
        self.precision = precision

    def __call__(self, x: Float[Array, "*rows D_in"]) -> Float[Array, "*rows D_out"]:
        y = product(x, self.kernel[...], self.precision)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def apart(y: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """What one product gave of several, about to be taken apart: that must not happen to the weights instead.

    For TPUs XLA would move a reshape from the result to the kernel and lay that out again, 100 MiB a layer and round.
    """
    return lax.platform_dependent(y, tpu=lax.optimization_barrier, default=lambda y: y)


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x²) + eps) · w`` (Zhang & Sennrich, 2019), normalised in float32."""

    def __init__(self, width: int, eps: float):
        self.scale = nnx.Param(jnp.ones((width,), jnp.float32))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        # The weight multiplies after the cast, as in the PyTorch models whose outputs we must reproduce.
        return y.astype(x.dtype) * self.scale[...].astype(x.dtype)


class SwiGLU(nnx.Module):
    """``down(silu(gate(x)) · up(x))`` (Shazeer, 2020); gate and up are one product, its columns ``[width, 2]``."""

    def __init__(self, width: int, config: GatedMLP, *, precision: Precision, rngs: nnx.Rngs):
        inner, options = Axis(MLP, config.width), {"bias": config.bias, "precision": precision, "rngs": rngs}
        self.gate_up = Linear(width, 2 * config.width, axes=(None, inner), **options)
        self.down = Linear(config.width, width, axes=(inner, None), **options)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        both = apart(self.gate_up(x)).reshape(*x.shape[:-1], -1, 2)
        return self.down(jax.nn.silu(both[..., 0]) * both[..., 1])


def attention(
    queries: Float[Array, "B T heads H"], segments: Sequence[Segment], own: Sequence[KeyValue] = ()
) -> Float[Array, "B T width"]:
    """Grouped-query attention, ``softmax(q kᵀ / √H) v``, with one float32 softmax over everything that is seen.

    Args:
        queries: Rotated queries.
        segments: Runs of keys under a mask: a cache, the block itself, the levels of a draft tree.
        own: Runs of ``T`` keys of which query ``t`` sees only key ``t`` (the diagonals of the training-time test).

    Returns:
        ``[B T heads·H]``.
    """
    batch, fed, heads, head_dim = queries.shape
    kv_heads = (segments[0].kv if segments else own[0]).keys.shape[1]
    groups = heads // kv_heads
    # The query heads of a group and the tokens form one axis: XLA's CPU products want one free axis on each side.
    rows = queries.reshape(batch, fed, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    folded = rows.reshape(batch, kv_heads, groups * fed, head_dim)
    contract = functools.partial(jnp.einsum, preferred_element_type=jnp.float32, precision=_exact(queries.dtype))
    scores = []
    for segment in segments:
        score = contract("bcqh,bcsh->bcqs", folded, segment.kv.keys)
        score = score.reshape(batch, kv_heads, groups, fed, -1) * head_dim**-0.5
        # A finite minimum, not -inf: a padded query that sees nothing must not turn into NaN.
        scores.append(jnp.where(segment.mask[:, None, None], score, jnp.finfo(jnp.float32).min))
    for kv in own:
        scores.append(
            jnp.sum((rows * kv.keys[:, :, None]).astype(jnp.float32), axis=-1, keepdims=True) * head_dim**-0.5
        )
    # One softmax, taken apart: the largest score and the sum of all runs, and the division after the values are summed.
    # Joining the runs and cutting the weights up again would cost more than the products, on short contexts.
    largest = functools.reduce(jnp.maximum, [jnp.max(score, axis=-1, keepdims=True) for score in scores])
    weights = [jnp.exp(score - lax.stop_gradient(largest)) for score in scores]
    total = functools.reduce(jnp.add, [jnp.sum(weight, axis=-1, keepdims=True) for weight in weights])
    out = jnp.zeros((), jnp.float32)
    for segment, weight in zip(segments, weights[: len(segments)], strict=True):
        folded = weight.reshape(batch, kv_heads, groups * fed, -1).astype(queries.dtype)
        part = contract("bcqs,bcsh->bcqh", folded, segment.kv.values)
        out = out + part.reshape(rows.shape)
    for kv, weight in zip(own, weights[len(segments) :], strict=True):
        out = out + weight * kv.values[:, :, None]
    out = (out / total).astype(queries.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, fed, heads * head_dim)
