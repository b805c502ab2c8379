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
    commit. A forward reads the cache and returns the keys and values of its block apart, so those of a rejected
    draft never enter it and there is nothing to roll back.

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

    def commit(
        self, block: tuple[KeyValue, ...], count: Int[Array, " B"], nodes: Int[Array, "B T"] | None = None
    ) -> KVCache:
        """Append the first ``count`` tokens of a block to each row.

        Args:
            block: Per layer, keys and values of the block's tokens.
            count: ``[B]`` tokens to keep; 0 leaves a row as it is.
            nodes: ``[B T]``, which token of the block comes first, second, ...; in order when left out.

        Slots past the capacity are dropped (a clamped write would overwrite committed slots instead).
        """
        batch = self.length.shape[0]
        order = jnp.arange(block[0].keys.shape[2])[None, :] if nodes is None else nodes
        step = jnp.arange(order.shape[1])[None, :]
        slots = jnp.where(step < count[:, None], self.length[:, None] + step, self.capacity)
        rows = jnp.arange(batch)[:, None]

        def append(buffer: Float[Array, "B C S H"], new: Float[Array, "B C N H"]) -> Float[Array, "B C S H"]:
            chosen = jnp.moveaxis(new, 2, 1) if nodes is None else new[rows, :, nodes]  # [B T C H]
            return buffer.at[rows, :, slots].set(chosen.astype(buffer.dtype), mode="drop")

        return self.replace(  # type: ignore[attr-defined]
            keys=tuple(append(k, kv.keys) for k, kv in zip(self.keys, block, strict=True)),
            values=tuple(append(v, kv.values) for v, kv in zip(self.values, block, strict=True)),
            length=self.length + count,
        )
