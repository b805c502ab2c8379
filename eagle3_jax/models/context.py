"""What the tokens of a block attend to: the block, runs of earlier tokens, or a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from eagle3_jax.cache import Cache, KeyValue, KeyValues, LayerCache, NoKeys
from eagle3_jax.devices.kernels import indices
from eagle3_jax.models import flash
from eagle3_jax.models.attention import Scoring, Segment, attention
from eagle3_jax.models.config import GatedDelta, GroupedQuery, Latent, LayerConfig, Mixer
from eagle3_jax.models.invariant import ROWS
from eagle3_jax.models.latent_keys import LatentKeys
from eagle3_jax.models.recurrent import Recurrent


class Span(NamedTuple):
    """The range of earlier positions that a layer attends to.

    Positions, not slots: siblings of a tree are in different slots at the same position.
    """

    #: Number of most recent positions, the token's own included; ``None`` for all.
    window: int | None = None
    #: Positions are divided into chunks of this size and a token attends to its own chunk; ``None``
    #: for all.
    chunk: int | None = None

    @property
    def is_unlimited(self) -> bool:
        """Whether it covers every earlier position."""
        return self.window is None and self.chunk is None

    def limit(
        self,
        mask: Bool[Array, "#B T S"],
        key_positions: Int[Array, "B S"],
        query_positions: Int[Array, "B T"],
    ) -> Bool[Array, "#B T S"]:
        """Returns an attention mask without the keys that are outside the range of their query."""
        if self.is_unlimited:
            return mask
        keys = key_positions[:, None, :]
        queries = query_positions[:, :, None]
        if self.window is not None:
            return mask & (keys > queries - self.window)
        assert self.chunk is not None
        return mask & (keys // self.chunk == queries // self.chunk)


def cache_mask(
    mask: Bool[Array, "#B T M"],
    length: Int[Array, " B"],
    capacity: int,
    *,
    positions: Int[Array, "B M"] | None = None,
    span: Span = Span(),
) -> Bool[Array, "B T S"]:
    """Returns the attention mask over all cache slots.

    Every query attends to the committed slots. Slots of the new block follow ``mask``.

    Args:
        mask: ``mask[b, t, m]``: query ``t`` attends to token ``m`` of the block. The queries may be
            the last ``T`` of the ``M`` tokens.
        length: ``[B]``, committed slots of each row.
        capacity: ``S``.
        positions: ``[B M]``, absolute positions of the block; needed for a limited span. A
            committed slot holds the token at the position of its number.
        span: The range of positions that the layer attends to.
    """
    batch = length.shape[0]
    num_queries, size = mask.shape[-2:]
    # The offset of a slot is its index in the block, negative for a committed slot.
    slot = indices(capacity)[None, :]
    offset = slot - length[:, None]

    mask = jnp.broadcast_to(mask, (batch, num_queries, size))
    index = jnp.clip(offset, 0, size - 1)[:, None, :]
    index = jnp.broadcast_to(index, (batch, num_queries, capacity))
    in_block = jnp.take_along_axis(mask, index, axis=2) & (offset < size)[:, None, :]
    is_committed = (offset < 0)[:, None, :]
    visible = jnp.where(is_committed, True, in_block)

    if span.is_unlimited:
        return visible
    assert positions is not None
    block_positions = jnp.take_along_axis(positions, jnp.clip(offset, 0, size - 1), axis=1)
    query_positions = positions if num_queries == size else positions[:, size - num_queries :]
    key_positions = jnp.where(offset < 0, slot, block_positions)
    return span.limit(visible, key_positions, query_positions)


@runtime_checkable
class AttentionContext(Protocol):
    """Attention of one layer for the tokens of a block.

    It decides what they attend to, and which keys and values are stored.
    """

    def attend(
        self, queries: Float[Array, "B T heads H"], kv: Any, scoring: Scoring = Scoring()
    ) -> tuple[Float[Array, "B T width"], Any]:
        """Runs attention of a block over its past and itself.

        Args:
            queries: ``[B T heads H]``.
            kv: Keys and values of the block, a :class:`~eagle3_jax.cache.KeyValue`; ``None`` from a
                layer that has none.
            scoring: Scale, soft cap and sinks of attention.

        Returns:
            The attended values ``[B T width]``, and the keys and values to keep.
        """
        ...


class BlockContext(NamedTuple):
    """Attention without a cache: over the block and separate runs of earlier tokens.

    It returns the keys and values of the block alone. It is used for prefill and training.

    Attributes:
        past: Earlier keys and values with their masks.
        mask: ``[B T T]``, which tokens of the block each token attends to; ``None`` for itself
            alone.
        at_index: Earlier keys and values; each token attends to the one at its index in the block.
    """

    past: Sequence[Segment] = ()
    mask: Bool[Array, "#B T T"] | None = None
    at_index: Sequence[KeyValue] = ()

    def attend(
        self, queries: Float[Array, "B T heads H"], kv: KeyValue, scoring: Scoring = Scoring()
    ) -> tuple[Float[Array, "B T width"], KeyValue]:
        """See :class:`AttentionContext`."""
        return self.read(queries, kv, scoring), kv

    def read(
        self, queries: Float[Array, "B T heads H"], kv: KeyValue, scoring: Scoring
    ) -> Float[Array, "B T width"]:
        """Attends to the keys and values of a block."""
        if self.mask is None:
            return attention(queries, self.past, (*self.at_index, kv), scoring)
        block = Segment(kv, self.mask)
        return attention(queries, (*self.past, block), self.at_index, scoring)


class ForKernel(NamedTuple):
    """Arguments of :mod:`eagle3_jax.models.flash`, which needs no mask over all slots.

    Attributes:
        length: ``[B]``, committed slots.
        size: Number of tokens in the block, including those before the queries.
        seen: The kernel's mask; ``None`` for a chain.
    """

    length: Int[Array, " B"]
    size: int
    seen: Bool[Array, "#B T _"] | None


class CacheContext(NamedTuple):
    """Attention with a cache: the block is written after the committed slots.

    All slots are one run of tokens. So a token attends to the tokens before it in the same slots,
    summed in the same order, whether they were committed earlier or are in its block. A chain is
    verified with the sums of plain decoding.
    """

    layer: KeyValues | LatentKeys  #: The layer's cache.
    length: Int[Array, " B"]  #: ``[B]``, the slot that the block begins at.
    visible: Bool[Array, "B T S"]  #: ``[B T S]``, from :func:`cache_mask`.
    #: For arrays that :mod:`eagle3_jax.models.flash` supports; ``None`` to leave attention to XLA.
    kernel: ForKernel | None = None
    #: Whether the bits of a token depend on nothing but the tokens before it.
    invariant: bool = False

    def attend(
        self, queries: Float[Array, "B T heads H"], kv: KeyValue, scoring: Scoring = Scoring()
    ) -> tuple[Float[Array, "B T width"], KeyValue]:
        """See :class:`AttentionContext`; keeps the whole buffers."""
        written = self.layer.write(kv, self.length)
        return self.read(queries, written, scoring), written

    def read(
        self, queries: Float[Array, "B T heads H"], written: KeyValue, scoring: Scoring
    ) -> Float[Array, "B T width"]:
        """Attends to buffers with the block in them."""
        if self.invariant:
            return self._attend_alike(queries, written, scoring)

        def by_xla(queries: Array, kv: KeyValue) -> Array:
            return attention(queries, (Segment(kv, self.visible),), (), scoring)

        if self.kernel is None or not flash.is_supported(queries, written):
            return by_xla(queries, written)

        options = {
            "scale": scoring.factor(queries.shape[-1]),
            "softcap": scoring.softcap,
            "sinks": scoring.sinks,
            **self.kernel._asdict(),
        }
        # The kernel has no derivative. That of XLA's attention is the same function's.
        by_kernel = jax.custom_jvp(functools.partial(flash.flash_attention, **options))
        by_kernel.defjvp(functools.partial(jax.jvp, by_xla))
        return by_kernel(queries, written)

    def _attend_alike(
        self, queries: Float[Array, "B T heads H"], written: KeyValue, scoring: Scoring
    ) -> Float[Array, "B T width"]:
        """Attends so that the bits of a query do not depend on how many there are."""
        if self.kernel is not None:
            options = {"scale": scoring.factor(queries.shape[-1]), "softcap": scoring.softcap}
            return flash.invariant_attention(queries, written, **options, **self.kernel._asdict())

        # XLA's CPU backend multiplies one or two rows by other kernels than more.
        tokens = queries.shape[1]
        spare = -tokens % ROWS
        visible = jnp.pad(self.visible, ((0, 0), (0, spare), (0, 0)))
        padded = jnp.pad(queries, ((0, 0), (0, spare), (0, 0), (0, 0)))
        return attention(padded, (Segment(written, visible),), (), scoring)[:, :tokens]


class SharedContext(NamedTuple):
    """Attention of a layer without keys to those of an earlier layer, the block's own included."""

    context: BlockContext | CacheContext  #: What its tokens attend to.
    written: KeyValue  #: What the earlier layer returned for the same block.

    def attend(
        self, queries: Float[Array, "B T heads H"], kv: None, scoring: Scoring = Scoring()
    ) -> tuple[Float[Array, "B T width"], None]:
        """See :class:`AttentionContext`; there is nothing to keep."""
        del kv
        return self.context.read(queries, self.written, scoring), None


class RecurrentContext(NamedTuple):
    """The state that the tokens of a block follow, in a recurrent layer.

    Attributes:
        layer: The state at the start of the block; ``None`` if the block is a text from its first
            token on.
        parents: ``[B T]``, the node of the block that each token follows; -1 if it follows
            ``layer``. It is not read for a text, whose tokens are in order.
        real: ``[B T]``, False at padding of a text, which leaves the state unchanged.
    """

    layer: Recurrent | None
    parents: Int[Array, "#B T"]
    real: Bool[Array, "#B T"]


def empty_cache(
    layers: Sequence[LayerConfig], *, batch: int, capacity: int, dtype: DTypeLike
) -> Cache:
    """Returns an empty cache for each layer, for ``batch`` rows of ``capacity`` slots."""
    caches = tuple(_empty_layer(layer.mixer, batch, capacity, dtype) for layer in layers)
    return Cache.of(caches, batch=batch)


def _empty_layer(mixer: Mixer, batch: int, capacity: int, dtype: DTypeLike) -> LayerCache:
    options: dict[str, Any] = {"batch": batch, "dtype": dtype}
    if isinstance(mixer, GroupedQuery) and mixer.shares_keys:
        return NoKeys()
    if isinstance(mixer, GroupedQuery):
        heads = mixer.num_kv_heads
        return KeyValues.allocate(
            capacity=capacity, num_kv_heads=heads, head_dim=mixer.head_dim, **options
        )
    if isinstance(mixer, Latent):
        return LatentKeys.allocate(capacity=capacity, channels=mixer.channels, **options)
    if isinstance(mixer, GatedDelta):
        return Recurrent.allocate(**dataclasses.asdict(mixer), **options)
    raise ValueError(f"a layer of {type(mixer).__name__} has no cache here")


def spans_of(layers: Sequence[LayerConfig]) -> list[Span]:
    """Returns the range of positions that each layer attends to."""
    return [
        (
            Span(layer.mixer.window, layer.mixer.chunk)
            if isinstance(layer.mixer, GroupedQuery)
            else Span()
        )
        for layer in layers
    ]


def attention_contexts(
    layers: Sequence[LayerConfig],
    mask: Bool[Array, "#B T M"],
    positions: Int[Array, "B M"],
    cache: Cache | None = None,
    length: Int[Array, " B"] | None = None,
    *,
    is_chain: bool = False,
    invariant: bool = False,
) -> list[AttentionContext | RecurrentContext]:
    """Returns one attention context per layer for a block.

    Args:
        layers: The layers of the model.
        mask: ``[B T M]``, which tokens of the block each token attends to. With a cache the ``T``
            tokens may be the last of ``M``: the earlier ones are already written after the
            committed slots, as levels of a draft tree.
        positions: ``[B M]``, absolute positions of the block.
        cache: The cache of the same layers. Without one the block of a recurrent layer is a text,
            in order.
        length: ``[B]``, number of real tokens of such a text. Default: the tokens that attend to
            themselves.
        is_chain: Whether every token attends to all tokens of the block before it.
        invariant: Whether the bits of a token depend on nothing but the tokens before it; for
            chains after a cache.

    Raises:
        ValueError: The block of a recurrent layer is not given as a whole.
    """
    recurrent = [isinstance(layer.mixer, GatedDelta) for layer in layers]
    spans = spans_of(layers)
    num_queries, size = mask.shape[-2:]
    if any(recurrent) and num_queries != size:
        raise ValueError(
            f"the last {num_queries} tokens of a block of {size} were given to a recurrent layer;"
            " expected the whole block, as its earlier tokens are in no state"
        )

    states: Sequence[Any] = [None] * len(layers) if cache is None else cache.layers
    if cache is None:
        visible = {span: span.limit(mask, positions, positions) for span in dict.fromkeys(spans)}
        attending = [BlockContext(mask=visible[span]) for span in spans]
    else:
        attending = _with_cache(cache, mask, positions, spans, is_chain, invariant)
    if not any(recurrent):
        return list(attending)

    block = RecurrentContext(None, parents_of(mask), _real(mask, length))
    return [
        block._replace(layer=state) if is_recurrent else context
        for is_recurrent, context, state in zip(recurrent, attending, states, strict=True)
    ]


def _with_cache(
    cache: Cache,
    mask: Bool[Array, "#B T M"],
    positions: Int[Array, "B M"],
    spans: Sequence[Span],
    is_chain: bool,
    invariant: bool,
) -> list[AttentionContext]:
    """Returns one context per layer for a block after the committed slots.

    Recurrent layers do not use theirs.
    """
    capacity = next(
        (layer.capacity for layer in cache.layers if isinstance(layer, KeyValues | LatentKeys)), 0
    )
    visible = {
        span: cache_mask(mask, cache.length, capacity, positions=positions, span=span)
        for span in dict.fromkeys(spans)
    }

    # Earlier levels of a draft tree are in the slots before the queries.
    size = mask.shape[-1]
    earlier_levels = size - mask.shape[-2]
    start = cache.length + earlier_levels if earlier_levels else cache.length
    kernels: dict[Span, ForKernel | None] = dict.fromkeys(spans)
    if flash.is_enabled():
        unlimited_mask = None if is_chain else mask
        for span in spans:
            kernel_mask = unlimited_mask if span.is_unlimited else visible[span]
            kernels[span] = ForKernel(cache.length, size, kernel_mask)

    return [
        CacheContext(
            layer,  # type: ignore[arg-type]
            start,
            visible[span],
            kernels[span],
            invariant,
        )
        for layer, span in zip(cache.layers, spans, strict=True)
    ]


def parents_of(mask: Bool[Array, "#B T T"]) -> Int[Array, "#B T"]:
    """Returns each token's parent: the last other token of the block that it attends to, or -1."""
    size = mask.shape[-1]
    others = mask & ~jnp.eye(size, dtype=jnp.bool_)[None]
    return jnp.max(jnp.where(others, indices(size)[None, None], -1), axis=-1)


def _real(mask: Bool[Array, "#B T T"], length: Int[Array, " B"] | None) -> Bool[Array, "#B T"]:
    """Returns which tokens of a text are real.

    They attend to themselves, and come before ``length``.
    """
    attends_to_itself = jnp.diagonal(mask, axis1=-2, axis2=-1)
    if length is None:
        return attends_to_itself
    is_before_end = indices(mask.shape[-1])[None, :] < length[:, None]
    return attends_to_itself & is_before_end
