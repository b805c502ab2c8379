"""The cache of a recurrent layer: one state for all committed tokens, and a few last inputs."""

from __future__ import annotations

import functools
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from eagle3_jax.devices.sharding import HEADS, ROWS


class Updates(NamedTuple):
    """The update of the state by each token of a block, ``S' = decay S + key deltaᵀ``.

    An update is a few vectors and a state is a matrix, so a block stores the updates of all its
    nodes. A commit applies those of the accepted path again.
    """

    keys: Float[Array, "B T Hk dk"]  #: ``[B T Hk dk]``.
    deltas: Float[Array, "B T Hk r dv"]  #: ``[B T Hk r dv]``; ``r`` value heads share a key.
    decays: Float[Array, "B T Hk r"]  #: ``[B T Hk r]``, in (0, 1].
    inputs: Float[Array, "B T Hk c"]  #: ``[B T Hk c]``, the token's inputs of the convolution.


def update_state(
    state: Float[Array, "B Hk r dk dv"],
    keys: Float[Array, "B Hk dk"],
    deltas: Float[Array, "B Hk r dv"],
    decays: Float[Array, "B Hk r"],
) -> Float[Array, "B Hk r dk dv"]:
    """Returns ``S' = decay S + key deltaᵀ``.

    Verification and commits both call it, so their sums are the same. Both products are rounded
    before they are added. Otherwise XLA's CPU backend would fuse one of them with the sum. It may
    choose another product in each program, even across ``optimization_barrier``.
    """
    # A compiler cannot know that no decay is negative, and that these are zeros.
    zeros = (decays < 0).astype(jnp.int32)[..., None, None]
    decayed = _round(state * decays[..., None, None], zeros)
    added = _round(keys[:, :, None, :, None] * deltas[:, :, :, None, :], zeros)
    return decayed + added


def _round(x: Float[Array, "*any"], zeros: Int[Array, "*#any"]) -> Float[Array, "*any"]:
    """Returns ``x``, rounded to float32 before any other operation uses it."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits ^ zeros, jnp.float32)


def at_least_two(tree: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns the steps ``[T ...]`` of a scan; a single step is repeated.

    XLA unrolls a loop of one step, fuses it with the operations around it, and rounds differently.
    """
    return tuple(jnp.concatenate([leaf, leaf]) if leaf.shape[0] == 1 else leaf for leaf in tree)


class Recurrent(struct.PyTreeNode, kw_only=True):
    """The :class:`eagle3_jax.LayerCache` of a gated delta net.

    A state cannot be truncated, because a token that was added to it cannot be removed. So a block
    does not change the state; it returns the updates by its nodes (:class:`Updates`), and a commit
    applies those of the accepted path. The new state is bit for bit that after feeding only the
    accepted tokens.
    """

    # What a mesh divides (eagle3_jax.devices.sharding).
    axes: ClassVar[tuple[str, ...]] = (ROWS, HEADS)

    state: Float[Array, "B Hv dk dv"]  #: ``[B Hv dk dv]``, float32.
    #: ``[B Hk P c]``, the last ``P`` inputs of the convolution, by key head.
    window: Float[Array, "B Hk P c"]

    @classmethod
    def allocate(
        cls,
        *,
        batch: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        kernel: int,
        dtype: DTypeLike,
    ) -> Recurrent:
        """Returns the state before a text: zeros, and a window of ``kernel - 1`` inputs of zeros.

        Args:
            batch: ``B``, rows.
            num_key_heads: ``Hk``, heads of queries and keys.
            num_value_heads: ``Hv``, heads of values and states.
            key_dim: ``dk``, channels of a key.
            value_dim: ``dv``, channels of a value.
            kernel: Number of inputs that the convolution reads; the window is one shorter.
            dtype: Type of the window. The state is float32.
        """
        channels = 2 * key_dim + num_value_heads // num_key_heads * value_dim
        state = jnp.zeros((batch, num_value_heads, key_dim, value_dim), jnp.float32)
        window = jnp.zeros((batch, num_key_heads, kernel - 1, channels), dtype)
        return cls(state=state, window=window)

    @property
    def grouped(self) -> Float[Array, "B Hk r dk dv"]:
        """The state with its value heads grouped by key head."""
        batch, _, *size = self.state.shape
        return self.state.reshape(batch, self.window.shape[1], -1, *size)

    def fill(self, written: Recurrent, count: Int[Array, " B"]) -> Recurrent:
        """See :class:`eagle3_jax.LayerCache`; ``written`` is the state after the real tokens."""
        # The layer knew the length when it computed the state.
        del count
        return written

    def commit(
        self,
        written: Updates,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None = None,
    ) -> Recurrent:
        """See :class:`eagle3_jax.LayerCache`; ``written`` are the updates by each node."""
        # A state has no slots.
        del length
        path = written if nodes is None else _select(written, nodes)

        keys, deltas, decays = at_least_two(tuple(jnp.moveaxis(leaf, 1, 0) for leaf in path[:3]))
        steps = jnp.arange(keys.shape[0], dtype=jnp.int32)
        commit_token = functools.partial(_commit_token, count=count)
        state = lax.scan(commit_token, self.grouped, (steps, keys, deltas, decays))[0]
        return Recurrent(
            state=state.reshape(self.state.shape), window=self._move_window(path.inputs, count)
        )

    def _move_window(
        self, inputs: Float[Array, "B T Hk c"], count: Int[Array, " B"]
    ) -> Float[Array, "B Hk P c"]:
        """Returns the window after ``count`` more tokens of each row."""
        size = self.window.shape[2]
        new = jnp.moveaxis(inputs, 1, 2).astype(self.window.dtype)
        run = jnp.concatenate([self.window, new], axis=2)
        last = functools.partial(lax.dynamic_slice_in_dim, slice_size=size, axis=1)
        return jax.vmap(last)(run, count)


def _commit_token(
    state: Array, update: tuple[Array, ...], *, count: Int[Array, " B"]
) -> tuple[Array, None]:
    """Applies an update in the rows that accepted its token."""
    index, key, delta, decay = update
    accepted = (index < count)[:, None, None, None, None]
    updated = update_state(state, key, delta, decay)
    return jnp.where(accepted, updated, state), None


def _select(updates: Updates, nodes: Int[Array, "B P"]) -> Updates:
    """Returns the updates of some nodes of each row."""
    select = jax.vmap(lambda leaf, nodes: leaf[nodes])
    return Updates(*(select(leaf, nodes) for leaf in updates))
