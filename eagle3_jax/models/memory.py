"""What the tokens of a block see in one layer: themselves, runs of tokens before them, a cache."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from eagle3_jax.cache import Cache, KeyValue, KeyValues, LayerCache
from eagle3_jax.models import flash
from eagle3_jax.models.attention import Scoring, Segment, attention
from eagle3_jax.models.config import GatedDelta, GroupedQuery, Latent, LayerConfig, Mixer
from eagle3_jax.models.latent_keys import LatentKeys
from eagle3_jax.models.recurrent import Recurrent


class Span(NamedTuple):
    """The range of earlier positions that a layer attends to.

    Positions, not slots: siblings of a tree are in different slots at the same position.
    """

    window: int | None = None  #: Number of most recent positions, the token's own included; ``None`` for all.
    #: Positions are divided into chunks of this size and a token attends to its own chunk; ``None`` for all.
    chunk: int | None = None

    @property
    def whole(self) -> bool:
        """Whether it covers every earlier position."""
        return self.window is None and self.chunk is None

    def sees(self, of_keys: Int[Array, "B S"], of_queries: Int[Array, "B T"]) -> Bool[Array, "B T S"]:
        """``[B T S]``: whether each key is within the range of each query. The order of the two is not checked."""
        keys = of_keys[:, None, :]
        queries = of_queries[:, :, None]
        if self.window is not None:
            return keys > queries - self.window
        assert self.chunk is not None
        return keys // self.chunk == queries // self.chunk


def cache_mask(
    mask: Bool[Array, "#B T M"],
    length: Int[Array, " B"],
    capacity: int,
    *,
    positions: Int[Array, "B M"] | None = None,
    span: Span = Span(),
) -> Bool[Array, "B T S"]:
    """Attention mask over all cache slots: every query sees the committed slots; the new block follows ``mask``.

    Args:
        mask: ``mask[b, t, m]``: query ``t`` sees token ``m`` of the block. The queries may be the last ``T`` of ``M``.
        length: Committed slots of each row.
        capacity: ``S``.
        positions: Absolute positions of all ``M`` tokens; needed for a limited span. A committed slot holds the token
            at the position of its number.
        span: The range of positions that the layer attends to.
    """
    batch = length.shape[0]
    fed, size = mask.shape[-2:]
    slot = jnp.arange(capacity, dtype=jnp.int32)[None, :]
    offset = slot - length[:, None]
    inside = jnp.broadcast_to(mask, (batch, fed, size))
    index = jnp.broadcast_to(jnp.clip(offset, 0, size - 1)[:, None, :], (batch, fed, capacity))
    of_block = jnp.take_along_axis(inside, index, axis=2) & (offset < size)[:, None, :]
    seen = jnp.where((offset < 0)[:, None, :], True, of_block)
    if span.whole:
        return seen
    assert positions is not None
    of_slot = jnp.take_along_axis(positions, jnp.clip(offset, 0, size - 1), axis=1)
    asked = positions if fed == size else positions[:, size - fed :]
    return seen & span.sees(jnp.where(offset < 0, slot, of_slot), asked)


@runtime_checkable
class Memory(Protocol):
    """What the tokens of a block see in one layer, and what stays of them."""

    def attend(
        self, queries: Float[Array, "B T heads H"], kv: KeyValue, scoring: Scoring = Scoring()
    ) -> tuple[Float[Array, "B T width"], KeyValue]:
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

    def attend(
        self, queries: Float[Array, "B T heads H"], kv: KeyValue, scoring: Scoring = Scoring()
    ) -> tuple[Float[Array, "B T width"], KeyValue]:
        """See :class:`Memory`."""
        if self.mask is None:
            return attention(queries, self.past, (*self.own, kv), scoring), kv
        return attention(queries, (*self.past, Segment(kv, self.mask)), self.own, scoring), kv


class ForKernel(NamedTuple):
    """What :mod:`eagle3_jax.models.flash` needs instead of a mask over all slots.

    Attributes:
        length: ``[B]``, committed slots.
        size: Number of tokens in the block, those before the queries included.
        seen: The kernel's mask; ``None`` for a chain.
    """

    length: Int[Array, " B"]
    size: int
    seen: Bool[Array, "#B T _"] | None


class CacheMemory(NamedTuple):
    """A layer of a cache: the block is written behind what is committed, and everything is one run of tokens.

    So a token sees those before it in the same slots, summed in the same order, whether they were committed earlier or
    stand before it in its block: a chain is verified with the very sums of plain decoding.
    """

    layer: KeyValues | LatentKeys  #: The layer's cache.
    length: Int[Array, " B"]  #: ``[B]``, the slot that the block begins at.
    visible: Bool[Array, "B T S"]  #: ``[B T S]``, from :func:`cache_mask`.
    #: For arrays that :mod:`eagle3_jax.models.flash` supports; ``None`` to leave attention to XLA.
    kernel: ForKernel | None = None

    def attend(
        self, queries: Float[Array, "B T heads H"], kv: KeyValue, scoring: Scoring = Scoring()
    ) -> tuple[Float[Array, "B T width"], KeyValue]:
        """See :class:`Memory`; keeps the whole buffers."""
        written = self.layer.write(kv, self.length)
        by_xla = lambda queries, kv: attention(queries, (Segment(kv, self.visible),), (), scoring)
        if self.kernel is None or not flash.is_supported(queries, written):
            return by_xla(queries, written), written
        options = {"scale": scoring.factor(queries.shape[-1]), "softcap": scoring.softcap, "sinks": scoring.sinks}
        options |= self.kernel._asdict()
        by_kernel = jax.custom_jvp(lambda queries, kv: flash.flash_attention(queries, kv, **options))
        by_kernel.defjvp(functools.partial(jax.jvp, by_xla))
        return by_kernel(queries, written), written


class RecurrentMemory(NamedTuple):
    """What the tokens of a block come after, in a layer that folds all of them into a state.

    Attributes:
        layer: The state that the block begins at; ``None`` where the block is a text from its first token on.
        parents: ``[B T]``, the node of the block that each one comes after, -1 for what ``layer`` holds. Not read of a
            text, whose tokens stand in order.
        real: ``[B T]``, False at tokens that are padding of a text. They leave the state as it is.
    """

    layer: Recurrent | None
    parents: Int[Array, "#B T"]
    real: Bool[Array, "#B T"]


def empty_cache(layers: Sequence[LayerConfig], *, batch: int, capacity: int, dtype: DTypeLike) -> Cache:
    """What each layer keeps of its past, for ``batch`` rows of ``capacity`` slots."""

    def of(mixer: Mixer) -> LayerCache:
        if isinstance(mixer, GroupedQuery):
            heads = mixer.num_kv_heads
            size = mixer.head_dim
            return KeyValues.allocate(batch=batch, capacity=capacity, num_kv_heads=heads, head_dim=size, dtype=dtype)
        if isinstance(mixer, Latent):
            return LatentKeys.allocate(batch=batch, capacity=capacity, channels=mixer.channels, dtype=dtype)
        if isinstance(mixer, GatedDelta):
            sizes = {field.name: getattr(mixer, field.name) for field in dataclasses.fields(mixer)}
            return Recurrent.allocate(batch=batch, dtype=dtype, **sizes)
        raise ValueError(f"a layer of {type(mixer).__name__} has no cache here")

    return Cache.of(tuple(of(layer.mixer) for layer in layers), batch=batch)


def spans_of(layers: Sequence[LayerConfig]) -> list[Span]:
    """Which positions a token sees, per layer."""
    return [
        Span(layer.mixer.window, layer.mixer.chunk) if isinstance(layer.mixer, GroupedQuery) else Span()
        for layer in layers
    ]


def memories(
    layers: Sequence[LayerConfig],
    mask: Bool[Array, "#B T M"],
    positions: Int[Array, "B M"],
    cache: Cache | None = None,
    length: Int[Array, " B"] | None = None,
    *,
    is_chain: bool = False,
) -> list[Memory | RecurrentMemory]:
    """One memory per layer for a block, behind the committed slots of a cache where there is one.

    Args:
        layers: Of whom.
        mask: Which tokens of the block each one sees. With a cache the tokens may be its last ``T`` of ``M``: the ones
            before lie behind the committed slots already, as the earlier levels of a draft tree do.
        positions: Of the whole block, absolute.
        cache: Of the same layers. Without one the block of a recurrent layer is a text, in order.
        length: How many tokens of such a text are real; those that see themselves, when left out.
        is_chain: Whether ``mask`` is known to show each token all tokens before it.

    Raises:
        ValueError: Tokens of a recurrent layer lie behind others that no state has taken in.
    """
    recurrent = [isinstance(layer.mixer, GatedDelta) for layer in layers]
    spans = spans_of(layers)
    size = mask.shape[-1]
    fed = mask.shape[-2]
    states: list[Recurrent | None] = [None] * len(layers)
    if any(recurrent) and fed != size:
        raise ValueError(
            f"the last {fed} tokens of a block of {size} were given to a recurrent layer; expected the whole block, as "
            "its earlier tokens are in no state"
        )
    if cache is None:
        alone = {
            span: BlockMemory(mask=mask if span.whole else mask & span.sees(positions, positions))
            for span in set(spans)
        }
        seen: list[Memory] = [alone[span] for span in spans]
    else:
        seen = _behind(cache, mask, positions, spans, is_chain)
        states = [_state(layer) for layer in cache.layers]
    if not any(recurrent):
        return list(seen)
    past = RecurrentMemory(None, parents_of(mask), _real(mask, length))
    return [
        past._replace(layer=state) if folds else memory
        for folds, memory, state in zip(recurrent, seen, states, strict=True)
    ]


def _behind(
    cache: Cache, mask: Bool[Array, "#B T M"], positions: Int[Array, "B M"], spans: Sequence[Span], is_chain: bool
) -> list[Memory]:
    """One memory per layer behind the committed slots; of no use to a layer without slots."""
    capacity = next((layer.capacity for layer in cache.layers if isinstance(layer, KeyValues | LatentKeys)), 0)
    seen = {span: cache_mask(mask, cache.length, capacity, positions=positions, span=span) for span in set(spans)}
    before = mask.shape[-1] - mask.shape[-2]
    start = cache.length + before if before else cache.length
    kernels: dict[Span, ForKernel | None] = dict.fromkeys(spans)
    if flash.is_enabled():
        of_whole = None if is_chain else mask
        kernels = {
            span: ForKernel(cache.length, mask.shape[-1], of_whole if span.whole else seen[span]) for span in spans
        }
    return [
        CacheMemory(layer, start, seen[span], kernels[span])  # type: ignore[arg-type]
        for layer, span in zip(cache.layers, spans, strict=True)
    ]


def parents_of(mask: Bool[Array, "#B T T"]) -> Int[Array, "#B T"]:
    """The last other token of a block that each one sees, which is its parent; -1 where it sees none."""
    size = mask.shape[-1]
    others = mask & ~jnp.eye(size, dtype=jnp.bool_)[None]
    return jnp.max(jnp.where(others, jnp.arange(size, dtype=jnp.int32)[None, None], -1), axis=-1)


def _real(mask: Bool[Array, "#B T T"], length: Int[Array, " B"] | None) -> Bool[Array, "#B T"]:
    itself = jnp.diagonal(mask, axis1=-2, axis2=-1)
    return (
        itself if length is None else itself & (jnp.arange(mask.shape[-1], dtype=jnp.int32)[None, :] < length[:, None])
    )


def _state(layer: LayerCache) -> Recurrent | None:
    return layer if isinstance(layer, Recurrent) else None
