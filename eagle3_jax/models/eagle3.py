"""EAGLE-3's network (Li et al., 2025, arXiv 2503.01840): fused features, a layer twice as wide, more layers."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.cache import KeyValue
from eagle3_jax.models.config import Eagle3Config, gated, grouped
from eagle3_jax.models.decoder import Block
from eagle3_jax.models.functional import traced_once
from eagle3_jax.models.grouped import Attention
from eagle3_jax.models.layers import Linear, Precision, RMSNorm, SwiGLU
from eagle3_jax.models.memory import Memory
from eagle3_jax.sharding import VOCAB, Axis


class FirstLayer(nnx.Module):
    """The layer that sees the token embedding beside the features; its attention reads both, twice as wide."""

    def __init__(self, config: Eagle3Config, *, precision: Precision, rngs: nnx.Rngs):
        layer, width, eps = config.layers[0], config.width, config.norm_eps
        self.embedding_norm = RMSNorm(width, eps)
        self.feature_norm = RMSNorm(width, eps)
        self.attention = Attention(
            grouped(layer), d_in=2 * width, width=width, norm_eps=eps, precision=precision, rngs=rngs
        )
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, gated(layer), precision=precision, rngs=rngs)
        self.norm_before_residual = config.norm_before_residual

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        fused: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        memory: Memory,
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        normed = self.feature_norm(fused)
        both = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        attended, kv = self.attention(both, positions, memory)
        x = (normed if self.norm_before_residual else fused) + attended
        return x + self.mlp(self.mlp_norm(x)), kv


class Eagle3Head(nnx.Module):
    """The network; the embedding is an input, because most heads share the target's."""

    def __init__(self, config: Eagle3Config, *, precision: Precision, rngs: nnx.Rngs):
        width, eps, chunks = config.width, config.norm_eps, len(config.aux_layers)
        self.config = config
        if config.norm_before_fc:
            self.input_norm = RMSNorm(chunks * config.target_width, eps)
        if config.fc_norm:
            self.fc_norm = nnx.List([RMSNorm(config.target_width, eps) for _ in range(chunks)])
        self.fc = Linear(chunks * config.target_width, width, precision=precision, rngs=rngs)
        self.first = FirstLayer(config, precision=precision, rngs=rngs)
        self.rest = nnx.List(
            [Block(layer, width=width, norm_eps=eps, precision=precision, rngs=rngs) for layer in config.layers[1:]]
        )
        self.norm = RMSNorm(width, eps)
        vocab = Axis(VOCAB, config.draft_vocab_size)
        self.head = Linear(width, config.draft_vocab_size, axes=(None, vocab), precision=precision, rngs=rngs)

    def fuse(self, features: Float[Array, "B T A Dt"]) -> Float[Array, "B T D"]:
        """``fc`` over the concatenated features, low layer first."""
        if self.config.fc_norm:
            chunks = [norm(features[:, :, i]) for i, norm in enumerate(self.fc_norm)]
            features = jnp.stack(chunks, axis=2)
        flat = features.reshape(*features.shape[:2], -1)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        stream: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        memories: Sequence[Memory],
    ) -> tuple[Float[Array, "B T D"], tuple[KeyValue, ...]]:
        """One step of the head: fused features or its own last output in, next output and its keys and values out."""
        x, kv = traced_once(self.first, embedded, stream, positions, memories[0])
        written = [kv]
        for block, memory in zip(self.rest, memories[1:], strict=True):
            x, kv = traced_once(block, x, positions, memory)
            written.append(kv)
        return (self.norm(x) if self.config.norm_output else x), tuple(written)

    def logits(self, output: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Draft logits in float32 from the output of ``__call__``."""
        return self.head(output if self.config.norm_output else self.norm(output)).astype(jnp.float32)
