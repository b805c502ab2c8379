"""Grouped-query attention as a layer: projections, norms and rotation; its context attends."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.cache import KeyValue
from eagle3_jax.devices.sharding import HEADS, Axis
from eagle3_jax.models.attention import Scoring
from eagle3_jax.models.config import GroupedQuery, NormKind
from eagle3_jax.models.context import AttentionContext
from eagle3_jax.models.layers import Linear, Precision, RMSNorm, keep_fused, normalised
from eagle3_jax.models.rope import rotate, scale_queries


class Projections(NamedTuple):
    """What the tokens of a block attend with."""

    queries: Float[Array, "B T heads H"]  #: ``[B T heads H]``.
    kv: KeyValue | None  #: Keys and values; ``None`` if the layer has none.
    #: ``[B T heads·H]``, gates of the attended values; ``None`` if the layer has none.
    gate: Float[Array, "B T width"] | None


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions.

    Queries, keys and values are one product, because few large products read weights faster than
    many small ones. Its columns are ``[C, g + 2, H]``: the ``g`` query heads of a key head, the key
    head, its values. A mesh that divides the key heads therefore divides the product, and nothing
    moves between devices. With an output gate the columns are ``[C, 2 g + 2, H]``, the gates of the
    query heads last. Without values of its own, or keys, a layer has fewer columns.
    """

    def __init__(
        self,
        config: GroupedQuery,
        *,
        d_in: int,
        width: int,
        norm_eps: float,
        norm_kind: NormKind = "plain",
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        heads = config.num_heads
        size = config.head_dim
        axis = Axis(HEADS, config.num_kv_heads)
        projected = config.num_projected * config.num_kv_heads
        columns = (heads * (1 + config.output_gate) + projected) * size
        options = {"precision": precision, "rngs": rngs}

        self.qkv = Linear(d_in, columns, axes=(None, axis), bias=config.qkv_bias, **options)
        self.o = Linear(heads * size, width, axes=(axis, None), bias=config.o_bias, **options)
        if config.qk_norm:
            norm = functools.partial(
                _norm_of_heads, eps=norm_eps, kind=norm_kind, invariant=precision.invariant
            )
            self.q_norm = norm(config, heads)
            if not config.shares_keys:
                self.k_norm = norm(config, config.num_kv_heads)

        if config.sinks:
            self.sinks = nnx.Param(jnp.zeros((heads,), jnp.float32), axes=(axis,))
        self.config = config
        self.norm_eps = norm_eps

    def __call__(
        self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"], context: AttentionContext
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Returns the output ``[B T D]``, and the keys and values for the layer's cache, if any."""
        config = self.config
        queries, kv, gate = self.project(x, positions)
        sinks = self.sinks[...] if config.sinks else None
        scoring = Scoring(config.scale, config.softcap, sinks)
        attended, written = context.attend(queries, kv, scoring)
        gated = attended if gate is None else attended * jax.nn.sigmoid(gate)
        return self.o(gated), written

    def project(self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"]) -> Projections:
        """Returns queries, keys and values, rotated, and the output gates."""
        config = self.config
        rows = x.shape[:2]
        group = config.group
        fused = keep_fused(self.qkv(x)).reshape(*rows, config.num_kv_heads, -1, config.head_dim)
        queries = fused[:, :, :, :group].reshape(*rows, config.num_heads, config.head_dim)
        end = group + config.num_projected
        gate = fused[:, :, :, end:].reshape(*rows, -1) if config.output_gate else None
        if config.shares_keys:
            (queries,) = self._located(positions, queries)
            return Projections(queries, None, gate)

        keys = fused[:, :, :, group]
        values = fused[:, :, :, end - 1]
        if config.value_norm:
            values = normalised(values, self.norm_eps).astype(values.dtype)
        queries, keys = self._located(positions, queries, keys)
        kv = KeyValue(jnp.moveaxis(keys, 1, 2), jnp.moveaxis(values, 1, 2))
        return Projections(queries, kv, gate)

    def _located(
        self, positions: Int[Array, "B T"], *heads: Float[Array, "B T _ H"]
    ) -> list[Float[Array, "B T _ H"]]:
        """Returns queries, and keys if they are there, normalised and rotated by position."""
        config = self.config
        vectors = list(heads)
        norms = (getattr(self, "q_norm", None), getattr(self, "k_norm", None))
        if config.qk_norm and config.qk_norm_kind == "whole":
            joined = [x.reshape(*x.shape[:2], -1) for x in vectors]
            normed = [norm(x) for norm, x in zip(norms, joined, strict=False) if norm]
            vectors = [y.reshape(x.shape) for x, y in zip(vectors, normed, strict=True)]
        elif config.qk_norm:
            vectors = [norm(x) for norm, x in zip(norms, vectors, strict=False) if norm]

        if config.rope is not None:
            vectors = [rotate(x, positions, config.rope) for x in vectors]
        if config.qk_l2_norm:
            vectors = [normalised(x, self.norm_eps).astype(x.dtype) for x in vectors]
        if config.query_scaling is not None:
            vectors[0] = scale_queries(vectors[0], positions, config.query_scaling)
        return vectors


def _norm_of_heads(
    config: GroupedQuery, count: int, *, eps: float, kind: NormKind, invariant: bool
) -> RMSNorm:
    """Returns the norm of the queries or keys of ``count`` heads."""
    channels = config.head_dim * count if config.qk_norm_kind == "whole" else config.head_dim
    heads = count if config.qk_norm_kind == "own-weights" else None
    return RMSNorm(channels, eps, kind, heads=heads, invariant=invariant)
