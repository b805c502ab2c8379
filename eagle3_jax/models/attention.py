"""Attention over runs of keys and values, each under a mask of its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from eagle3_jax.cache import KeyValue
from eagle3_jax.devices.kernels import ordered_sum
from eagle3_jax.models.layers import matmul_precision

# A long prompt is processed in blocks of queries, so that at most 2^27 attention scores (512 MiB in float32) exist at
# once. A block has at least 64 queries. Up to 128 tokens, as in every round, nothing is split.
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
    """What a model does to its scores."""

    scale: float | None = None  #: What they are multiplied with; ``H ** -0.5`` when ``None``.
    #: They become ``softcap * tanh(score / softcap)`` before the mask (Gemma 2); ``None`` for none.
    softcap: float | None = None
    #: ``[heads]``, one more logit in the softmax of each head, which no value belongs to (gpt-oss).
    sinks: Float[Array, " heads"] | None = None

    def factor(self, head_dim: int) -> float:
        """What ``q kᵀ`` is multiplied with."""
        return head_dim**-0.5 if self.scale is None else self.scale

    def of(self, products: Float[Array, "*any S"], head_dim: int) -> Float[Array, "*any S"]:
        """Scores from ``q kᵀ``."""
        scores = products * self.factor(head_dim)
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)


def attention(
    queries: Float[Array, "B T heads H"],
    segments: Sequence[Segment],
    own: Sequence[KeyValue] = (),
    scoring: Scoring = Scoring(),
) -> Float[Array, "B T width"]:
    """Grouped-query attention, ``softmax(q kᵀ / √H) v``, with one float32 softmax over everything that is seen.

    Args:
        queries: Rotated queries.
        segments: Runs of keys under a mask: a cache, the block itself, the levels of a draft tree.
        own: Runs of ``T`` keys of which query ``t`` sees only key ``t`` (the diagonals of the training-time test).
        scoring: What a model does to its scores beyond that.

    Returns:
        ``[B T heads·Hv]``; values may be narrower than keys.
    """
    batch, fed, heads, _ = queries.shape
    block = _query_block_size(queries, segments)
    if batch * fed == 1:
        attend = functools.partial(_attend, scoring=scoring)
        alone = lax.platform_dependent(
            queries,
            list(segments),
            list(own),
            cpu=functools.partial(_attend_in_a_pair, scoring=scoring),
            default=attend,
        )
        return _merge_heads(alone, queries)
    if block >= fed:
        return _merge_heads(_attend(queries, segments, own, scoring), queries)

    def add(index: Array, out: Array) -> Array:
        # The last block may overlap the one before it. A query's result is the same in both.
        start = jnp.minimum(index * block, fed - block)
        cut = lambda leaf, axis: lax.dynamic_slice_in_dim(leaf, start, block, axis)
        some = [Segment(kv, mask if mask.shape[1] == 1 else cut(mask, 1)) for kv, mask in segments]
        diagonals = [KeyValue(cut(keys, 2), cut(values, 2)) for keys, values in own]
        return lax.dynamic_update_slice_in_dim(out, _attend(cut(queries, 1), some, diagonals, scoring), start, axis=3)

    keys, values = segments[0].kv if segments else own[0]
    kv_heads = keys.shape[1]
    # The blocks are collected in float32, so that rounding happens once, as without blocks.
    out = jnp.zeros((batch, kv_heads, heads // kv_heads, fed, values.shape[-1]), jnp.float32)
    return _merge_heads(lax.fori_loop(0, -(-fed // block), add, out), queries)


def _merge_heads(out: Float[Array, "B C groups T Hv"], queries: Float[Array, "B T heads H"]) -> Array:
    """``[B T heads·Hv]`` in the type of the queries."""
    return out.astype(queries.dtype).transpose(0, 3, 1, 2, 4).reshape(*queries.shape[:2], -1)


def _query_block_size(queries: Float[Array, "B T heads H"], segments: Sequence[Segment]) -> int:
    """Returns how many queries are processed at once: all of a short block, else a power of two."""
    batch, fed, heads, _ = queries.shape
    if fed <= _SHORT:
        return fed
    each = batch * heads * max(1, sum(segment.kv.keys.shape[2] for segment in segments))
    return max(_FEWEST, 1 << (_SCORES // each).bit_length() >> 1)


def _attend_in_a_pair(
    queries: Float[Array, "1 1 heads H"], segments: Sequence[Segment], own: Sequence[KeyValue], scoring: Scoring
) -> Float[Array, "1 C groups 1 Hv"]:
    """:func:`_attend` of a single query, with the bits that it has among others.

    XLA's CPU backend rounds some exponentials of a single query otherwise. Products of integers turn that into other
    logits: it can move a rounding of activations.
    """
    twice = lambda leaf, axis: jnp.concatenate([leaf, leaf], axis)
    pair = lax.optimization_barrier(twice(queries, 1))  # else XLA would see that both are equal
    diagonals = [KeyValue(twice(keys, 2), twice(values, 2)) for keys, values in own]
    return lax.optimization_barrier(_attend(pair, segments, diagonals, scoring))[:, :, :, :1]


def _attend(
    queries: Float[Array, "B T heads H"], segments: Sequence[Segment], own: Sequence[KeyValue], scoring: Scoring
) -> Float[Array, "B C groups T Hv"]:
    """:func:`attention` of all queries at once, in float32."""
    batch, fed, heads, head_dim = queries.shape
    kv_heads = (segments[0].kv if segments else own[0]).keys.shape[1]
    groups = heads // kv_heads
    # The query heads of a group and the tokens form one axis: XLA's CPU products want one free axis on each side.
    rows = queries.reshape(batch, fed, kv_heads, groups, head_dim).transpose(0, 2, 3, 1, 4)
    folded = rows.reshape(batch, kv_heads, groups * fed, head_dim)
    contract = functools.partial(
        jnp.einsum, preferred_element_type=jnp.float32, precision=matmul_precision(queries.dtype)
    )
    scores = []
    for segment in segments:
        score = contract("bcqh,bcsh->bcqs", folded, segment.kv.keys)
        score = scoring.of(score.reshape(batch, kv_heads, groups, fed, -1), head_dim)
        # A finite minimum, not -inf: a padded query that sees nothing must not turn into NaN.
        scores.append(jnp.where(segment.mask[:, None, None], score, jnp.finfo(jnp.float32).min))
    for kv in own:
        score = jnp.sum((rows * kv.keys[:, :, None]).astype(jnp.float32), axis=-1, keepdims=True)
        scores.append(scoring.of(score, head_dim))
    # One softmax, taken apart: the largest score and the sum of all runs, and the division after the values are summed.
    # Joining the runs and cutting the weights up again would cost more than the products, on short contexts.
    largest = functools.reduce(jnp.maximum, [jnp.max(score, axis=-1, keepdims=True) for score in scores])
    if scoring.sinks is not None:
        sinks = scoring.sinks.astype(jnp.float32).reshape(1, kv_heads, groups, 1, 1)
        largest = jnp.maximum(largest, sinks)
    weights = [jnp.exp(score - lax.stop_gradient(largest)) for score in scores]
    total = functools.reduce(jnp.add, [ordered_sum(weight) for weight in weights])
    if scoring.sinks is not None:
        total = total + jnp.exp(sinks - lax.stop_gradient(largest))
    out = jnp.zeros((), jnp.float32)
    for segment, weight in zip(segments, weights[: len(segments)], strict=True):
        folded = weight.reshape(batch, kv_heads, groups * fed, -1).astype(queries.dtype)
        part = contract("bcqs,bcsh->bcqh", folded, segment.kv.values)
        out = out + part.reshape(*rows.shape[:-1], -1)
    for kv, weight in zip(own, weights[len(segments) :], strict=True):
        out = out + weight * kv.values[:, :, None]
    return out / total
