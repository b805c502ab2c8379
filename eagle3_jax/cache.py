"""Keys and values of committed tokens, with a length for every row."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, DTypeLike, Float, Int


class KeyValue(NamedTuple):
    """Keys (rotated) and values of one layer for a run of tokens.

    Attributes:
        keys: ``[B C S H]``.
        values: ``[B C S H]``.
    """

    keys: Float[Array, "B C S H"]
    values: Float[Array, "B C S H"]


class Segment(NamedTuple):
    """A run of keys and values and who may see them.

    Attributes:
        kv: The keys and values.
        mask: ``[B T S]`` or broadcastable to it; True where query ``t`` sees key ``s``.
    """

    kv: KeyValue
    mask: Bool[Array, "#B #T S"]


@struct.dataclass(kw_only=True)
class KVCache:
    """One contiguous buffer per layer; row ``b`` owns slots ``0 .. length[b] - 1``.

    Whatever lies at or beyond ``length`` is garbage by definition: it is never seen and is overwritten by the next
    block. A forward writes its block there, layer by layer, and attends over everything at once; which of it stays is
    decided afterwards by moving ``length``, so there is nothing to roll back.

    Attributes:
        keys: Per layer ``[B C S H]``, rotated. The tokens of a head lie side by side, as the products of attention
            read them; any other order would be transposed anew in every round.
        values: Per layer ``[B C S H]``.
        length: ``[B]``, committed slots of each row.
    """

    keys: tuple[Float[Array, "B C S H"], ...]
    values: tuple[Float[Array, "B C S H"], ...]
    length: Int[Array, " B"]

    @classmethod
    def allocate(
        cls, *, batch: int, capacity: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike
    ) -> KVCache:
        """An empty cache. Zeros, not uninitialised memory: NaN times a masked weight of 0 would still be NaN."""
        shape = (batch, num_kv_heads, capacity, head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            length=jnp.zeros((batch,), jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """``S``, slots per row."""
        return self.keys[0].shape[2]

    def segment(self, layer: int) -> Segment:
        """The committed slots of one layer, as attention sees them."""
        committed = jnp.arange(self.capacity)[None, :] < self.length[:, None]
        return Segment(KeyValue(self.keys[layer], self.values[layer]), committed[:, None, :])

    def visible(self, mask: Bool[Array, "#B T T"]) -> Bool[Array, "B T S"]:
        """Who sees which slot once a block lies behind the committed ones: all of those, and what ``mask`` says."""
        batch, size = self.length.shape[0], mask.shape[-1]
        offset = jnp.arange(self.capacity)[None, :] - self.length[:, None]
        inside = jnp.broadcast_to(mask, (batch, size, size))
        index = jnp.broadcast_to(jnp.clip(offset, 0, size - 1)[:, None, :], (batch, size, self.capacity))
        of_block = jnp.take_along_axis(inside, index, axis=2) & (offset < size)[:, None, :]
        return jnp.where((offset < 0)[:, None, :], True, of_block)

    def write(self, layer: int, block: KeyValue) -> KeyValue:
        """The buffers of one layer with a block behind the committed slots, which stay as they are.

        What would lie past the capacity is dropped (a clamped write would overwrite committed slots instead).
        """
        slots = self.length[:, None] + jnp.arange(block.keys.shape[2])[None, :]
        return KeyValue(
            _scatter(self.keys[layer], slots, block.keys), _scatter(self.values[layer], slots, block.values)
        )

    def commit(
        self, written: tuple[KeyValue, ...], count: Int[Array, " B"], nodes: Int[Array, "B T"] | None = None
    ) -> KVCache:
        """Keep the first ``count`` tokens of the block that was written in each row.

        Args:
            written: Per layer, what :meth:`write` gave.
            count: ``[B]`` tokens to keep; 0 leaves a row as it is.
            nodes: ``[B T]``, which token of the block comes first, second, ...; in order when left out.
        """
        if nodes is not None:
            written = tuple(self._moved(one, count, nodes) for one in written)
        return KVCache(
            keys=tuple(one.keys for one in written),
            values=tuple(one.values for one in written),
            length=self.length + count,
        )

    def _moved(self, written: KeyValue, count: Int[Array, " B"], nodes: Int[Array, "B T"]) -> KeyValue:
        """The chosen tokens side by side: read first, all of them, and then written."""
        rows, step = jnp.arange(self.length.shape[0])[:, None], jnp.arange(nodes.shape[1])[None, :]
        # What is not kept goes beyond the capacity, each to a place of its own: scattered indices must be unique.
        slots = jnp.where(step < count[:, None], self.length[:, None] + step, self.capacity + step)
        source = jnp.minimum(self.length[:, None] + nodes, self.capacity - 1)
        return KeyValue(*(_scatter(buffer, slots, jnp.moveaxis(buffer[rows, :, source], 1, 2)) for buffer in written))


def _scatter(
    buffer: Float[Array, "B C S H"], slots: Int[Array, "B T"], new: Float[Array, "B C T H"]
) -> Float[Array, "B C S H"]:
    """Write each token to its slot; the slots of a row differ, those beyond the capacity too, which are dropped."""
    if slots.size == 1:
        # XLA would turn a single write into a slice update, fuse it into everything that reads the buffer, and copy the
        # buffer for each. So a second one goes along, which is dropped.
        slots = jnp.concatenate([slots, slots + buffer.shape[2]], axis=1)
        new = jnp.concatenate([new, new], axis=2)
    rows = jnp.arange(buffer.shape[0])[:, None]
    # Unless it is told that no two writes meet, a GPU under deterministic operations makes them one after the other.
    return buffer.at[rows, :, slots].set(jnp.moveaxis(new, 2, 1).astype(buffer.dtype), mode="drop", unique_indices=True)
