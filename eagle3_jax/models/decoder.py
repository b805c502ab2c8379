"""The target transformer: one Llama-style decoder for prefill, verification and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from eagle3_jax.cache import Cache, KeyValue, KeyValues, Segment, near, visible
from eagle3_jax.models.config import DecoderConfig, GroupedQuery, LayerConfig
from eagle3_jax.models.functional import Params, bind, init_params, param_axes, param_shapes, traced_once
from eagle3_jax.models.layers import (
    FLOAT32,
    Linear,
    Precision,
    RMSNorm,
    SwiGLU,
    apart,
    attention,
    embed,
    product,
)
from eagle3_jax.models.rope import rotate, scale_queries
from eagle3_jax.sharding import HEADS, VOCAB, Axis
from eagle3_jax.types import Tables, TargetOutput


class Attention(nnx.Module):
    """Grouped-query self-attention with rotary positions.

    Queries, keys and values are one product: few large products read weights faster than many small. Its columns are
    ``[C, g + 2, H]``: the ``g`` query heads of a key head, the key head, its values. So whatever divides the key heads
    over devices divides the product, and nothing has to move between them.
    """

    def __init__(
        self, config: GroupedQuery, *, d_in: int, width: int, norm_eps: float, precision: Precision, rngs: nnx.Rngs
    ):
        heads, size, axis = config.num_heads, config.head_dim, Axis(HEADS, config.num_kv_heads)
        columns = (heads + 2 * config.num_kv_heads) * size
        self.qkv = Linear(d_in, columns, axes=(None, axis), bias=config.qkv_bias, precision=precision, rngs=rngs)
        self.o = Linear(heads * size, width, axes=(axis, None), bias=config.o_bias, precision=precision, rngs=rngs)
        if config.qk_norm:
            self.q_norm = RMSNorm(size, norm_eps)
            self.k_norm = RMSNorm(size, norm_eps)
        self.config = config

    def __call__(
        self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"], memory: Memory
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        """The block's attention, and the keys and values that its memory keeps."""
        attended, kept = memory.attend(*self.project(x, positions))
        return self.o(attended), kept

    def project(
        self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T heads H"], KeyValue]:
        """Queries, keys and values of the same tokens, rotated."""
        config = self.config
        rows, group = x.shape[:2], config.group
        fused = apart(self.qkv(x)).reshape(*rows, config.num_kv_heads, group + 2, config.head_dim)
        queries = fused[:, :, :, :group].reshape(*rows, config.num_heads, config.head_dim)
        keys, values = fused[:, :, :, group], fused[:, :, :, group + 1]
        if config.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if config.rope is not None:
            queries, keys = rotate(queries, positions, config.rope), rotate(keys, positions, config.rope)
        if config.query_scaling is not None:
            queries = scale_queries(queries, positions, config.query_scaling)
        return queries, KeyValue(jnp.moveaxis(keys, 1, 2), jnp.moveaxis(values, 1, 2))


@runtime_checkable
class Memory(Protocol):
    """What the tokens of a block see in one layer, and what stays of them."""

    def attend(self, queries: Float[Array, "B T heads H"], kv: KeyValue) -> tuple[Float[Array, "B T width"], KeyValue]:
        """Attention of a block over its past and itself, and the keys and values to keep."""
        ...


class BlockMemory(NamedTuple):
    """The block and runs of tokens before it, each apart; keeps the block alone.

    For prefill, for training and for levels of a draft tree, which are guesses and enter no cache.

    Attributes:
        past: Earlier keys and values with their masks.
        mask: ``[B T T]``, which tokens of the block each one sees; ``None`` for itself alone.
        own: Earlier keys and values of which each token sees those at its own index.
    """

    past: Sequence[Segment] = ()
    mask: Bool[Array, "#B T T"] | None = None
    own: Sequence[KeyValue] = ()

    def attend(self, queries: Float[Array, "B T heads H"], kv: KeyValue) -> tuple[Float[Array, "B T width"], KeyValue]:
        """See :class:`Memory`."""
        if self.mask is None:
            return attention(queries, self.past, (*self.own, kv)), kv
        return attention(queries, (*self.past, Segment(kv, self.mask)), self.own), kv


class CacheMemory(NamedTuple):
    """A layer of a cache: the block is written behind what is committed, and everything is one run of tokens.

    So a token sees those before it in the same slots, summed in the same order, whether they were committed earlier or
    stand before it in its block: a chain is verified with the very sums of plain decoding.

    Attributes:
        layer: The layer's cache.
        length: ``[B]``, the slot that the block begins at.
        visible: ``[B T S]``, from :func:`eagle3_jax.cache.visible`.
    """

    layer: KeyValues
    length: Int[Array, " B"]
    visible: Bool[Array, "B T S"]

    def attend(self, queries: Float[Array, "B T heads H"], kv: KeyValue) -> tuple[Float[Array, "B T width"], KeyValue]:
        """See :class:`Memory`; keeps the whole buffers."""
        written = self.layer.write(kv, self.length)
        return attention(queries, (Segment(written, self.visible),)), written


def empty_cache(layers: Sequence[LayerConfig], *, batch: int, capacity: int, dtype: DTypeLike) -> Cache:
    """What each layer keeps of its past, for ``batch`` rows of ``capacity`` slots."""
    return Cache.of(
        tuple(
            KeyValues.allocate(
                batch=batch,
                capacity=capacity,
                num_kv_heads=layer.mixer.num_kv_heads,
                head_dim=layer.mixer.head_dim,
                dtype=dtype,
            )
            for layer in layers
        ),
        batch=batch,
    )


def windows_of(layers: Sequence[LayerConfig]) -> list[int | None]:
    """Per layer, how many positions a token sees, its own included; ``None`` for all."""
    return [layer.mixer.window for layer in layers]


def memories(
    windows: Sequence[int | None],
    mask: Bool[Array, "#B T M"],
    positions: Int[Array, "B M"],
    cache: Cache | None = None,
) -> list[Memory]:
    """One memory per layer for a block, behind the committed slots of a cache where there is one.

    Args:
        windows: Per layer, how many positions a token sees, its own included; ``None`` for all.
        mask: Which tokens of the block each one sees. With a cache the tokens may be its last ``T`` of ``M``: the ones
            before lie behind the committed slots already, as the earlier levels of a draft tree do.
        positions: Of the whole block, absolute.
        cache: Of :class:`~eagle3_jax.cache.KeyValues` layers.
    """
    if cache is None:
        alone = {
            window: BlockMemory(mask=mask if window is None else mask & near(positions, positions, window))
            for window in set(windows)
        }
        return [alone[window] for window in windows]
    capacity = cache.layers[0].capacity  # type: ignore[attr-defined]
    seen = {
        window: visible(mask, cache.length, capacity, positions=positions, window=window) for window in set(windows)
    }
    before = mask.shape[-1] - mask.shape[-2]
    start = cache.length + before if before else cache.length
    return [
        CacheMemory(layer, start, seen[window])  # type: ignore[arg-type]
        for layer, window in zip(cache.layers, windows, strict=True)
    ]


class Block(nnx.Module):
    """Pre-norm residual block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: LayerConfig, *, width: int, norm_eps: float, precision: Precision, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(width, norm_eps)
        self.attention = Attention(
            config.mixer, d_in=width, width=width, norm_eps=norm_eps, precision=precision, rngs=rngs
        )
        self.mlp_norm = RMSNorm(width, norm_eps)
        self.mlp = SwiGLU(width, config.mlp, precision=precision, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], memory: Memory
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        attended, kv = self.attention(self.attention_norm(x), positions, memory)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), kv


class Decoder(nnx.Module):
    """Embedding, ``L`` blocks, final norm and output projection."""

    def __init__(self, config: DecoderConfig, *, precision: Precision, rngs: nnx.Rngs):
        self.config, self.precision = config, precision
        shape, vocab = (config.vocab_size, config.width), Axis(VOCAB, config.vocab_size)
        # Divided, a table takes an all-reduce for every lookup: it is where it is the output matrix as well.
        axes = (vocab, None) if config.tie_embeddings else ()
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), shape, jnp.float32) * 0.02, axes=axes)
        width, eps = config.width, config.norm_eps
        self.blocks = nnx.List(
            [Block(layer, width=width, norm_eps=eps, precision=precision, rngs=rngs) for layer in config.layers]
        )
        self.norm = RMSNorm(config.width, config.norm_eps)
        if not config.tie_embeddings:
            self.head = Linear(config.width, config.vocab_size, axes=(None, vocab), precision=precision, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        memories: Sequence[Memory],
        aux_layers: tuple[int, ...],
    ) -> TargetOutput:
        x = embed(self.embedding[...], tokens, self.precision)
        entering, written = [x], []
        for block, memory in zip(self.blocks, memories, strict=True):
            x, kept = traced_once(block, x, positions, memory)
            entering.append(x)
            written.append(kept)
        final = self.norm(x)
        streams = [*entering, final]
        empty = jnp.zeros((*x.shape[:2], 0, x.shape[2]), x.dtype)
        features = jnp.stack([streams[layer] for layer in aux_layers], axis=2) if aux_layers else empty
        return TargetOutput(final=final, features=features, written=tuple(written))

    def unembed(self, final: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        if self.config.tie_embeddings:
            return product(final, self.embedding[...].T, self.precision).astype(jnp.float32)
        return self.head(final).astype(jnp.float32)


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
        """The :data:`~eagle3_jax.sharding.Axes` of every parameter, in the same nesting."""
        return param_axes(Decoder, self.config, self.precision)

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
        del length  # keys and values are addressed by position: those of padding are never seen
        layers = self.config.num_layers
        if not all(0 <= layer <= layers + 1 for layer in aux_layers):
            raise ValueError(
                f"features of the layers {aux_layers} were asked for; this target of {layers} layers has 0 to "
                f"{layers} (what leaves the last one) and {layers + 1} (after the final norm)"
            )
        per_layer = memories(windows_of(self.config.layers), mask, positions, cache)
        if positions.shape != tokens.shape:
            positions = positions[:, positions.shape[1] - tokens.shape[1] :]
        return bind(Decoder, self.config, self.precision, params)(tokens, positions, per_layer, aux_layers)

    def unembed(self, params: Params, final: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
        """Logits in float32 from final-norm outputs."""
        return bind(Decoder, self.config, self.precision, params).unembed(final)

    def tables(self, params: Params) -> Tables:
        """What draft heads without an embedding, or without an output matrix, of their own borrow."""
        return Tables(params["embedding"], None if self.config.tie_embeddings else params["head"]["kernel"])


def causal_mask(size: int) -> Bool[Array, "1 T T"]:
    """Every token sees itself and what stands before it."""
    return jnp.tril(jnp.ones((size, size), jnp.bool_))[None]
