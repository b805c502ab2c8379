"""Attention over several runs of keys and values, each with its own mask."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.cache import KeyValue
from eagle3_jax.devices.kernels import max_before_exp, ordered_sum
from eagle3_jax.models.layers import matmul_precision

# A long prompt is processed in blocks of queries, so that at most 2^27 attention scores (512 MiB in
# float32) exist at once. A block has at least 64 queries. Up to 128 tokens, as in every round,
# nothing is split.
_SCORES = 2**27
_SHORT = 128
_FEWEST = 64


class Segment(NamedTuple):
    """A run of keys and values with its attention mask.

    Attributes:
        kv: The keys and values.
        mask: ``[B T S]`` or broadcastable to it. True if query ``t`` may attend to key ``s``.
    """

    kv: KeyValue
    mask: Bool[Array, "#B #T S"]


class Scoring(NamedTuple):
    """How a model computes attention scores from the products ``q kᵀ``."""

    scale: float | None = None  #: Factor of ``q kᵀ``; ``H ** -0.5`` when ``None``.
    #: Scores become ``softcap * tanh(score / softcap)`` before the mask (Gemma 2); ``None`` for no
    #: cap.
    softcap: float | None = None
    #: ``[heads]``, one more logit in the softmax of each head, without a value (gpt-oss).
    sinks: Float[Array, " heads"] | None = None

    def factor(self, head_dim: int) -> float:
        """Returns the factor of ``q kᵀ``."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def score(self, products: Float[Array, "*any S"], head_dim: int) -> Float[Array, "*any S"]:
        """Returns the scores for products ``q kᵀ``: scaled, then capped."""
        scores = products * self.factor(head_dim)
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)


def attention(
    queries: Float[Array, "B T heads H"],
    segments: Sequence[Segment],
    diagonals: Sequence[KeyValue] = (),
    scoring: Scoring = Scoring(),
) -> Float[Array, "B T width"]:
    """Computes grouped-query attention, ``softmax(q kᵀ / √H) v``.

    There is one softmax over all keys in sight, in float32.

    Args:
        queries: ``[B T heads H]``, rotated.
        segments: Runs of keys and values with masks, such as a cache, the block itself, or levels
            of a draft tree.
        diagonals: Runs of ``T`` keys and values; query ``t`` attends only to key ``t`` (the
            training-time test).
        scoring: Scale, cap and sinks of the scores.

    Returns:
        ``[B T heads·Hv]``; values may be narrower than keys.
    """
    batch, fed, heads, _ = queries.shape
    block = _query_block_size(queries, segments)
    if block >= fed:
        return _merge_heads(_attend(queries, segments, diagonals, scoring), queries)

    keys, values = segments[0].kv if segments else diagonals[0]
    kv_heads = keys.shape[1]
    # The blocks are collected in float32, so that rounding happens once, as without blocks.
    out = jnp.zeros((batch, kv_heads, heads // kv_heads, fed, values.shape[-1]), jnp.float32)
    num_blocks = -(-fed // block)
    add = functools.partial(
        _add_block,
        block=block,
        queries=queries,
        segments=segments,
        diagonals=diagonals,
        scoring=scoring,
    )
    return _merge_heads(lax.fori_loop(0, num_blocks, add, out), queries)


def _add_block(
    index: Int[Array, ""],
    out: Float[Array, "B C groups T Hv"],
    *,
    block: int,
    queries: Float[Array, "B T heads H"],
    segments: Sequence[Segment],
    diagonals: Sequence[KeyValue],
    scoring: Scoring,
) -> Float[Array, "B C groups T Hv"]:
    """Computes :func:`_attend` for a block of queries and writes the result into ``out``."""
    # The last block may overlap the one before it. A query's result is the same in both.
    start = jnp.minimum(index * block, queries.shape[1] - block)

    def cut(leaf: Array, axis: int) -> Array:
        return lax.dynamic_slice_in_dim(leaf, start, block, axis)

    cut_segments = [
        Segment(kv, mask if mask.shape[1] == 1 else cut(mask, 1)) for kv, mask in segments
    ]
    cut_diagonals = [KeyValue(cut(keys, 2), cut(values, 2)) for keys, values in diagonals]
    attended = _attend(cut(queries, 1), cut_segments, cut_diagonals, scoring)
    return lax.dynamic_update_slice_in_dim(out, attended, start, axis=3)


def _merge_heads(
    out: Float[Array, "B C groups T Hv"], queries: Float[Array, "B T heads H"]
) -> Array:
    """Returns ``[B T heads·Hv]`` in the type of the queries."""
    return out.astype(queries.dtype).transpose(0, 3, 1, 2, 4).reshape(*queries.shape[:2], -1)


def _query_block_size(queries: Float[Array, "B T heads H"], segments: Sequence[Segment]) -> int:
    """Returns how many queries are processed at once: all of a short block, else a power of two."""
    batch, fed, heads, _ = queries.shape
    if fed <= _SHORT:
        return fed
    num_keys = sum(segment.kv.keys.shape[2] for segment in segments)
    scores_per_query = batch * heads * max(1, num_keys)
    return max(_FEWEST, 1 << (_SCORES // scores_per_query).bit_length() >> 1)


def _attend(
    queries: Float[Array, "B T heads H"],
    segments: Sequence[Segment],
    diagonals: Sequence[KeyValue],
    scoring: Scoring,
) -> Float[Array, "B C groups T Hv"]:
    """Computes :func:`attention` for all queries at once, in float32."""
    batch, fed, heads, head_dim = queries.shape
    any_kv = segments[0].kv if segments else diagonals[0]
    kv_heads = any_kv.keys.shape[1]
    groups = heads // kv_heads
    # The query heads of a group and the tokens form one axis: XLA's CPU products want one free axis
    # on each side.
    rows = queries.reshape(batch, fed, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    folded = rows.reshape(batch, kv_heads, groups * fed, head_dim)

    precision = matmul_precision(queries.dtype)
    contract = functools.partial(
        jnp.einsum, preferred_element_type=jnp.float32, precision=precision
    )

    scores = []
    for segment in segments:
        score = contract("bcqh,bcsh->bcqs", folded, segment.kv.keys)
        score = scoring.score(score.reshape(batch, kv_heads, groups, fed, -1), head_dim)
        # A finite minimum, not -inf: a padded query without any key in sight must not turn into
        # NaN.
        scores.append(jnp.where(segment.mask[:, None, None], score, jnp.finfo(jnp.float32).min))
    for kv in diagonals:
        products = (rows * kv.keys[:, :, None]).astype(jnp.float32)
        score = jnp.sum(products, axis=-1, keepdims=True)
        scores.append(scoring.score(score, head_dim))

    # One softmax over all runs without joining them: the largest score of all, the sum of all, and
    # the division after the values are summed. On short contexts, joining and splitting would cost
    # more than the products.
    maxima = [max_before_exp(lax.stop_gradient(score)) for score in scores]
    largest = functools.reduce(jnp.maximum, maxima)
    if scoring.sinks is not None:
        sinks = scoring.sinks.astype(jnp.float32).reshape(1, kv_heads, groups, 1, 1)
        largest = jnp.maximum(largest, lax.stop_gradient(sinks))
    weights = [jnp.exp(score - largest) for score in scores]
    sums = [ordered_sum(weight) for weight in weights]
    total = functools.reduce(jnp.add, sums)
    if scoring.sinks is not None:
        total = total + jnp.exp(sinks - largest)

    out = jnp.zeros((), jnp.float32)
    for segment, weight in zip(segments, weights[: len(segments)], strict=True):
        folded = weight.reshape(batch, kv_heads, groups * fed, -1).astype(queries.dtype)
        part = contract("bcqs,bcsh->bcqh", folded, segment.kv.values)
        out = out + part.reshape(*rows.shape[:-1], -1)
    for kv, weight in zip(diagonals, weights[len(segments) :], strict=True):
        out = out + weight * kv.values[:, :, None]
    return out / total
