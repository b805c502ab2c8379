"""The gated delta net: a recurrent layer behind a short causal convolution, for texts and for draft trees."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.devices.sharding import HEADS, Axis
from eagle3_jax.models.config import GatedDelta, NormKind
from eagle3_jax.models.layers import Linear, Precision, RMSNorm, keep_fused, matmul_precision
from eagle3_jax.models.memory import RecurrentMemory
from eagle3_jax.models.recurrent import Recurrent, Updates, at_least_two, folded

CHUNK = 64  # tokens of a text that are solved for at once
_EPS = 1e-6  # of the unit length of queries and keys, in every published model


class Heads(NamedTuple):
    """What the delta rule reads of tokens, in float32."""

    queries: Float[Array, "*any Hk dk"]  #: ``[... Hk dk]``, of length ``dk ** -0.5``.
    keys: Float[Array, "*any Hk dk"]  #: ``[... Hk dk]``, of length 1.
    values: Float[Array, "*any Hk r dv"]  #: ``[... Hk r dv]``.


class GatedDeltaNet(nnx.Module):
    """A gated delta net (Yang et al., 2024, arXiv 2412.06464).

    Each value head has a state ``S`` of ``dk × dv``, from which a token's key first takes what it stood for:

        ``S_t = α_t S_(t-1) + k_t (β_t (v_t - α_t S_(t-1)ᵀ k_t))ᵀ``, ``o_t = S_tᵀ q_t``

    with ``α_t = exp(-exp(a_log) softplus(a_t + dt_bias))`` and ``β_t = sigmoid(b_t)``. Queries, keys and values pass a
    depthwise causal convolution and SiLU; what is read is normalised, and gated by ``silu(z)`` after that.

    ``q``, ``k``, ``v`` and ``z`` are one product, its columns by key head: ``[Hk, dk + dk + r dv + r dv]``. So are
    ``b`` and ``a``, ``[Hk, r + r]``, and the channels of the convolution, ``[Hk, dk + dk + r dv]``: whatever divides
    the key heads over devices divides all of it, and the states.
    """

    def __init__(
        self,
        config: GatedDelta,
        *,
        d_in: int,
        width: int,
        norm_eps: float,
        norm_kind: NormKind = "plain",
        precision: Precision,
        rngs: nnx.Rngs,
    ):
        del norm_kind  # of the model's other norms; this one's weight is never centred at zero
        keys = config.num_key_heads * config.key_dim
        values = config.num_value_heads * config.value_dim
        axis = Axis(HEADS, config.num_key_heads)
        options = {"precision": precision, "rngs": rngs}
        self.qkvz = Linear(d_in, 2 * keys + 2 * values, axes=(None, axis), **options)
        self.ba = Linear(d_in, 2 * config.num_value_heads, axes=(None, axis), product="", **options)
        shape = (config.kernel, 1, 2 * keys + values)
        self.convolution = nnx.Param(
            jax.random.normal(rngs.params(), shape, jnp.float32) * config.kernel**-0.5, axes=(None, None, axis)
        )
        rates = jax.random.uniform(rngs.params(), (config.num_value_heads,), jnp.float32, 0.01, 16.0)
        self.a_log = nnx.Param(jnp.log(rates), axes=(axis,))
        self.dt_bias = nnx.Param(jnp.ones((config.num_value_heads,), jnp.float32), axes=(axis,))
        self.norm = RMSNorm(config.value_dim, norm_eps)
        self.o = Linear(values, width, axes=(axis, None), **options)
        self.config = config

    def __call__(
        self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"], memory: RecurrentMemory
    ) -> tuple[Float[Array, "B T D"], Updates | Recurrent]:
        """What the block reads, and what its cache takes: what each node does to a state, or the state after a text."""
        del positions
        config = self.config
        rows = x.shape[:2]
        split = 2 * config.key_dim + config.group * config.value_dim
        fused = keep_fused(self.qkvz(x)).reshape(*rows, config.num_key_heads, -1)
        inputs = fused[..., :split]
        gate = fused[..., split:]
        ba = keep_fused(self.ba(x)).reshape(*rows, config.num_key_heads, 2, config.group)
        betas, logs = self._rates(ba)
        if memory.layer is None:
            read, kept = self._text(inputs, betas, logs, jnp.broadcast_to(memory.real, rows))
        else:
            parents = jnp.broadcast_to(memory.parents, rows)
            read, kept = self._block(inputs, betas, jnp.exp(logs), parents, memory.layer)
        read = self.norm(read.astype(x.dtype))
        gated = read.astype(jnp.float32) * jax.nn.silu(gate.reshape(read.shape).astype(jnp.float32))
        return self.o(gated.astype(x.dtype).reshape(*rows, -1)), kept

    def _rates(self, ba: Float[Array, "B T Hk 2 r"]) -> tuple[Float[Array, "B T Hk r"], Float[Array, "B T Hk r"]]:
        """``β`` and ``log α``, in float32."""
        of_head = lambda one: one[...].astype(jnp.float32).reshape(1, 1, self.config.num_key_heads, -1)
        rate = jax.nn.softplus(ba[..., 1, :].astype(jnp.float32) + of_head(self.dt_bias))
        return jax.nn.sigmoid(ba[..., 0, :]).astype(jnp.float32), -jnp.exp(of_head(self.a_log)) * rate

    def _heads(self, taps: list[Float[Array, "*any Hk c"]]) -> Heads:
        """Queries, keys and values from the inputs that the convolution reads, the oldest first."""
        config = self.config
        weights = self.convolution[...].astype(jnp.float32).reshape(config.kernel, config.num_key_heads, -1)
        weights = [lax.broadcast_to_rank(weight, taps[0].ndim) for weight in weights]
        mixed = sum(tap.astype(jnp.float32) * weight for tap, weight in zip(taps, weights, strict=True))
        mixed = jax.nn.silu(mixed.astype(taps[0].dtype)).astype(jnp.float32)  # type: ignore[union-attr]
        queries, keys, values = jnp.split(mixed, [config.key_dim, 2 * config.key_dim], axis=-1)
        return Heads(
            _unit(queries) * config.key_dim**-0.5,
            _unit(keys),
            values.reshape(*values.shape[:-1], config.group, config.value_dim),
        )

    def _block(
        self,
        inputs: Float[Array, "B T Hk c"],
        betas: Float[Array, "B T Hk r"],
        decays: Float[Array, "B T Hk r"],
        parents: Int[Array, "B T"],
        start: Recurrent,
    ) -> tuple[Float[Array, "B T Hk r dv"], Updates]:
        """A tree behind a state, node by node: each begins at the state and the window of its parent.

        Everything that a node computes is inside the step, where its shapes do not depend on the block's size: a node
        of a tree has the sums of a token alone.
        """
        size = inputs.shape[1]
        steps = at_least_two(tuple(jnp.moveaxis(leaf, 1, 0) for leaf in (inputs, betas, decays, parents)))
        count = steps[0].shape[0]
        windows, states = (_room(leaf, count) for leaf in (start.window, start.grouped))

        def step(carry: tuple[Array, Array], one: tuple[Array, ...]) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
            windows, states = carry
            index, new, beta, decay, parent = one
            window = jnp.concatenate([_of(windows, parent), new[:, :, None].astype(windows.dtype)], axis=2)
            heads = self._heads([window[:, :, tap] for tap in range(self.config.kernel)])
            state = _of(states, parent)
            known = jnp.sum(state * decay[..., None, None] * heads.keys[:, :, None, :, None], axis=-2)
            delta = (heads.values - known) * beta[..., None]
            state = folded(state, heads.keys, delta, decay)
            read = jnp.sum(state * heads.queries[:, :, None, :, None], axis=-2)
            windows = lax.dynamic_update_index_in_dim(windows, window[:, :, 1:], index + 1, axis=1)
            states = lax.dynamic_update_index_in_dim(states, state, index + 1, axis=1)
            return (windows, states), (read, heads.keys, delta)

        nodes = jnp.arange(count, dtype=jnp.int32)
        _, found = lax.scan(step, (windows, states), (nodes, *steps))
        read, keys, deltas = (jnp.moveaxis(leaf[:size], 0, 1) for leaf in found)
        return read, Updates(keys, deltas, decays, inputs)

    def _text(
        self,
        inputs: Float[Array, "B T Hk c"],
        betas: Float[Array, "B T Hk r"],
        logs: Float[Array, "B T Hk r"],
        real: Bool[Array, "B T"],
    ) -> tuple[Float[Array, "B T Hk r dv"], Recurrent]:
        """A text from its first token on, chunk by chunk, and the state after its last real token.

        Padding decays nothing and adds nothing. Real tokens stand side by side.
        """
        taps = self.config.kernel - 1
        size = inputs.shape[1]
        inputs = jnp.where(real[..., None, None], inputs, 0)
        behind = jnp.pad(inputs, ((0, 0), (taps, 0), (0, 0), (0, 0)))
        heads = self._heads([behind[:, tap : tap + size] for tap in range(taps + 1)])
        betas, logs = (jnp.where(real[..., None, None], leaf, 0.0) for leaf in (betas, logs))
        read, state = chunked(heads, betas, logs)
        end = jnp.max(jnp.where(real, jnp.arange(1, size + 1, dtype=jnp.int32), 0), axis=1)
        window = jax.vmap(lambda run, end: lax.dynamic_slice_in_dim(run, end, taps, axis=0))(behind, end)
        batch, _, _, *matrix = state.shape
        return read, Recurrent(state=state.reshape(batch, -1, *matrix), window=jnp.moveaxis(window, 1, 2))


def chunked(
    heads: Heads, betas: Float[Array, "B T Hk r"], logs: Float[Array, "B T Hk r"]
) -> tuple[Float[Array, "B T Hk r dv"], Float[Array, "B Hk r dk dv"]]:
    """The gated delta rule over a text, from a state of zeros: what is read of every token, and the last state.

    Within a chunk the deltas ``u`` solve a triangular system, ``u_i = β_i (v_i - α_1..α_i S_0ᵀ k_i -
    Σ_(j<i) α_(j+1)..α_i (k_i · k_j) u_j)``; from chunk to chunk goes one state. The sums of a token alone up to
    rounding, in ``T / CHUNK`` dependent steps.

    Args:
        heads: ``[B T ...]``.
        betas: ``β``; 0 adds nothing to the state.
        logs: ``log α``; 0 decays nothing.
    """
    size = betas.shape[1]
    length = min(CHUNK, size)

    def cut(leaf: Array) -> Array:
        padded = jnp.pad(leaf, ((0, 0), (0, -size % length), *[(0, 0)] * (leaf.ndim - 2)))
        return jnp.moveaxis(padded.reshape(leaf.shape[0], -1, length, *leaf.shape[2:]), 1, 0)

    precision = matmul_precision(jnp.float32)
    einsum = lambda pattern, *of: jnp.einsum(pattern, *of, precision=precision)
    queries, keys, values, betas, logs = map(cut, (*heads, betas, logs))  # [chunks B length Hk ...]
    since = jnp.cumsum(logs, axis=2)  # log of what is left at a token of the state before the chunk
    before = jnp.tril(jnp.ones((length, length), jnp.bool_))
    gaps = jnp.moveaxis(since[:, :, :, None] - since[:, :, None], (2, 3), (4, 5))  # [chunks B Hk r length length]
    left = jnp.where(before, jnp.exp(jnp.where(before, gaps, 0.0)), 0.0)
    alike = einsum("nbihk,nbjhk->nbhij", keys, keys)[:, :, :, None] * left * jnp.moveaxis(betas, 2, 4)[..., None]
    mixing = einsum("nbihk,nbjhk->nbhij", queries, keys)[:, :, :, None] * left
    # Of the right-hand side, what does not depend on the state before the chunk, and what multiplies it.
    of_values = jnp.moveaxis(values * betas[..., None], 2, 4)
    of_state = jnp.moveaxis(keys[:, :, :, :, None] * (betas * jnp.exp(since))[..., None], 2, 4)
    solved = _solved(alike, jnp.concatenate([of_values, of_state], axis=-1))
    first = solved[..., : values.shape[-1]]
    of_state = solved[..., values.shape[-1] :]
    total = jnp.moveaxis(since[:, :, -1:], 2, 4)  # [chunks B Hk r 1]
    rest = jnp.exp(total - jnp.moveaxis(since, 2, 4))  # what is left of a token at the end of its chunk

    def step(state: Array, one: tuple[Array, ...]) -> tuple[Array, Array]:
        queries, keys, mixing, first, of_state, since, rest, total = one
        deltas = first - einsum("bhrik,bhrkv->bhriv", of_state, state)
        read = einsum("bihk,bhrkv->bhriv", queries, state) * jnp.exp(since)[..., None]
        read = read + einsum("bhrij,bhrjv->bhriv", mixing, deltas)
        added = einsum("bihk,bhriv->bhrkv", keys, deltas * rest[..., None])
        return state * jnp.exp(total)[..., None] + added, read

    state = jnp.zeros((*first.shape[1:4], keys.shape[-1], first.shape[-1]), jnp.float32)
    steps = (queries, keys, mixing, first, of_state, jnp.moveaxis(since, 2, 4), rest, total)
    state, read = lax.scan(step, state, steps)
    read = jnp.moveaxis(read, (0, 4), (1, 2))  # [B chunks length Hk r dv]
    return read.reshape(read.shape[0], -1, *read.shape[3:])[:, :size], state


def _solved(alike: Float[Array, "*any L L"], right: Float[Array, "*any L M"]) -> Float[Array, "*any L M"]:
    """``(1 + strictly lower part of alike)⁻¹ right``, row after row: products alone, which a mesh divides by heads."""

    def step(found: Array, one: tuple[Array, Array, Array]) -> tuple[Array, None]:
        index, row, wanted = one  # rows that are not found yet are zeros
        new = wanted - jnp.einsum("...j,...jm->...m", row, found, precision=matmul_precision(jnp.float32))
        return lax.dynamic_update_index_in_dim(found, new, index, axis=-2), None

    rows = (jnp.arange(right.shape[-2], dtype=jnp.int32), jnp.moveaxis(alike, -2, 0), jnp.moveaxis(right, -2, 0))
    return lax.scan(step, jnp.zeros_like(right), rows)[0]


def _unit(x: Float[Array, "*any dk"]) -> Float[Array, "*any dk"]:
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def _room(leaf: Array, count: int) -> Array:
    """``[B 1 + count ...]``: the committed one, and room for one of each node."""
    return jnp.pad(leaf[:, None], ((0, 0), (0, count), *[(0, 0)] * (leaf.ndim - 1)))


def _of(leaves: Array, parent: Int[Array, " B"]) -> Array:
    """Each row's entry of a node, -1 the committed one."""
    of_row = lambda leaf, parent: lax.dynamic_index_in_dim(leaf, parent + 1, axis=0, keepdims=False)
    return jax.vmap(of_row)(leaves, parent)
