"""Attention over a cache as one GPU kernel: it reads the slots up to the end of the block once and writes no scores.

XLA computes the scores of all slots of the cache in float32, writes them to memory and reads them again. For long
caches, large batches and large trees that is most of what a round moves. The kernel here is FlashAttention-2 split
over the slots (flash decoding), written in Pallas, which compiles it by Triton.

The number of a slot alone decides to which split and tile it belongs, and a tile that a query does not see changes no
bit of its result. So the sums of a token are the same whether the tokens before it were committed earlier or precede
it in its block, as they are with XLA's attention.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.cache import KeyValue

_TILE = 64  # slots that are multiplied at once
_ROWS = 64  # most queries of a program
_PROGRAMS = 256  # wanted: more than a GPU has multiprocessors (an H200: 132)
_LONGEST = 128  # tokens of a block; longer ones are prompts
_VARIABLE = "EAGLE3_ATTENTION"
_chosen: contextvars.ContextVar[bool | None] = contextvars.ContextVar("attention by the kernel", default=None)


@contextlib.contextmanager
def enabled(use: bool) -> Iterator[None]:
    """Trace with or without the kernel, whatever the device of this process is."""
    token = _chosen.set(use)
    try:
        yield
    finally:
        _chosen.reset(token)


def is_enabled() -> bool:
    """Whether attention is traced with the kernel: on NVIDIA GPUs of compute capability 8.0 and more.

    The environment variable ``EAGLE3_ATTENTION=xla`` turns the kernel off, whatever :func:`enabled` says.

    Raises:
        ValueError: The variable has another value.
    """
    if asked := os.environ.get(_VARIABLE):
        if asked != "xla":
            raise ValueError(f"{_VARIABLE} is {asked!r}; expected xla, or no such variable for the default")
        return False
    if (chosen := _chosen.get()) is not None:
        return chosen
    device = jax.devices()[0]
    is_nvidia = device.platform == "gpu" and device.device_kind.startswith("NVIDIA")
    return is_nvidia and float(device.compute_capability) >= 8


def is_supported(queries: Float[Array, "B T heads H"], kv: KeyValue) -> bool:
    """Whether the kernel takes these arrays: bfloat16 on one device, blocks of few tokens, heads of 16 to 256."""
    sizes = (kv.keys.shape[-1], kv.values.shape[-1])
    return (
        all(one.dtype == jnp.bfloat16 for one in (queries, kv.keys, kv.values))
        and queries.shape[1] <= _LONGEST
        and all(16 <= size <= 256 and size.bit_count() == 1 for size in sizes)
        and jax.sharding.get_abstract_mesh().empty
    )


def flash_attention(
    queries: Float[Array, "B T heads H"],
    kv: KeyValue,
    seen: Bool[Array, "#B T _"] | None,
    length: Int[Array, " B"],
    *,
    size: int,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B T width"]:
    """Grouped-query attention over the committed slots of a cache and a block after them, ``softmax(q kᵀ · scale) v``.

    Args:
        queries: Rotated queries of the last ``T`` tokens of the block.
        kv: Buffers of ``S`` slots.
        seen: ``[B T M]``, which tokens of the block each query sees, all of which see the committed slots; ``[B T S]``,
            which slots each query sees; ``None`` for a chain, in which a token sees everything before it.
        length: Number of committed slots, per row. No slot at or beyond ``length + size`` is read.
        size: ``M``, number of tokens in the block.
        scale: Factor of the scores.
        softcap: Scores become ``softcap * tanh(score / softcap)``; ``None`` for none.
        sinks: One more logit in the softmax of each head, without a value.
        interpret: Run the kernel by JAX's own operations on any device, for tests.

    Returns:
        ``[B T heads·Hv]``.
    """
    batch, tokens, heads, key_width = queries.shape
    kv_heads, capacity, width = kv.values.shape[1:]
    group = heads // kv_heads
    folded = queries.reshape(batch, tokens, kv_heads, group, key_width).transpose(0, 2, 1, 3, 4)
    rows = min(_ROWS, max(16, 1 << (tokens * group - 1).bit_length()))
    parts = math.ceil(tokens * group / rows)
    splits = min(math.ceil(_PROGRAMS / (batch * kv_heads * parts)), math.ceil(capacity / _TILE))
    of_head = lambda n, i, j: (n, 0, 0)
    masks = []
    of_masks = []
    if seen is not None:
        shared = seen.shape[0] == 1
        masks = [seen.astype(jnp.int8)]
        of_masks = [pl.BlockSpec((None, *seen.shape[1:]), lambda n, i, j: (0 if shared else n // kv_heads, 0, 0))]
    out, log_sums = pl.pallas_call(
        functools.partial(_kernel, splits=splits, group=group, tokens=tokens, size=size, scale=scale, softcap=softcap),
        grid=(batch * kv_heads, parts, splits),
        in_specs=[
            pl.BlockSpec((None, rows, key_width), lambda n, i, j: (n, i, 0)),
            pl.BlockSpec((None, capacity, key_width), of_head),
            pl.BlockSpec((None, capacity, width), of_head),
            pl.BlockSpec((None,), lambda n, i, j: (n // kv_heads,)),
            *of_masks,
        ],
        out_specs=[
            pl.BlockSpec((None, None, rows, width), lambda n, i, j: (j, n, i, 0)),
            pl.BlockSpec((None, rows, None), lambda n, i, j: (n, i, j)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((splits, batch * kv_heads, tokens * group, width), jnp.float32),
            jax.ShapeDtypeStruct((batch * kv_heads, tokens * group, splits), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="flash_attention",
    )(
        folded.reshape(batch * kv_heads, tokens * group, key_width),
        *(one.reshape(batch * kv_heads, capacity, one.shape[-1]) for one in kv),
        length,
        *masks,
    )
    by_head = (batch, kv_heads, tokens, group)
    log_sums = log_sums.reshape(*by_head, splits)
    if sinks is not None:
        of_sinks = sinks.astype(jnp.float32).reshape(kv_heads, 1, group, 1)
        log_sums = jnp.concatenate([log_sums, jnp.broadcast_to(of_sinks, (*by_head, 1))], axis=-1)
    shares = jnp.moveaxis(jax.nn.softmax(log_sums)[..., :splits], -1, 0)
    joined = jnp.sum(out.reshape(splits, *by_head, width) * shares[..., None], axis=0).astype(queries.dtype)
    return joined.transpose(0, 2, 1, 3, 4).reshape(batch, tokens, -1)


def _kernel(
    queries_ref: Any,  # [rows, H], token by token
    keys_ref: Any,  # [S, H]
    values_ref: Any,  # [S, Hv]
    length_ref: Any,  # []
    *rest: Any,  # [T, M] or [T, S], unless the block is a chain; and the results:
    # [rows, Hv], attention over the tiles of the split; [rows], log of the sum of the exponentials of its scores
    splits: int,
    group: int,
    tokens: int,
    size: int,
    scale: float,
    softcap: float | None,
) -> None:
    """One program: ``rows`` queries of one key head over every ``splits``-th tile of slots."""
    *masks, out_ref, log_sums_ref = rest
    rows = queries_ref.shape[0]
    capacity = keys_ref.shape[0]
    split = pl.program_id(2)
    length = length_ref[...]
    row = pl.program_id(1) * rows + jnp.arange(rows, dtype=jnp.int32)
    real = row < tokens * group
    token = row // group

    def is_seen(slots: Array) -> Array:
        if not masks:
            return slots[None, :] <= (length + size - tokens + token)[:, None]
        covered = masks[0].shape[1]
        of_block = slots - length if covered == size else slots  # slots before the block are seen
        inside = real[:, None] & ((of_block >= 0) & (of_block < covered))[None, :]
        seen = triton.load(masks[0].at[token[:, None], of_block[None, :]], mask=inside, other=0)
        return (seen != 0) | (of_block < 0)[None, :]

    every = pl.ds(0, rows)
    queries = triton.load(queries_ref.at[every, :], mask=real[:, None], other=0)

    def add_tile(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, total, largest = carry
        first = (index * splits + split) * _TILE
        slots = first + jnp.arange(_TILE, dtype=jnp.int32)
        inside = slots < capacity
        load = lambda ref: triton.load(ref.at[pl.ds(first, _TILE), :], mask=inside[:, None], other=0)
        scores = triton.dot(queries, load(keys_ref), trans_b=True) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(is_seen(slots), scores, jnp.finfo(jnp.float32).min)
        most = jnp.maximum(largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - most[:, None])
        kept = jnp.exp(largest - most)
        part = triton.dot(weights.astype(values_ref.dtype), load(values_ref))
        return out * kept[:, None] + part, total * kept + jnp.sum(weights, axis=1), most

    tiles = (length + size + _TILE - 1) // _TILE
    nothing = (
        jnp.zeros(out_ref.shape, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.full((rows,), jnp.finfo(jnp.float32).min, jnp.float32),
    )
    out, total, largest = lax.fori_loop(0, jnp.maximum(tiles - split + splits - 1, 0) // splits, add_tile, nothing)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)  # a split behind the end has no tile
    triton.store(out_ref.at[every, :], out / total[:, None], mask=real[:, None])
    triton.store(log_sums_ref.at[every], largest + jnp.log(total), mask=real)
