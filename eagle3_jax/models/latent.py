"""Multi-head latent attention as a layer (DeepSeek-V2, arXiv 2405.04434), in its absorbed form."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.cache import KeyValue
from eagle3_jax.devices.sharding import HEADS, Axis
from eagle3_jax.models.attention import Scoring
from eagle3_jax.models.config import Latent, NormKind
from eagle3_jax.models.context import AttentionContext
from eagle3_jax.models.layers import (
    Linear,
    Precision,
    RMSNorm,
    keep_fused,
    normal_param,
    product_by_head,
)
from eagle3_jax.models.rope import rotate


class LatentAttention(nnx.Module):
    """Attention whose keys and values are linear in one latent ``c`` of ``r`` channels.

    With the matrices ``U`` (``key_up``) and ``V`` (``value_up``) of a head, its keys are ``[U c |
    k]`` and its values ``V c``. The rotated key ``k`` is the same for all heads. Keys and values
    are never computed: the query absorbs ``U``, ``q · (U c) = (Uᵀ q) · c``, and the output absorbs
    ``V``, ``Σ p V c = V Σ p c``. The result is attention with one key head of ``r + dr`` channels,
    ``[c | k]``, which are its values as well. Prefill, plain decoding and verification all use this
    form; otherwise rounding could decide approximately tied logits differently in one of them.
    """

    def __init__(
        self,
        config: Latent,
        *,
        d_in: int,
        width: int,
        norm_eps: float,
        norm_kind: NormKind = "plain",
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        # The norms of latents have their own.
        del norm_eps
        eps = config.norm_eps
        heads = config.num_heads
        rank = config.kv_rank
        axis = Axis(HEADS, heads)
        columns = heads * (config.nope_dim + config.rope_dim)
        options = {"precision": precision, "rngs": rngs}

        if config.q_rank is None:
            self.q = Linear(d_in, columns, axes=(None, axis), **options)
        else:
            self.q_a = Linear(d_in, config.q_rank, bias=config.bias, **options)
            self.q_a_norm = RMSNorm(config.q_rank, eps, norm_kind)
            self.q_b = Linear(config.q_rank, columns, axes=(None, axis), **options)

        self.kv_a = Linear(d_in, config.channels, bias=config.bias, **options)
        self.kv_a_norm = RMSNorm(rank, eps, norm_kind)
        self.key_up = normal_param(rngs, (heads, config.nope_dim, rank), rank**-0.5, axes=(axis,))
        self.value_up = normal_param(
            rngs, (heads, rank, config.value_dim), rank**-0.5, axes=(axis,)
        )
        self.o = Linear(
            heads * config.value_dim, width, axes=(axis, None), bias=config.bias, **options
        )
        self.config = config
        self.precision = precision

    def __call__(
        self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"], context: AttentionContext
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B 1 S R"]]:
        """Returns the output ``[B T D]`` and the latents for ``LayerCache.commit`` or ``fill``."""
        config = self.config
        rows = x.shape[:2]
        scale = config.scale or (config.nope_dim + config.rope_dim) ** -0.5
        latents = self._latents(x, positions)
        queries = self._queries(x, positions)
        attended, written = context.attend(queries, KeyValue(latents, latents), Scoring(scale))

        # The rotated channels are not values, but a buffer without them would be a copy of the
        # cache.
        attended = attended.reshape(*rows, config.num_heads, -1)[..., : config.kv_rank]
        values = product_by_head(attended, self.value_up[...], self.precision)
        return self.o(values.reshape(*rows, -1)), written.keys

    def _queries(
        self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T heads R"]:
        """Returns a vector per head: the query of the latents, then that of the rotated key."""
        config = self.config
        queries = self.q(x) if config.q_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        queries = keep_fused(queries).reshape(*x.shape[:2], config.num_heads, -1)
        latent_part = product_by_head(
            queries[..., : config.nope_dim], self.key_up[...], self.precision
        )
        rotated_part = rotate(queries[..., config.nope_dim :], positions, config.rope)
        return jnp.concatenate([latent_part, rotated_part], axis=-1)

    def _latents(
        self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B 1 T R"]:
        """Returns what the cache stores of a token: its latent, then the key that heads share."""
        fused = keep_fused(self.kv_a(x))
        latents = fused[..., : self.config.kv_rank]
        keys = fused[..., self.config.kv_rank :]
        keys = rotate(keys[:, :, None], positions, self.config.rope)[:, :, 0]
        return jnp.concatenate([self.kv_a_norm(latents), keys], axis=-1)[:, None]
