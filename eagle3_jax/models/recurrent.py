"""What a recurrent layer keeps of committed tokens: one state that all of them are folded into, and a short window."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from eagle3_jax.devices.sharding import HEADS, ROWS


class Updates(NamedTuple):
    """What each token of a block does to the state that it finds: ``S' = decay S + key deltaᵀ``.

    A few vectors a token, where a state is a matrix: so a block keeps these for all of its nodes, and whatever path
    stays is folded in again.
    """

    keys: Float[Array, "B T Hk dk"]  #: ``[B T Hk dk]``.
    deltas: Float[Array, "B T Hk r dv"]  #: ``[B T Hk r dv]``; ``r`` value heads share a key.
    decays: Float[Array, "B T Hk r"]  #: ``[B T Hk r]``, in (0, 1].
    inputs: Float[Array, "B T Hk c"]  #: ``[B T Hk c]``, what the token adds to the window.


def folded(
    state: Float[Array, "B Hk r dk dv"],
    keys: Float[Array, "B Hk dk"],
    deltas: Float[Array, "B Hk r dv"],
    decays: Float[Array, "B Hk r"],
) -> Float[Array, "B Hk r dk dv"]:
    """``S' = decay S + key deltaᵀ``, the one place where a state changes: verifying and committing do the same sums.

    Both products are rounded before they are added. XLA's CPU backend would fuse one of them with the sum, and not the
    same one in either program, also across ``optimization_barrier``.
    """
    nothing = (decays < 0).astype(jnp.int32)[..., None, None]  # zeros, which no compiler can know
    left = _rounded(state * decays[..., None, None], nothing)
    return left + _rounded(keys[:, :, None, :, None] * deltas[:, :, :, None, :], nothing)


def _rounded(x: Float[Array, "*any"], nothing: Int[Array, "*#any"]) -> Float[Array, "*any"]:
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) ^ nothing, jnp.float32)


def at_least_two(tree: tuple[Array, ...]) -> tuple[Array, ...]:
    """Steps of a scan, ``[T ...]``, the last of them again where there is but one.

    A loop of one step is no loop to XLA: it would merge the step with what stands around it, and round differently.
    """
    return tuple(jnp.concatenate([leaf, leaf]) if leaf.shape[0] == 1 else leaf for leaf in tree)


class Recurrent(struct.PyTreeNode, kw_only=True):
    """A :class:`eagle3_jax.LayerCache` of a gated delta net.

    A state cannot be truncated: what was folded in stays. So a block leaves this one alone, keeps what each of its
    nodes would do to it (:class:`Updates`), and a commit does that along the path that stays, from this state on: the
    same sums, bit for bit, as if only those tokens had ever been fed.
    """

    axes: ClassVar[tuple[str, ...]] = (ROWS, HEADS)  # what a mesh divides (eagle3_jax.devices.sharding)

    state: Float[Array, "B Hv dk dv"]  #: ``[B Hv dk dv]``, float32.
    window: Float[Array, "B Hk P c"]  #: ``[B Hk P c]``, the last inputs of the convolution, by key head.

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
        """The state before a text: zeros, and ``kernel - 1`` inputs of zeros before its first token.

        Args:
            batch: ``B``.
            num_key_heads: ``Hk``.
            num_value_heads: ``Hv``.
            key_dim: ``dk``.
            value_dim: ``dv``.
            kernel: Inputs that the convolution reads.
            dtype: Of the window.
        """
        channels = 2 * key_dim + num_value_heads // num_key_heads * value_dim
        return cls(
            state=jnp.zeros((batch, num_value_heads, key_dim, value_dim), jnp.float32),
            window=jnp.zeros((batch, num_key_heads, kernel - 1, channels), dtype),
        )

    @property
    def grouped(self) -> Float[Array, "B Hk r dk dv"]:
        """The state, its value heads by the key head that they share."""
        batch, _, *size = self.state.shape
        return self.state.reshape(batch, self.window.shape[1], -1, *size)

    def fill(self, written: Recurrent, count: Int[Array, " B"]) -> Recurrent:
        """See :class:`eagle3_jax.LayerCache`; ``written`` is the state after the real tokens."""
        del count  # the forward was told
        return written

    def commit(
        self,
        written: Updates,
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None = None,
    ) -> Recurrent:
        """See :class:`eagle3_jax.LayerCache`; ``written`` is what each node does."""
        del length  # a state has no slots
        path = written if nodes is None else _chosen(written, nodes)
        keys, deltas, decays = at_least_two(tuple(jnp.moveaxis(leaf, 1, 0) for leaf in path[:3]))

        def step(state: Array, one: tuple[Array, ...]) -> tuple[Array, None]:
            index, key, delta, decay = one
            stays = (index < count)[:, None, None, None, None]
            return jnp.where(stays, folded(state, key, delta, decay), state), None

        steps = jnp.arange(keys.shape[0], dtype=jnp.int32)
        state = lax.scan(step, self.grouped, (steps, keys, deltas, decays))[0]
        return Recurrent(state=state.reshape(self.state.shape), window=self._moved(path.inputs, count))

    def _moved(self, inputs: Float[Array, "B T Hk c"], count: Int[Array, " B"]) -> Float[Array, "B Hk P c"]:
        """The window of the last inputs after ``count`` more tokens of each row."""
        size = self.window.shape[2]
        run = jnp.concatenate([self.window, jnp.moveaxis(inputs, 1, 2).astype(self.window.dtype)], axis=2)
        last = lambda run, count: lax.dynamic_slice_in_dim(run, count, size, axis=1)
        return jax.vmap(last)(run, count)


def _chosen(written: Updates, nodes: Int[Array, "B P"]) -> Updates:
    return Updates(*(jax.vmap(lambda leaf, nodes: leaf[nodes])(leaf, nodes) for leaf in written))
