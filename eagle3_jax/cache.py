"""The caches of committed tokens: one per layer, and a length for every row."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, DTypeLike, Float, Int

from eagle3_jax.devices.kernels import gather_tokens, indices, scatter_tokens
from eagle3_jax.devices.sharding import HEADS, ROWS


@runtime_checkable
class LayerCache(Protocol):
    """The cache of one layer: a pytree whose leaves have ``B`` as their first axis.

    A forward returns ``written``: everything that the layer needs to commit tokens later, when it
    is known which ones are accepted. For attention these are the buffers with the new keys and
    values after the committed ones, so nothing has to be rolled back. For a recurrent layer it is
    one update per token of the block.
    """

    def fill(self, written: Any, count: Int[Array, " B"]) -> LayerCache:
        """Fills an empty cache from a prefill.

        Args:
            written: The value that the layer's forward returned *without* a cache. For attention:
                the keys and values of the prompt. For a recurrent layer: the state after the last
                real token.
            count: ``[B]``, number of real tokens of the prompt.
        """
        ...

    def commit(
        self,
        written: Any,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None,
    ) -> LayerCache:
        """Commits tokens of a block that was run after ``length`` committed ones.

        Args:
            written: The value that the layer's forward returned *with* this cache. It covers every
                token of the block, because the accepted ones are not known yet. For attention: the
                buffers with the block in them. For a recurrent layer: the state after each token.
            length: ``[B]``, tokens committed before.
            count: ``[B]``, number of tokens to commit; 0 must leave the row unchanged.
            nodes: ``[B T]``, index in the block of the first, second, ... token to commit; ``None``
                for block order.
        """
        ...


class Cache(struct.PyTreeNode, kw_only=True):
    """The caches of all layers. Row ``b`` has ``length[b]`` committed tokens.

    Attributes:
        layers: One cache per layer; kinds may differ.
        length: ``[B]``, committed tokens of each row.
    """

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]

    @classmethod
    def of(cls, layers: tuple[LayerCache, ...], *, batch: int) -> Cache:
        """Returns an empty cache of empty layers."""
        return cls(layers=layers, length=jnp.zeros((batch,), jnp.int32))

    def fill(self, written: tuple[Any, ...], count: Int[Array, " B"]) -> Cache:
        """Fills an empty cache from a prefill of ``count`` real tokens per row."""
        pairs = zip(self.layers, written, strict=True)
        layers = tuple(layer.fill(prompt, count) for layer, prompt in pairs)
        return Cache(layers=layers, length=self.length + count)

    def commit(
        self,
        written: tuple[Any, ...],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None = None,
    ) -> Cache:
        """Commits ``count`` tokens of the block that was run after the committed ones.

        Args:
            written: For each layer, the value that its forward returned.
            count: ``[B]``, number of tokens to commit; 0 leaves a row unchanged.
            nodes: ``[B T]``, index in the block of the first, second, ... token to commit; ``None``
                for block order.
        """
        pairs = zip(self.layers, written, strict=True)
        layers = tuple(layer.commit(block, self.length, count, nodes) for layer, block in pairs)
        return Cache(layers=layers, length=self.length + count)

    def keep(self, written: tuple[Any, ...]) -> Cache:
        """Keeps a block after the committed tokens, and commits none of it; see :meth:`commit`."""
        # In block order nothing moves, whatever the count, and the length is at hand.
        pairs = zip(self.layers, written, strict=True)
        layers = tuple(
            layer.commit(block, self.length, self.length, None) for layer, block in pairs
        )
        return Cache(layers=layers, length=self.length)


class KeyValue(NamedTuple):
    """Keys (rotated) and values of one layer for a run of tokens.

    A value may be narrower than a key.

    Attributes:
        keys: ``[B C S H]``.
        values: ``[B C S Hv]``.
    """

    keys: Float[Array, "B C S H"]
    values: Float[Array, "B C S Hv"]


class KeyValues(struct.PyTreeNode, kw_only=True):
    """A :class:`LayerCache` of attention: one contiguous buffer of slots per row.

    Row ``b`` has its committed tokens in the slots ``0 .. length[b] - 1``. Slots at or beyond
    ``length`` are ignored, and the next block overwrites them. A forward writes its block there and
    attends to all slots at once. Tokens are committed afterwards by increasing ``length``, so
    nothing is rolled back.

    Attributes:
        keys: ``[B C S H]``, rotated. The tokens of a head are adjacent, as the products of
            attention read them; any other order would be transposed in every round.
        values: ``[B C S Hv]``.
    """

    #: Names of the first axes, as a mesh divides them (:mod:`eagle3_jax.devices.sharding`).
    axes: ClassVar[tuple[str, ...]] = (ROWS, HEADS)

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
        """Returns an empty cache of zeros.

        Zeros are needed, because NaN times a masked weight of 0 is NaN.
        """
        shape = (batch, num_kv_heads, capacity)
        keys = jnp.zeros((*shape, head_dim), dtype)
        values = jnp.zeros((*shape, value_dim or head_dim), dtype)
        return cls(keys=keys, values=values)

    @property
    def capacity(self) -> int:
        """``S``, slots per row."""
        return self.keys.shape[2]

    def write(self, block: KeyValue, length: Int[Array, " B"]) -> KeyValue:
        """Returns the buffers with a block after the committed slots, which stay unchanged.

        Tokens past the capacity are dropped. (A clamped write would overwrite committed slots
        instead.)
        """
        keys = write_block(self.keys, block.keys, length)
        values = write_block(self.values, block.values, length)
        return KeyValue(keys, values)

    def fill(self, written: KeyValue, count: Int[Array, " B"]) -> KeyValues:
        """See :class:`LayerCache`; ``written`` holds the keys and values of the block."""
        keys, values = self.write(written, jnp.zeros_like(count))
        return KeyValues(keys=keys, values=values)

    def commit(
        self,
        written: KeyValue,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None = None,
    ) -> KeyValues:
        """See :class:`LayerCache`; ``written`` is the result of :meth:`write`."""
        keys, values = (compact_accepted(buffer, length, count, nodes) for buffer in written)
        return KeyValues(keys=keys, values=values)


class NoKeys(struct.PyTreeNode):
    """The :class:`LayerCache` of a layer that has no keys: it reads those of an earlier layer."""

    def fill(self, written: None, count: Int[Array, " B"]) -> NoKeys:
        """See :class:`LayerCache`; nothing is written."""
        del written, count
        return self

    def commit(
        self,
        written: None,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None = None,
    ) -> NoKeys:
        """See :class:`LayerCache`; nothing is written."""
        del written, length, count, nodes
        return self


def write_block(
    buffer: Float[Array, "B C S H"], block: Float[Array, "B C T H"], length: Int[Array, " B"]
) -> Float[Array, "B C S H"]:
    """Writes a block after the committed slots of each row."""
    slots = length[:, None] + indices(block.shape[2])[None, :]
    return scatter_tokens(buffer, slots, block)


def compact_accepted(
    buffer: Float[Array, "B C S H"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    nodes: Int[Array, "B T"] | None,
) -> Float[Array, "B C S H"]:
    """Moves the accepted tokens of the block next to the committed ones.

    All are read before any is written.
    """
    # In block order they are there already.
    if nodes is None:
        return buffer

    capacity = buffer.shape[2]
    step = indices(nodes.shape[1])[None, :]
    is_accepted = step < count[:, None]
    # Rejected tokens go to slots beyond the capacity, each to another: scattered indices must be
    # unique.
    slots = jnp.where(is_accepted, length[:, None] + step, capacity + step)

    # Nodes past the capacity were not written; the bound keeps the read inside the buffer.
    source = jnp.minimum(length[:, None] + nodes, capacity - 1)
    accepted = gather_tokens(buffer, source)
    return scatter_tokens(buffer, slots, accepted)
