"""Multi-head latent attention as a layer (DeepSeek-V2, 2024, arXiv 2405.04434), in its absorbed form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.cache import KeyValue
from eagle3_jax.devices.sharding import HEADS, Axis
from eagle3_jax.models.attention import Scoring
from eagle3_jax.models.config import Latent, NormKind
from eagle3_jax.models.layers import Linear, Precision, RMSNorm, keep_fused, product_by_head
from eagle3_jax.models.memory import Memory
from eagle3_jax.models.rope import rotate

# The latents are normalised with this, whatever the other norms of the model add.
_LATENT_EPS = 1e-6


class LatentAttention(nnx.Module):
    """Attention whose keys and values are read off one latent ``c`` of ``r`` channels.

    With the matrices ``U`` (``key_up``) and ``V`` (``value_up``) of a head, its keys are ``[U c | k]`` and its values
    ``V c``; the rotated key ``k`` is the same for all heads. Nothing of that is ever laid out: the query takes ``U``,
    ``q · (U c) = (Uᵀ q) · c``, and the output takes ``V``, ``Σ p V c = V Σ p c``. So it is attention with one key head
    of ``r + dr`` channels, ``[c | k]``, which are its values as well. Prefill, plain decoding and verification all take
    this form, lest a near tie is decided otherwise in one of them.
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
        del norm_eps  # the latents have their own
        heads = config.num_heads
        rank = config.kv_rank
        axis = Axis(HEADS, heads)
        columns = heads * (config.nope_dim + config.rope_dim)
        if config.q_rank is None:
            self.q = Linear(d_in, columns, axes=(None, axis), precision=precision, rngs=rngs)
        else:
            self.q_a = Linear(d_in, config.q_rank, bias=config.bias, precision=precision, rngs=rngs)
            self.q_a_norm = RMSNorm(config.q_rank, _LATENT_EPS, norm_kind)
            self.q_b = Linear(config.q_rank, columns, axes=(None, axis), precision=precision, rngs=rngs)
        self.kv_a = Linear(d_in, config.channels, bias=config.bias, precision=precision, rngs=rngs)
        self.kv_a_norm = RMSNorm(rank, _LATENT_EPS, norm_kind)

        def by_head(d_in: int, d_out: int, scale: float) -> nnx.Param:
            value = jax.random.normal(rngs.params(), (heads, d_in, d_out), jnp.float32) * scale
            return nnx.Param(value, axes=(axis,))

        self.key_up = by_head(config.nope_dim, rank, rank**-0.5)
        self.value_up = by_head(rank, config.value_dim, rank**-0.5)
        inner = heads * config.value_dim
        self.o = Linear(inner, width, axes=(axis, None), bias=config.bias, precision=precision, rngs=rngs)
        self.config = config
        self.precision = precision

    def __call__(
        self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"], memory: Memory
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B 1 S R"]]:
        """The block's attention, and the latents that its memory keeps."""
        config = self.config
        rows = x.shape[:2]
        scale = config.scale or (config.nope_dim + config.rope_dim) ** -0.5
        latents = self._latents(x, positions)
        attended, kept = memory.attend(self._queries(x, positions), KeyValue(latents, latents), Scoring(scale))
        # The rotated channels are no values, but a buffer without them would be a copy of the cache.
        attended = attended.reshape(*rows, config.num_heads, -1)[..., : config.kv_rank]
        return self.o(product_by_head(attended, self.value_up[...], self.precision).reshape(*rows, -1)), kept.keys

    def _queries(self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"]) -> Float[Array, "B T heads R"]:
        """Queries of the latents, and behind them those of the rotated key."""
        config = self.config
        queries = self.q(x) if config.q_rank is None else self.q_b(self.q_a_norm(self.q_a(x)))
        queries = keep_fused(queries).reshape(*x.shape[:2], config.num_heads, -1)
        of_latents = product_by_head(queries[..., : config.nope_dim], self.key_up[...], self.precision)
        return jnp.concatenate([of_latents, rotate(queries[..., config.nope_dim :], positions, config.rope)], axis=-1)

    def _latents(self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"]) -> Float[Array, "B 1 T R"]:
        """What the cache keeps of each token: its normalised latent, and the rotated key of all heads."""
        both = keep_fused(self.kv_a(x))
        latents = both[..., : self.config.kv_rank]
        keys = both[..., self.config.kv_rank :]
        keys = rotate(keys[:, :, None], positions, self.config.rope)[:, :, 0]
        return jnp.concatenate([self.kv_a_norm(latents), keys], axis=-1)[:, None]
