"""Attention over a cache as one GPU kernel, which reads each slot once and writes no scores.

XLA computes the scores of all slots of the cache in float32, writes them to memory and reads them
again. For long caches, large batches and large trees that is most of the memory traffic of a round.
The kernel here is FlashAttention-2 (Dao, 2023, arXiv 2307.08691), split over the slots as in flash
decoding. It is written in Pallas, which compiles it with Triton, and reads no slot after the block.

Split and tile of a slot depend only on its number, and a tile without visible slots changes no bit
of a query's result. So the sums of a token are the same whether the tokens before it were committed
earlier or precede it in its block, as they are with XLA's attention.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import functools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.cache import KeyValue

# Slots that are multiplied at once.
_TILE = 64
# Most queries of a program.
_ROWS = 64
# Intended number of programs: more than a GPU has multiprocessors (132 on an H200).
_PROGRAMS = 256
# Splits of the slots, where bits may not depend on the sizes of the arrays.
_SPLITS = 16
# Most tokens of a block. Longer blocks are prompts.
_LONGEST = 128
# Largest difference from the reference: several roundings of bfloat16.
_TOLERANCE = 0.05
_VARIABLE = "EAGLE3_ATTENTION"
_override: contextvars.ContextVar[bool | None] = contextvars.ContextVar(
    "attention by the kernel", default=None
)


@contextlib.contextmanager
def enabled(use: bool) -> Iterator[None]:
    """Traces with or without the kernel within a ``with`` statement, whatever the device is."""
    token = _override.set(use)
    try:
        yield
    finally:
        _override.reset(token)


def is_enabled() -> bool:
    """Returns whether attention is traced with the kernel.

    It is on NVIDIA GPUs of compute capability 8.0 and more. At its first use on a device the kernel
    is compared once with a reference (:func:`agrees_with_reference`). The environment variable
    ``EAGLE3_ATTENTION=xla`` turns the kernel off and takes precedence over :func:`enabled`.

    Raises:
        ValueError: The variable has another value.
    """
    setting = os.environ.get(_VARIABLE)
    if setting:
        if setting != "xla":
            raise ValueError(
                f"{_VARIABLE} is {setting!r}; expected xla, or no such variable for the default"
            )
        return False

    use = _override.get()
    if use is not None:
        return use

    device = jax.devices()[0]
    is_nvidia = device.platform == "gpu" and device.device_kind.startswith("NVIDIA")
    return (
        is_nvidia
        and float(device.compute_capability) >= 8
        and agrees_with_reference(flash_attention)
    )


def is_supported(queries: Float[Array, "B T heads H"], kv: KeyValue) -> bool:
    """Returns whether the kernel supports these arrays.

    They must be bfloat16 on one device, with at most 128 tokens and heads of 16, 32, 64, 128 or 256
    channels.
    """
    arrays = (queries, kv.keys, kv.values)
    are_bfloat16 = all(array.dtype == jnp.bfloat16 for array in arrays)
    fit = all(fits(array.shape[-1]) for array in (kv.keys, kv.values))
    return (
        are_bfloat16
        and fit
        and queries.shape[1] <= _LONGEST
        and jax.sharding.get_abstract_mesh().empty
    )


def fits(channels: int) -> bool:
    """Returns whether the kernel supports heads with this number of channels."""
    return 16 <= channels <= 256 and channels.bit_count() == 1


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
    invariant: bool = False,
    interpret: bool = False,
) -> Float[Array, "B T width"]:
    """Computes grouped-query attention, ``softmax(q kᵀ · scale) v``, over a cache.

    Queries attend to committed slots and to the block after them.

    Args:
        queries: ``[B T heads H]``, rotated queries of the last ``T`` tokens of the block.
        kv: Buffers of ``S`` slots.
        seen: Attention mask: ``[B T M]`` over the tokens of the block, where every query also
            attends to the committed slots; or ``[B T S]`` over all slots; or ``None`` for a chain,
            where a query attends to all earlier tokens.
        length: ``[B]``, number of committed slots. No slot at or beyond ``length + size`` is read.
        size: ``M``, number of tokens in the block.
        scale: Factor of the scores.
        softcap: Scores become ``softcap * tanh(score / softcap)``; ``None`` for no cap.
        sinks: ``[heads]``, one more logit in the softmax of each head, without a value.
        invariant: Whether the bits of a query may depend on nothing but what it sees: not on ``B``,
            ``T`` or ``S``. Sinks are then not supported.
        interpret: Whether to run the kernel with operations of JAX on any device, for tests.

    Returns:
        ``[B T heads·Hv]``.
    """
    batch, tokens, heads, key_width = queries.shape
    kv_heads, capacity, width = kv.values.shape[1:]
    group = heads // kv_heads
    folded = queries.reshape(batch, tokens, kv_heads, group, key_width).transpose(0, 2, 1, 3, 4)

    # A product of tensor cores has at least 16 rows.
    queries_of_head = tokens * group
    rows = _ROWS if invariant else min(_ROWS, max(16, 1 << (queries_of_head - 1).bit_length()))
    parts = math.ceil(queries_of_head / rows)
    tiles = math.ceil(capacity / _TILE)
    splits = _SPLITS if invariant else min(math.ceil(_PROGRAMS / (batch * kv_heads * parts)), tiles)

    # The indices of a program: head (of all rows of the batch), part of the queries, split of the
    # slots.
    in_specs = [
        pl.BlockSpec((None, rows, key_width), lambda head, part, split: (head, part, 0)),
        pl.BlockSpec((None, capacity, key_width), lambda head, part, split: (head, 0, 0)),
        pl.BlockSpec((None, capacity, width), lambda head, part, split: (head, 0, 0)),
        pl.BlockSpec((None,), lambda head, part, split: (head // kv_heads,)),
    ]
    masks = []
    if seen is not None:
        shared = seen.shape[0] == 1
        masks = [seen.astype(jnp.int8)]
        mask_spec = pl.BlockSpec(
            (None, *seen.shape[1:]),
            lambda head, part, split: (0 if shared else head // kv_heads, 0, 0),
        )
        in_specs.append(mask_spec)
    out_specs = [
        pl.BlockSpec((None, None, rows, width), lambda head, part, split: (split, head, part, 0)),
        pl.BlockSpec((None, rows, None), lambda head, part, split: (head, part, split)),
    ]
    out_shape = [
        jax.ShapeDtypeStruct((splits, batch * kv_heads, queries_of_head, width), jnp.float32),
        jax.ShapeDtypeStruct((batch * kv_heads, queries_of_head, splits), jnp.float32),
    ]

    sizes = {"splits": splits, "group": group, "tokens": tokens, "size": size}
    run = pl.pallas_call(
        functools.partial(_kernel, **sizes, scale=scale, softcap=softcap),
        grid=(batch * kv_heads, parts, splits),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="flash_attention",
    )
    queries_by_head = folded.reshape(batch * kv_heads, queries_of_head, key_width)
    keys_by_head = kv.keys.reshape(batch * kv_heads, capacity, key_width)
    values_by_head = kv.values.reshape(batch * kv_heads, capacity, width)
    out, log_sums = run(queries_by_head, keys_by_head, values_by_head, length, *masks)
    if invariant:
        return _join_by_kernel(
            out, log_sums, batch=batch, dtype=queries.dtype, group=group, interpret=interpret
        )

    # Flash decoding: each split has the attention over its slots and the log of the sum of its
    # exponentials. The softmax of those logs are the weights of the splits. A sink is one more
    # logit whose value is zero.
    shape = (batch, kv_heads, tokens, group)
    log_sums = log_sums.reshape(*shape, splits)
    if sinks is not None:
        head_sinks = sinks.astype(jnp.float32).reshape(kv_heads, 1, group, 1)
        log_sums = jnp.concatenate([log_sums, jnp.broadcast_to(head_sinks, (*shape, 1))], axis=-1)
    shares = jnp.moveaxis(jax.nn.softmax(log_sums)[..., :splits], -1, 0)
    weighted = out.reshape(splits, *shape, width) * shares[..., None]
    joined = jnp.sum(weighted, axis=0).astype(queries.dtype)
    return joined.transpose(0, 2, 1, 3, 4).reshape(batch, tokens, -1)


def invariant_attention(
    queries: Float[Array, "B T heads H"],
    kv: KeyValue,
    seen: Bool[Array, "#B T S"] | None,
    length: Int[Array, " B"],
    *,
    size: int,
    **options: Any,
) -> Float[Array, "B T width"]:
    """Computes :func:`flash_attention` with ``invariant=True``, ``_LONGEST`` queries at a time.

    The mask is over all slots, or ``None``, and the queries are those of the whole block.
    """
    batch, tokens = queries.shape[:2]
    attend = functools.partial(flash_attention, kv=kv, invariant=True, **options)
    if tokens <= _LONGEST:
        return attend(queries, seen=seen, length=length, size=size)

    spare = -tokens % _LONGEST

    def chunked(array: Array) -> Array:
        padding = [(0, 0), (0, spare), *[(0, 0)] * (array.ndim - 2)]
        chunks = jnp.pad(array, padding).reshape(array.shape[0], -1, _LONGEST, *array.shape[2:])
        return jnp.moveaxis(chunks, 1, 0)

    starts = jnp.arange(0, tokens, _LONGEST, dtype=jnp.int32)
    chunks = (starts, chunked(queries), None if seen is None else chunked(seen))

    def of_chunk(chunk: tuple[Array, Array, Array | None]) -> Array:
        # The tokens of the block before a chunk are in their slots, as committed ones are.
        start, some_queries, seen = chunk
        return attend(some_queries, seen=seen, length=length + start, size=_LONGEST)

    out = jnp.moveaxis(lax.map(of_chunk, chunks), 0, 1)
    return out.reshape(batch, tokens + spare, -1)[:, :tokens]


def _join_by_kernel(
    out: Float[Array, "splits heads queries Hv"],
    log_sums: Float[Array, "heads queries splits"],
    *,
    batch: int,
    dtype: Any,
    group: int,
    interpret: bool,
) -> Float[Array, "B T width"]:
    """Joins the splits of every query in one order."""
    splits, all_heads, num_queries, width = out.shape
    kv_heads = all_heads // batch
    tokens = num_queries // group
    joined = pl.pallas_call(
        _join_kernel,
        grid=(all_heads, num_queries),
        in_specs=[
            pl.BlockSpec((splits, None, None, width), lambda head, query: (0, head, query, 0)),
            pl.BlockSpec((None, None, splits), lambda head, query: (head, query, 0)),
        ],
        out_specs=pl.BlockSpec(
            (None, None, None, width),
            lambda head, query: (
                head // kv_heads,
                query // group,
                head % kv_heads * group + query % group,
                0,
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, tokens, kv_heads * group, width), dtype),
        compiler_params=triton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="join_splits",
    )(out, log_sums)
    return joined.reshape(batch, tokens, -1)


def _join_kernel(out_ref: Any, log_sums_ref: Any, joined_ref: Any) -> None:
    """Joins the splits of one query: their sum, each weighted by its share of the softmax."""
    log_sums = log_sums_ref[...]
    weights = jnp.exp(log_sums - jnp.max(log_sums))
    total = jnp.sum(out_ref[...] * weights[:, None], axis=0) / jnp.sum(weights)
    joined_ref[...] = total.astype(joined_ref.dtype)


@functools.cache
def agrees_with_reference(attend: Callable[..., Array]) -> bool:
    """Compares :func:`flash_attention` with attention of JAX, and warns if they differ.

    The case is small and ragged.

    Args:
        attend: The function to run. The answer is remembered.
    """
    # JAX traces by thread. The caller is being traced, and this must run now, so it has a thread of
    # its own.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        try:
            difference = thread.submit(_largest_difference, attend).result()
        except Exception as error:
            # Errors of compilers and devices have no common type.
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            warnings.warn(
                f"the attention kernel failed ({reason[:200]}); attention is left to XLA",
                stacklevel=2,
            )
            return False

    is_right = difference < _TOLERANCE
    if not is_right:
        warnings.warn(
            f"the attention kernel is off by {difference:.2g}; attention is left to XLA",
            stacklevel=2,
        )
    return is_right


def _largest_difference(attend: Callable[..., Array]) -> float:
    """Returns the largest difference from attention of JAX in float32.

    A chain and two siblings are compared.
    """
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16)

    queries = normal(2, 3, 4, 64)
    kv = KeyValue(normal(2, 2, 80, 64), normal(2, 2, 80, 64))
    length = np.array([1, 70], np.int32)
    in_float32 = [
        array.astype(jnp.float32)
        for array in (queries, kv.keys.swapaxes(1, 2), kv.values.swapaxes(1, 2))
    ]

    chain = np.tri(3, dtype=bool)
    siblings = chain.copy()
    siblings[2, 1] = False

    differences = []
    for mask, kernel_mask in ((chain, None), (siblings, jnp.asarray(siblings)[None])):
        visible = np.zeros((2, 1, 3, 80), bool)
        for row, end in enumerate(length):
            visible[row, :, :, :end] = True
            visible[row, :, :, end : end + 3] = mask

        expected = jax.nn.dot_product_attention(
            *in_float32, mask=jnp.asarray(visible), implementation="xla"
        )
        out = attend(queries, kv, kernel_mask, jnp.asarray(length), size=3, scale=64**-0.5)
        errors = np.abs(np.asarray(out, np.float32) - expected.reshape(out.shape))
        differences.append(np.max(errors))
    # Python's max could lose a NaN.
    return float(np.max(differences))


class _OnlineSoftmax(NamedTuple):
    """Sums over the tiles so far (FlashAttention-2, algorithm 1), relative to the largest score."""

    out: Float[Array, "rows Hv"]  #: ``Σ exp(s - largest) v``.
    total: Float[Array, " rows"]  #: ``Σ exp(s - largest)``.
    largest: Float[Array, " rows"]  #: The largest score.


def _kernel(
    # [rows, H], token by token.
    queries_ref: Any,
    # [S, H].
    keys_ref: Any,
    # [S, Hv].
    values_ref: Any,
    # [].
    length_ref: Any,
    # The mask [T, M] or [T, S], unless the block is a chain. Then the results: attention over the
    # tiles of the split, [rows, Hv], and the log of the sum of the exponentials of its scores,
    # [rows].
    *mask_and_results: Any,
    splits: int,
    group: int,
    tokens: int,
    size: int,
    scale: float,
    softcap: float | None,
) -> None:
    """Computes one program: some queries of a key head, over every ``splits``-th tile of slots."""
    *masks, out_ref, log_sums_ref = mask_and_results
    rows = queries_ref.shape[0]
    capacity = keys_ref.shape[0]
    split = pl.program_id(2)
    length = length_ref[...]

    # A row is a token and one of the query heads that share the key head.
    row = pl.program_id(1) * rows + jnp.arange(rows, dtype=jnp.int32)
    real = row < tokens * group
    token = row // group

    def is_seen(slots: Array) -> Array:
        if not masks:
            return slots[None, :] <= (length + size - tokens + token)[:, None]
        covered = masks[0].shape[1]
        # Negative for committed slots, which are always seen.
        index = slots - length if covered == size else slots
        inside = real[:, None] & ((index >= 0) & (index < covered))[None, :]
        seen = triton.load(masks[0].at[token[:, None], index[None, :]], mask=inside, other=0)
        return (seen != 0) | (index < 0)[None, :]

    all_rows = pl.ds(0, rows)
    queries = triton.load(queries_ref.at[all_rows, :], mask=real[:, None], other=0)

    def add_tile(index: Array, sums: _OnlineSoftmax) -> _OnlineSoftmax:
        first = (index * splits + split) * _TILE
        slots = first + jnp.arange(_TILE, dtype=jnp.int32)
        inside = slots < capacity

        def load(ref: Any) -> Array:
            return triton.load(ref.at[pl.ds(first, _TILE), :], mask=inside[:, None], other=0)

        scores = triton.dot(queries, load(keys_ref), trans_b=True) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(is_seen(slots), scores, jnp.finfo(jnp.float32).min)

        # What was summed relative to the old maximum is scaled to the new one.
        largest = jnp.maximum(sums.largest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - largest[:, None])
        correction = jnp.exp(sums.largest - largest)
        part = triton.dot(weights.astype(values_ref.dtype), load(values_ref))
        out = sums.out * correction[:, None] + part
        return _OnlineSoftmax(out, sums.total * correction + jnp.sum(weights, axis=1), largest)

    tiles = (length + size + _TILE - 1) // _TILE
    start = _OnlineSoftmax(
        jnp.zeros(out_ref.shape, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.full((rows,), jnp.finfo(jnp.float32).min, jnp.float32),
    )
    num_tiles = jnp.maximum(tiles - split + splits - 1, 0) // splits
    out, total, largest = lax.fori_loop(0, num_tiles, add_tile, start)

    # A split after the end of the block has no tile, and a total of zero.
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    triton.store(out_ref.at[all_rows, :], out / total[:, None], mask=real[:, None])
    triton.store(log_sums_ref.at[all_rows], largest + jnp.log(total), mask=real)
