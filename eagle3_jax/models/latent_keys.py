"""The cache of latent attention."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, DTypeLike, Float, Int

from eagle3_jax.cache import KeyValue, compact_accepted, write_block
from eagle3_jax.devices.sharding import ROWS


class LatentKeys(struct.PyTreeNode, kw_only=True):
    """The :class:`~eagle3_jax.cache.LayerCache` of latent attention.

    It has one head, whose keys are also its values. All query heads read the same latents, so every
    device of a mesh holds all of them.
    """

    axes: ClassVar[tuple[str, ...]] = (ROWS,)

    #: ``[B 1 S R]``, for each token its latent, followed by the rotated key that all heads share.
    latents: Float[Array, "B 1 S R"]

    @classmethod
    def allocate(cls, *, batch: int, capacity: int, channels: int, dtype: DTypeLike) -> LatentKeys:
        """Returns an empty cache: zeros in ``dtype``."""
        return cls(latents=jnp.zeros((batch, 1, capacity, channels), dtype))

    @property
    def capacity(self) -> int:
        """``S``, slots per row."""
        return self.latents.shape[2]

    def write(self, block: KeyValue, length: Int[Array, " B"]) -> KeyValue:
        """See :meth:`eagle3_jax.cache.KeyValues.write`; keys and values are one array."""
        written = write_block(self.latents, block.keys, length)
        return KeyValue(written, written)

    def fill(self, written: Float[Array, "B 1 T R"], count: Int[Array, " B"]) -> LatentKeys:
        """See :class:`~eagle3_jax.cache.LayerCache`; ``written`` is the block."""
        return LatentKeys(latents=write_block(self.latents, written, jnp.zeros_like(count)))

    def commit(
        self,
        written: Float[Array, "B 1 S R"],
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None = None,
    ) -> LatentKeys:
        """See :class:`~eagle3_jax.cache.LayerCache`; ``written`` are keys from :meth:`write`."""
        return LatentKeys(latents=compact_accepted(written, length, count, nodes))
