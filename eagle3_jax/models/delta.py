"""The gated delta net: a recurrent layer after a short causal convolution, for texts and trees."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.devices.sharding import HEADS, Axis
from eagle3_jax.models.config import GatedDelta, NormKind
from eagle3_jax.models.context import RecurrentContext
from eagle3_jax.models.layers import (
    Linear,
    Precision,
    RMSNorm,
    keep_fused,
    matmul_precision,
    normal_param,
)
from eagle3_jax.models.recurrent import Recurrent, Updates, at_least_two, update_state

# Tokens of a text in one triangular system.
CHUNK = 64
# Added to the squared length of queries and keys, in every published model.
_EPS = 1e-6


class Heads(NamedTuple):
    """Queries, keys and values of the delta rule, in float32."""

    queries: Float[Array, "*any Hk dk"]  #: ``[... Hk dk]``, of length ``dk ** -0.5``.
    keys: Float[Array, "*any Hk dk"]  #: ``[... Hk dk]``, of length 1.
    values: Float[Array, "*any Hk r dv"]  #: ``[... Hk r dv]``.


class Node(NamedTuple):
    """A token of a tree, for each row; with one more axis, all tokens."""

    index: Int[Array, ""]  #: Its number.
    inputs: Float[Array, "B Hk c"]  #: ``[B Hk c]``, its inputs of the convolution.
    beta: Float[Array, "B Hk r"]  #: ``[B Hk r]``, ``β``.
    decay: Float[Array, "B Hk r"]  #: ``[B Hk r]``, ``α``.
    parent: Int[Array, " B"]  #: ``[B]``, the number of its parent, -1 for the committed tokens.


class Slots(NamedTuple):
    """Windows and states of the committed tokens, in slot 0, and of the nodes after it."""

    windows: Float[Array, "B N Hk P c"]  #: ``[B N Hk P c]``.
    states: Float[Array, "B N Hk r dk dv"]  #: ``[B N Hk r dk dv]``.


class Chunk(NamedTuple):
    """Tokens of a text; with one more axis, all chunks of a text. See :func:`run_chunks`."""

    queries: Float[Array, "B L Hk dk"]
    keys: Float[Array, "B L Hk dk"]
    #: ``[B Hk r L L]``, the share of the delta of token ``j`` in the output of token ``i``.
    mixing: Float[Array, "B Hk r L L"]
    constant: Float[Array, "B Hk r L dv"]  #: The deltas for a state of zeros.
    #: What is subtracted from them for another state, as a factor of that state.
    state_factor: Float[Array, "B Hk r L dk"]
    since: Float[Array, "B Hk r L"]  #: ``log α_1..α_i``.
    until_end: Float[Array, "B Hk r L"]  #: ``α_(i+1)..α_L``.
    total: Float[Array, "B Hk r 1"]  #: ``log α_1..α_L``.


class GatedDeltaNet(nnx.Module):
    """A gated delta net (Yang et al., 2024, arXiv 2412.06464).

    Each value head has a state ``S`` of ``dk × dv``. A token first subtracts the value that the
    decayed state has for its key, then adds its own:

        ``S_t = α_t S_(t-1) + k_t (β_t (v_t - α_t S_(t-1)ᵀ k_t))ᵀ``, ``o_t = S_tᵀ q_t``

    with ``α_t = exp(-exp(a_log) softplus(a_t + dt_bias))`` and ``β_t = sigmoid(b_t)``. Queries,
    keys and values go through a depthwise causal convolution and SiLU. The output ``o`` is
    normalised, then multiplied by ``silu(z)``.

    ``q``, ``k``, ``v`` and ``z`` are one product with columns by key head, ``[Hk, dk + dk + r dv +
    r dv]``. ``b`` and ``a`` are another, ``[Hk, r + r]``. The channels of the convolution are
    ``[Hk, dk + dk + r dv]``. So a mesh that divides the key heads divides all of them, and the
    states.
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
        # The kind is that of the model's other norms. This norm's weight is never centred at zero.
        del norm_kind
        keys = config.num_key_heads * config.key_dim
        values = config.num_value_heads * config.value_dim
        axis = Axis(HEADS, config.num_key_heads)
        options = {"precision": precision, "rngs": rngs}

        self.qkvz = Linear(d_in, 2 * keys + 2 * values, axes=(None, axis), **options)
        self.ba = Linear(d_in, 2 * config.num_value_heads, axes=(None, axis), product="", **options)
        taps = (config.kernel, 1, 2 * keys + values)
        self.convolution = normal_param(rngs, taps, config.kernel**-0.5, axes=(None, None, axis))

        # Rates of decay from 0 to 16, as in Qwen3-Next, here without the logarithm of 0.
        rates = jax.random.uniform(
            rngs.params(), (config.num_value_heads,), jnp.float32, 0.01, 16.0
        )
        self.a_log = nnx.Param(jnp.log(rates), axes=(axis,))
        self.dt_bias = nnx.Param(jnp.ones((config.num_value_heads,), jnp.float32), axes=(axis,))

        self.norm = RMSNorm(config.value_dim, norm_eps)
        self.o = Linear(values, width, axes=(axis, None), **options)
        self.config = config

    def __call__(
        self, x: Float[Array, "B T D_in"], positions: Int[Array, "B T"], context: RecurrentContext
    ) -> tuple[Float[Array, "B T D"], Updates | Recurrent]:
        """Returns the layer's output ``[B T D]`` and the value for its cache.

        That value is the update of the state by each node, or for a text, the state after its last
        token.
        """
        # The order of the tokens is in the recurrence.
        del positions
        config = self.config
        rows = x.shape[:2]
        split = 2 * config.key_dim + config.group * config.value_dim
        fused = keep_fused(self.qkvz(x)).reshape(*rows, config.num_key_heads, -1)
        inputs = fused[..., :split]
        gate = fused[..., split:]
        ba = keep_fused(self.ba(x)).reshape(*rows, config.num_key_heads, 2, config.group)
        betas, logs = self._rates(ba)

        if context.layer is None:
            out, written = self._text(inputs, betas, logs, jnp.broadcast_to(context.real, rows))
        else:
            parents = jnp.broadcast_to(context.parents, rows)
            out, written = self._block(inputs, betas, jnp.exp(logs), parents, context.layer)

        out = self.norm(out.astype(x.dtype)).astype(jnp.float32)
        gated = out * jax.nn.silu(gate.reshape(out.shape).astype(jnp.float32))
        return self.o(gated.astype(x.dtype).reshape(*rows, -1)), written

    def _rates(
        self, ba: Float[Array, "B T Hk 2 r"]
    ) -> tuple[Float[Array, "B T Hk r"], Float[Array, "B T Hk r"]]:
        """Returns ``β`` and ``log α``, in float32."""

        def by_key_head(leaf: nnx.Param) -> Array:
            return leaf[...].astype(jnp.float32).reshape(1, 1, self.config.num_key_heads, -1)

        rate = jax.nn.softplus(ba[..., 1, :].astype(jnp.float32) + by_key_head(self.dt_bias))
        beta = jax.nn.sigmoid(ba[..., 0, :]).astype(jnp.float32)
        return beta, -jnp.exp(by_key_head(self.a_log)) * rate

    def _heads(self, taps: list[Float[Array, "*any Hk c"]]) -> Heads:
        """Returns queries, keys and values for the inputs of the convolution, the oldest first."""
        config = self.config
        weights = (
            self.convolution[...]
            .astype(jnp.float32)
            .reshape(config.kernel, config.num_key_heads, -1)
        )
        weights = [lax.broadcast_to_rank(weight, taps[0].ndim) for weight in weights]
        mixed = sum(
            tap.astype(jnp.float32) * weight for tap, weight in zip(taps, weights, strict=True)
        )
        # Rounded before SiLU, as in the published models.
        rounded = mixed.astype(taps[0].dtype)  # type: ignore[union-attr]
        mixed = jax.nn.silu(rounded).astype(jnp.float32)

        queries, keys, values = jnp.split(mixed, [config.key_dim, 2 * config.key_dim], axis=-1)
        queries = _unit(queries) * config.key_dim**-0.5
        keys = _unit(keys)
        values = values.reshape(*values.shape[:-1], config.group, config.value_dim)
        return Heads(queries, keys, values)

    def _block(
        self,
        inputs: Float[Array, "B T Hk c"],
        betas: Float[Array, "B T Hk r"],
        decays: Float[Array, "B T Hk r"],
        parents: Int[Array, "B T"],
        start: Recurrent,
    ) -> tuple[Float[Array, "B T Hk r dv"], Updates]:
        """Runs a tree after the state ``start``, node by node.

        A node begins at the state and window of its parent. All computations of a node are inside
        the scan, where shapes do not depend on the size of the block. So a node of a tree is
        computed with the same sums as a single token.

        Returns:
            Outputs ``[B T Hk r dv]``, and the update of the state by each node.
        """
        size = inputs.shape[1]
        steps = at_least_two(
            tuple(jnp.moveaxis(leaf, 1, 0) for leaf in (inputs, betas, decays, parents))
        )
        count = steps[0].shape[0]
        grouped = start.grouped
        slots = Slots(_with_slots(start.window, count), _with_slots(grouped, count))

        nodes = Node(jnp.arange(count, dtype=jnp.int32), *steps)
        _, by_node = lax.scan(self._run_node, slots, nodes)
        out, keys, deltas = (jnp.moveaxis(leaf[:size], 0, 1) for leaf in by_node)
        return out, Updates(keys, deltas, decays, inputs)

    def _run_node(self, slots: Slots, node: Node) -> tuple[Slots, tuple[Array, Array, Array]]:
        """Runs a node of a tree, the step of a scan over its nodes.

        Returns:
            Windows and states of all nodes so far, and the node's output, key and delta.
        """
        windows, states = slots
        parent_window = _read_slot(windows, node.parent)
        new = node.inputs[:, :, None].astype(windows.dtype)
        window = jnp.concatenate([parent_window, new], axis=2)
        heads = self._heads([window[:, :, tap] for tap in range(self.config.kernel)])

        # The delta rule: β (v - α Sᵀ k) replaces what the decayed state has for the key.
        state = _read_slot(states, node.parent)
        decayed = state * node.decay[..., None, None]
        known = jnp.sum(decayed * heads.keys[:, :, None, :, None], axis=-2)
        delta = (heads.values - known) * node.beta[..., None]
        state = update_state(state, heads.keys, delta, node.decay)
        out = jnp.sum(state * heads.queries[:, :, None, :, None], axis=-2)

        new_window = window[:, :, 1:]
        windows = lax.dynamic_update_index_in_dim(windows, new_window, node.index + 1, axis=1)
        states = lax.dynamic_update_index_in_dim(states, state, node.index + 1, axis=1)
        return Slots(windows, states), (out, heads.keys, delta)

    def _text(
        self,
        inputs: Float[Array, "B T Hk c"],
        betas: Float[Array, "B T Hk r"],
        logs: Float[Array, "B T Hk r"],
        real: Bool[Array, "B T"],
    ) -> tuple[Float[Array, "B T Hk r dv"], Recurrent]:
        """Runs a text from its first token on, chunk by chunk.

        The real tokens of a row are next to each other. Padding neither decays a state nor adds to
        it.

        Returns:
            Outputs ``[B T Hk r dv]``, and the state after the last real token.
        """
        taps = self.config.kernel - 1
        size = inputs.shape[1]
        inputs = jnp.where(real[..., None, None], inputs, 0)
        padded = jnp.pad(inputs, ((0, 0), (taps, 0), (0, 0), (0, 0)))
        heads = self._heads([padded[:, tap : tap + size] for tap in range(taps + 1)])
        betas, logs = (jnp.where(real[..., None, None], leaf, 0.0) for leaf in (betas, logs))
        out, state = run_chunks(heads, betas, logs)

        # The inputs before the end of each row's text: padding may follow it.
        end = jnp.max(jnp.where(real, jnp.arange(1, size + 1, dtype=jnp.int32), 0), axis=1)
        last_inputs = functools.partial(lax.dynamic_slice_in_dim, slice_size=taps, axis=0)
        window = jax.vmap(last_inputs)(padded, end)

        batch, _, _, *matrix = state.shape
        return out, Recurrent(
            state=state.reshape(batch, -1, *matrix), window=jnp.moveaxis(window, 1, 2)
        )


def run_chunks(
    heads: Heads, betas: Float[Array, "B T Hk r"], logs: Float[Array, "B T Hk r"]
) -> tuple[Float[Array, "B T Hk r dv"], Float[Array, "B Hk r dk dv"]]:
    """Computes the gated delta rule over a text, from a state of zeros.

    It is the chunkwise form of the paper. Within a chunk the deltas ``u`` solve a
    triangular system,

        ``u_i = β_i (v_i - α_1..α_i S_0ᵀ k_i - Σ_(j<i) α_(j+1)..α_i (k_i · k_j) u_j)``

    and one state goes from chunk to chunk. The result equals that of single tokens up to rounding,
    and takes ``T / CHUNK`` dependent steps.

    Args:
        heads: ``[B T ...]``.
        betas: ``[B T Hk r]``, ``β``; 0 adds nothing to the state.
        logs: ``[B T Hk r]``, ``log α``; 0 decays nothing.

    Returns:
        The output of every token, and the last state.
    """
    size = betas.shape[1]
    length = min(CHUNK, size)
    queries, keys, values, betas, logs = (_cut(leaf, length) for leaf in (*heads, betas, logs))

    # The log of α_1..α_i: the share of the state before the chunk that remains at token i.
    since = jnp.cumsum(logs, axis=2)
    # α_(j+1)..α_i, the share of the delta of token j that remains at token i. Where j > i the
    # exponent is positive and could overflow, so it is masked before and after.
    before = jnp.tril(jnp.ones((length, length), jnp.bool_))
    gaps = jnp.moveaxis(since[:, :, :, None] - since[:, :, None], (2, 3), (4, 5))
    decay = jnp.where(before, jnp.exp(jnp.where(before, gaps, 0.0)), 0.0)

    products = _einsum("nbihk,nbjhk->nbhij", keys, keys)[:, :, :, None]
    system = products * decay * _by_head(betas)[..., None]
    mixing = _einsum("nbihk,nbjhk->nbhij", queries, keys)[:, :, :, None] * decay

    # The right-hand side is a term without S_0 and a factor of S_0. Both are solved for at once.
    constant = _by_head(values * betas[..., None])
    state_factor = _by_head(keys[:, :, :, :, None] * (betas * jnp.exp(since))[..., None])
    solved = _solve(system, jnp.concatenate([constant, state_factor], axis=-1))
    constant = solved[..., : values.shape[-1]]
    state_factor = solved[..., values.shape[-1] :]

    total = _by_head(since[:, :, -1:])
    until_end = jnp.exp(total - _by_head(since))
    state = jnp.zeros((*constant.shape[1:4], keys.shape[-1], constant.shape[-1]), jnp.float32)
    chunks = Chunk(queries, keys, mixing, constant, state_factor, _by_head(since), until_end, total)
    state, out = lax.scan(_run_chunk, state, chunks)

    by_token = jnp.moveaxis(out, (0, 4), (1, 2))
    padded_out = by_token.reshape(by_token.shape[0], -1, *by_token.shape[3:])
    return padded_out[:, :size], state


def _run_chunk(state: Array, chunk: Chunk) -> tuple[Array, Array]:
    """Returns the state after a chunk, and the outputs of its tokens, ``[B Hk r L dv]``."""
    deltas = chunk.constant - _einsum("bhrik,bhrkv->bhriv", chunk.state_factor, state)

    # o_i = (α_1..α_i S_0 + Σ_(j≤i) α_(j+1)..α_i k_j u_jᵀ)ᵀ q_i
    out = _einsum("bihk,bhrkv->bhriv", chunk.queries, state) * jnp.exp(chunk.since)[..., None]
    out = out + _einsum("bhrij,bhrjv->bhriv", chunk.mixing, deltas)

    added = _einsum("bihk,bhriv->bhrkv", chunk.keys, deltas * chunk.until_end[..., None])
    return state * jnp.exp(chunk.total)[..., None] + added, out


def _by_head(leaf: Array) -> Array:
    """Returns ``[chunks B Hk r L ...]`` for ``[chunks B L Hk r ...]``."""
    return jnp.moveaxis(leaf, 2, 4)


def _einsum(pattern: str, *operands: Array) -> Array:
    return jnp.einsum(pattern, *operands, precision=matmul_precision(jnp.float32))


def _cut(leaf: Array, length: int) -> Array:
    """Returns ``[chunks B L ...]`` for ``[B T ...]``, padded with zeros."""
    padded = jnp.pad(leaf, ((0, 0), (0, -leaf.shape[1] % length), *[(0, 0)] * (leaf.ndim - 2)))
    chunks = padded.reshape(leaf.shape[0], -1, length, *leaf.shape[2:])
    return jnp.moveaxis(chunks, 1, 0)


def _solve(
    system: Float[Array, "*any L L"], right: Float[Array, "*any L M"]
) -> Float[Array, "*any L M"]:
    """Returns ``(1 + strictly lower part of system)⁻¹ right``.

    It computes row after row by products, which a mesh can divide by heads.
    """
    indices = jnp.arange(right.shape[-2], dtype=jnp.int32)
    rows = (indices, jnp.moveaxis(system, -2, 0), jnp.moveaxis(right, -2, 0))
    return lax.scan(_solve_row, jnp.zeros_like(right), rows)[0]


def _solve_row(solution: Array, equation: tuple[Array, Array, Array]) -> tuple[Array, None]:
    index, row, right_side = equation
    # Rows of the solution that are not computed yet are zeros, so all of the row may be multiplied.
    new = right_side - _einsum("...j,...jm->...m", row, solution)
    return lax.dynamic_update_index_in_dim(solution, new, index, axis=-2), None


def _unit(x: Float[Array, "*any dk"]) -> Float[Array, "*any dk"]:
    """Returns ``x / sqrt(Σ x² + eps)``."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def _with_slots(leaf: Array, count: int) -> Array:
    """Returns ``[B 1 + count ...]``: the committed value, then an empty slot for each node."""
    return jnp.pad(leaf[:, None], ((0, 0), (0, count), *[(0, 0)] * (leaf.ndim - 1)))


def _read_slot(slots: Array, node: Int[Array, " B"]) -> Array:
    """Returns each row's value of a node; node -1 is the committed value."""

    def read(row: Array, node: Array) -> Array:
        return lax.dynamic_index_in_dim(row, node + 1, axis=0, keepdims=False)

    return jax.vmap(read)(slots, node)
