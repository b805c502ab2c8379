"""What a target keeps of committed tokens: one cache per layer, and a length for every row."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from eagle3_jax.sharding import HEADS, ROWS


@runtime_checkable
class LayerCache(Protocol):
    """What one layer keeps: a pytree whose leaves lead with ``B``, so that rows can be taken and put.

    A forward hands over what it ``written``: whatever the layer's own kind of state needs to be brought forward
    later, when it is known which tokens stay. Keys and values are put behind what is committed and need no rolling
    back; a recurrent state comes as one state for each token of the block, of which one is chosen.
    """

    def fill(self, written: Any, count: Int[Array, " B"]) -> LayerCache:
        """An empty cache after a forward without one (a prefill), of which the first ``count`` tokens are real."""
        ...

    def commit(
        self, written: Any, length: Int[Array, " B"], count: Int[Array, " B"], nodes: Int[Array, "B T"] | None
    ) -> LayerCache:
        """The cache after a block behind its ``length`` committed tokens.

        Args:
            written: What the layer's forward handed over.
            length: ``[B]``, tokens committed before.
            count: ``[B]``, tokens of the block that stay; 0 must leave the row as it is.
            nodes: ``[B T]``, which token of the block comes first, second, ...; in order when ``None``.
        """
        ...


@struct.dataclass(kw_only=True)
class Cache:
    """The caches of all layers. Row ``b`` has ``length[b]`` committed tokens.

    Attributes:
        layers: One for each layer, of whatever kind the layer needs.
        length: ``[B]``, committed tokens of each row.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]

    @classmethod
    def of(cls, layers: tuple[LayerCache, ...], *, batch: int) -> Cache:
        """An empty cache of empty layers."""
        return cls(layers=layers, length=jnp.zeros((batch,), jnp.int32))

    def fill(self, written: tuple[Any, ...], count: Int[Array, " B"]) -> Cache:
        """An empty cache after a prefill of ``count`` real tokens per row."""
        layers = tuple(layer.fill(one, count) for layer, one in zip(self.layers, written, strict=True))
        return Cache(layers=layers, length=self.length + count)

    def commit(
        self, written: tuple[Any, ...], count: Int[Array, " B"], nodes: Int[Array, "B T"] | None = None
    ) -> Cache:
        """Keep ``count`` tokens of the block that was run behind the committed ones.

        Args:
            written: Per layer, what the forward handed over.
            count: ``[B]`` tokens to keep; 0 leaves a row as it is.
            nodes: ``[B T]``, which token of the block comes first, second, ...; in order when left out.
        """
        layers = tuple(
            layer.commit(one, self.length, count, nodes) for layer, one in zip(self.layers, written, strict=True)
        )
        return Cache(layers=layers, length=self.length + count)


class KeyValue(NamedTuple):
    """Keys (rotated) and values of one layer for a run of tokens. A value may be narrower than a key.

    Attributes:
        keys: ``[B C S H]``.
        values: ``[B C S Hv]``.
    """

    keys: Float[Array, "B C S H"]
    values: Float[Array, "B C S Hv"]


class Segment(NamedTuple):
    """A run of keys and values and who may see them.

    Attributes:
        kv: The keys and values.
        mask: ``[B T S]`` or broadcastable to it; True where query ``t`` sees key ``s``.
    """

    kv: KeyValue
    mask: Bool[Array, "#B #T S"]


@struct.dataclass(kw_only=True)
class KeyValues:
    """A :class:`LayerCache` of attention: one contiguous buffer; row ``b`` owns slots ``0 .. length[b] - 1``.

    Whatever lies at or beyond ``length`` is garbage by definition: it is never seen and is overwritten by the next
    block. A forward writes its block there and attends over everything at once; which of it stays is decided afterwards
    by moving ``length``, so there is nothing to roll back.

    Attributes:
        keys: ``[B C S H]``, rotated. The tokens of a head lie side by side, as the products of attention read them;
            any other order would be transposed anew in every round.
        values: ``[B C S Hv]``.
    """

    axes: ClassVar[tuple[str, ...]] = (ROWS, HEADS)  # what a mesh divides (eagle3_jax.sharding)

    keys: Float[Array, "B C S H"]
    values: Float[Array, "B C S Hv"]

    @classmethod
    def allocate(
        cls,
        *,
        batch: int,
        capacity: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike,
        value_dim: int | None = None,
    ) -> KeyValues:
        """An empty cache. Zeros, not uninitialised memory: NaN times a masked weight of 0 would still be NaN."""
        shape = (batch, num_kv_heads, capacity)
        return cls(keys=jnp.zeros((*shape, head_dim), dtype), values=jnp.zeros((*shape, value_dim or head_dim), dtype))

    @property
    def capacity(self) -> int:
        """``S``, slots per row."""
        return self.keys.shape[2]

    def write(self, block: KeyValue, length: Int[Array, " B"]) -> KeyValue:
        """The buffers with a block behind the committed slots, which stay as they are.

        What would lie past the capacity is dropped (a clamped write would overwrite committed slots instead).
        """
        return KeyValue(_behind(self.keys, block.keys, length), _behind(self.values, block.values, length))

    def fill(self, written: KeyValue, count: Int[Array, " B"]) -> KeyValues:
        """See :class:`LayerCache`; ``written`` is the block alone."""
        return KeyValues(**self.write(written, jnp.zeros_like(count))._asdict())

    def commit(
        self,
        written: KeyValue,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None = None,
    ) -> KeyValues:
        """See :class:`LayerCache`; ``written`` is what :meth:`write` gave."""
        keys, values = (side_by_side(buffer, length, count, nodes) for buffer in written)
        return KeyValues(keys=keys, values=values)


@struct.dataclass(kw_only=True)
class LatentKeys:
    """A :class:`LayerCache` of latent attention: :class:`KeyValues` of one head whose keys are its values too.

    Every head reads the same latents, so each device of a mesh has all of them.

    Attributes:
        latents: ``[B 1 S R]``, of each token its latent, and behind it the rotated key that all heads share.
    """

    axes: ClassVar[tuple[str, ...]] = (ROWS,)

    latents: Float[Array, "B 1 S R"]

    @classmethod
    def allocate(cls, *, batch: int, capacity: int, channels: int, dtype: DTypeLike) -> LatentKeys:
        """An empty cache, of zeros as :meth:`KeyValues.allocate`."""
        return cls(latents=jnp.zeros((batch, 1, capacity, channels), dtype))

    @property
    def capacity(self) -> int:
        """``S``, slots per row."""
        return self.latents.shape[2]

    def write(self, block: KeyValue, length: Int[Array, " B"]) -> KeyValue:
        """See :meth:`KeyValues.write`; keys and values are one array."""
        written = _behind(self.latents, block.keys, length)
        return KeyValue(written, written)

    def fill(self, written: Float[Array, "B 1 T R"], count: Int[Array, " B"]) -> LatentKeys:
        """See :class:`LayerCache`; ``written`` is the block alone."""
        return LatentKeys(latents=_behind(self.latents, written, jnp.zeros_like(count)))

    def commit(
        self,
        written: Float[Array, "B 1 S R"],
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None = None,
    ) -> LatentKeys:
        """See :class:`LayerCache`; ``written`` are the keys that :meth:`write` gave."""
        return LatentKeys(latents=side_by_side(written, length, count, nodes))


class Span(NamedTuple):
    """Which of the positions before it a token of a layer sees.

    By positions, not by slots: the siblings of a tree lie in different slots at one position.

    Attributes:
        window: The last so many, its own included; ``None`` for all.
        chunk: Those of its own run, of runs of so many positions; ``None`` for all.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of them."""
        return self.window is None and self.chunk is None

    def sees(self, of_keys: Int[Array, "B S"], of_queries: Int[Array, "B T"]) -> Bool[Array, "B T S"]:
        """Which keys are near enough to each query; whether they stand before it is not asked here."""
        keys, queries = of_keys[:, None, :], of_queries[:, :, None]
        if self.window is not None:
            return keys > queries - self.window
        assert self.chunk is not None
        return keys // self.chunk == queries // self.chunk


def visible(
    mask: Bool[Array, "#B T M"],
    length: Int[Array, " B"],
    capacity: int,
    *,
    positions: Int[Array, "B M"] | None = None,
    span: Span = Span(),
) -> Bool[Array, "B T S"]:
    """Who sees which slot once a block lies behind the committed ones: all of those, and what ``mask`` says.

    Args:
        mask: Which tokens of the block each one sees; those asked about may be its last ``T`` of ``M``.
        length: Committed slots of each row.
        capacity: ``S``.
        positions: Of all ``M``, absolute; needed for a span that is not all. A committed slot holds the token at the
            position of its number.
        span: Which positions a token sees.
    """
    batch, (fed, size) = length.shape[0], mask.shape[-2:]
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


def _behind(
    buffer: Float[Array, "B C S H"], block: Float[Array, "B C T H"], length: Int[Array, " B"]
) -> Float[Array, "B C S H"]:
    """A buffer with a block behind the committed slots of each row."""
    return _scatter(buffer, length[:, None] + jnp.arange(block.shape[2], dtype=jnp.int32)[None, :], block)


def side_by_side(
    buffer: Float[Array, "B C S H"], length: Int[Array, " B"], count: Int[Array, " B"], nodes: Int[Array, "B T"] | None
) -> Float[Array, "B C S H"]:
    """A buffer with the chosen tokens of the block side by side: read first, all of them, and then written."""
    if nodes is None:
        return buffer
    capacity, step = buffer.shape[2], jnp.arange(nodes.shape[1], dtype=jnp.int32)[None, :]
    # What is not kept goes beyond the capacity, each to a place of its own: scattered indices must be unique.
    slots = jnp.where(step < count[:, None], length[:, None] + step, capacity + step)
    source = jnp.minimum(length[:, None] + nodes, capacity - 1)[:, None, :, None]
    return _scatter(buffer, slots, jnp.take_along_axis(buffer, source, axis=2))


def _scatter(
    buffer: Float[Array, "B C S H"], slots: Int[Array, "B T"], new: Float[Array, "B C T H"]
) -> Float[Array, "B C S H"]:
    """Write each token to its slot; the slots of a row differ, those beyond the capacity too, which are dropped."""
    if slots.size == 1:
        # XLA would turn a single write into a slice update, fuse it into everything that reads the buffer, and copy the
        # buffer for each. So a second one goes along, which is dropped.
        slots = jnp.concatenate([slots, slots + buffer.shape[2]], axis=1)
        new = jnp.concatenate([new, new], axis=2)
    # Unless it is told that no two writes meet, a GPU under deterministic operations makes them one after the other.
    new = new.astype(buffer.dtype)

    def row_by_row(buffer: Array, slots: Array, new: Array) -> Array:
        # And head by head, so that a device which has some of them writes those alone.
        write = lambda buffer, slots, new: buffer.at[slots].set(new, mode="drop", unique_indices=True)
        return jax.vmap(jax.vmap(write, (0, None, 0)))(buffer, slots, new)

    def all_at_once(buffer: Array, slots: Array, new: Array) -> Array:
        rows, heads = jnp.arange(buffer.shape[0])[:, None, None], jnp.arange(buffer.shape[1])[:, None]
        return buffer.at[rows, heads, slots[:, None]].set(new, mode="drop", unique_indices=True)

    # TPUs turn the buffers round and back for the former; over a mesh the latter would gather them.
    if not jax.sharding.get_abstract_mesh().empty:
        return row_by_row(buffer, slots, new)
    return lax.platform_dependent(buffer, slots, new, tpu=all_at_once, default=row_by_row)
