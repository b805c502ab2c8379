"""The target transformer: one decoder of layers of every kind, for prefill, verification and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.cache import Cache
from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.models.config import (
    DecoderConfig,
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
    LayerConfig,
    NormKind,
)
from eagle3_jax.models.delta import GatedDeltaNet
from eagle3_jax.models.experts import ExpertMLP
from eagle3_jax.models.functional import (
    Params,
    bind,
    call_cached,
    init_params,
    param_axes,
    param_products,
    param_shapes,
)
from eagle3_jax.models.grouped import Attention
from eagle3_jax.models.latent import LatentAttention
from eagle3_jax.models.layers import FLOAT32, Linear, Precision, RMSNorm, SwiGLU, embed, product_by_table, scaled
from eagle3_jax.models.memory import Memory, RecurrentMemory, empty_cache, memories
from eagle3_jax.models.quantised import OUTPUT
from eagle3_jax.types import EmbeddingTables, TargetOutput

# The module of each kind of mixer and of MLP.
MIXERS: dict[type, Callable[..., nnx.Module]] = {
    GroupedQuery: Attention,
    Latent: LatentAttention,
    GatedDelta: GatedDeltaNet,
}
MLPS: dict[type, Callable[..., nnx.Module]] = {GatedMLP: SwiGLU, Experts: ExpertMLP}


class Block(nnx.Module):
    """Residual block, by default ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Its :data:`~eagle3_jax.models.config.NormPlaces` say which of the four norms it has, and whether the MLP reads what
    attention reads. Without ``input_norm`` attention reads ``x`` itself.
    """

    def __init__(
        self,
        config: LayerConfig,
        *,
        width: int,
        norm_eps: float,
        norm_kind: NormKind = "plain",
        input_norm: bool = True,
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        norms: dict[str, Any] = {"norm_eps": norm_eps, "norm_kind": norm_kind}
        options: dict[str, Any] = {"precision": precision, "rngs": rngs}
        places = config.norms
        norm = lambda *have: RMSNorm(width, norm_eps, norm_kind) if places in have else None
        self.attention_norm = norm("before", "around", "parallel") if input_norm else None
        self.attention = MIXERS[type(config.mixer)](config.mixer, d_in=width, width=width, **norms, **options)
        self.attention_post_norm = norm("after", "around")
        self.mlp_norm = norm("before", "around")
        self.mlp = MLPS[type(config.mlp)](width, config.mlp, **options)
        self.mlp_post_norm = norm("after", "around")
        self.parallel = places == "parallel"
        self.residual_scale = config.residual_scale

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], memory: Memory | RecurrentMemory
    ) -> tuple[Float[Array, "B T D"], Any]:
        read = _normed(self.attention_norm, x)
        attended, kept = self.attention(read, positions, memory)
        between = x + scaled(_normed(self.attention_post_norm, attended), self.residual_scale)
        read = read if self.parallel else _normed(self.mlp_norm, between)
        return between + scaled(_normed(self.mlp_post_norm, self.mlp(read)), self.residual_scale), kept


def _normed(norm: RMSNorm | None, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return x if norm is None else norm(x)


class Decoder(nnx.Module):
    """Embedding, ``L`` blocks, final norm and output projection."""

    def __init__(self, config: DecoderConfig, *, precision: Precision, rngs: nnx.Rngs):
        self.config = config
        self.precision = precision
        shape = (config.vocab_size, config.width)
        vocab = Axis(VOCAB, config.vocab_size)
        # Divided, a table takes an all-reduce for every lookup: it is where it is the output matrix as well.
        axes = (vocab, None) if config.tie_embeddings else ()
        table = jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02
        self.embedding = nnx.Param(table, axes=axes, product=OUTPUT if config.tie_embeddings else "")
        width = config.width
        eps = config.norm_eps
        kind = config.norm_kind
        options: dict[str, Any] = {"width": width, "norm_eps": eps, "norm_kind": kind, "precision": precision}
        self.blocks = nnx.List([Block(layer, rngs=rngs, **options) for layer in config.layers])
        self.norm = RMSNorm(width, eps, kind)
        if not config.tie_embeddings:
            options = {"product": OUTPUT, "precision": precision, "rngs": rngs}
            self.head = Linear(config.width, config.vocab_size, axes=(None, vocab), **options)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        memories: Sequence[Memory | RecurrentMemory],
        aux_layers: tuple[int, ...],
    ) -> TargetOutput:
        x = embed(self.embedding[...], tokens, self.precision)
        if self.config.embedding_scale != 1.0:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)  # rounded first, as in the PyTorch models
        entering = [x]
        written = []
        for block, memory in zip(self.blocks, memories, strict=True):
            x, kept = call_cached(block, x, positions, memory)
            entering.append(x)
            written.append(kept)
        final = self.norm(x)
        streams = [*entering, final]
        empty = jnp.zeros((*x.shape[:2], 0, x.shape[2]), x.dtype)
        features = jnp.stack([streams[layer] for layer in aux_layers], axis=2) if aux_layers else empty
        return TargetOutput(final=final, features=features, written=tuple(written))

    def unembed(self, final: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        cap = self.config.logit_softcap
        if self.config.tie_embeddings:
            logits = product_by_table(final, self.embedding[...], self.precision)
        else:
            logits = self.head(final)
        logits = scaled(logits.astype(jnp.float32), self.config.logit_scale)
        return logits if cap is None else cap * jnp.tanh(logits / cap)


@dataclasses.dataclass(frozen=True)
class DecoderTarget:
    """A :class:`TargetModel` over :class:`Decoder`: hashable, so it is a static argument of the compiled loop."""

    config: DecoderConfig
    precision: Precision = FLOAT32

    def __post_init__(self) -> None:
        # A description of many layers is hashed once here and not at every call of a compiled function.
        object.__setattr__(self, "_hash", hash((self.config, self.precision)))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def init(self, key: jax.Array) -> Params:
        """Random parameters, for tests and training."""
        return init_params(Decoder, self.config, self.precision, key)

    def param_shapes(self) -> Params:
        """Shapes of every parameter, as a nested dictionary."""
        return param_shapes(Decoder, self.config, self.precision)

    def param_axes(self) -> Params:
        """The :data:`~eagle3_jax.devices.sharding.Axes` of every parameter, in the same nesting."""
        return param_axes(Decoder, self.config, self.precision)

    def param_products(self) -> Params:
        """Which parameters are kernels that may be in eight bits (``eagle3_jax.models.quantised``)."""
        return param_products(Decoder, self.config, self.precision)

    @property
    def vocab_size(self) -> int:
        """``V``."""
        return self.config.vocab_size

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache of ``capacity`` slots per row."""
        dtype = self.precision.activations
        return empty_cache(self.config.layers, batch=batch, capacity=capacity, dtype=dtype)

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B M"],
        mask: Bool[Array, "#B T M"],
        cache: Cache | None = None,
        aux_layers: tuple[int, ...] = (),
        length: Int[Array, " B"] | None = None,
    ) -> TargetOutput:
        """See :class:`eagle3_jax.types.TargetModel`; ``tokens`` may be the last ``T`` of a block (:func:`memories`)."""
        layers = self.config.num_layers
        if not all(0 <= layer <= layers + 1 for layer in aux_layers):
            raise ValueError(
                f"features of the layers {aux_layers} were asked for; this target of {layers} layers has 0 to "
                f"{layers} (what leaves the last one) and {layers + 1} (after the final norm)"
            )
        per_layer = memories(self.config.layers, mask, positions, cache, length)
        if positions.shape != tokens.shape:
            positions = positions[:, positions.shape[1] - tokens.shape[1] :]
        return bind(Decoder, self.config, self.precision, params)(tokens, positions, per_layer, aux_layers)

    def unembed(self, params: Params, final: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits in float32 from final-norm outputs."""
        return bind(Decoder, self.config, self.precision, params).unembed(final)

    def tables(self, params: Params) -> EmbeddingTables:
        """What draft heads without an embedding, or without an output matrix, of their own borrow.

        The matrices alone: heads apply neither the factor of the embedding nor factor and cap of the logits.
        """
        return EmbeddingTables(params["embedding"], None if self.config.tie_embeddings else params["head"]["kernel"])
