"""Forms of one sum over chosen experts, for few tokens and many, for CPUs and accelerators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from eagle3_jax.models.config import Experts
from eagle3_jax.models.layers import Precision, keep_fused, product
from eagle3_jax.models.quantised import Fp8Kernel
from eagle3_jax.models.routers import Routing

# Rows of a run: with fewer it is one expert after the other.
_SHORTEST = 8
_LONGEST = 128
_DENSE = 128  # Tokens up to which accelerators read all experts for less than it takes to sort rows.


class Stack(NamedTuple):
    """The experts' parameters; every leaf leads with ``E``."""

    gate_up: Any  #: ``[E D 2I]``, columns ``[I, 2]``.
    down: Any  #: ``[E I D]``.
    gate_up_bias: Float[Array, "E columns"] | None  #: ``[E 2I]``.
    down_bias: Float[Array, "E D"] | None  #: ``[E D]``.


def mixture(
    x: Float[Array, "T D"], routing: Routing, stack: Stack, config: Experts, precision: Precision
) -> Float[Array, "T D"]:
    """``Σ w_e · expert_e(x)`` over the chosen experts that the stack has, counted from 0; others add nothing.

    The form follows from the device and the number of tokens (docs/design.md, 18). Every form sums the experts of a
    token in ascending order, in float32.
    """
    tokens, per_token = routing.chosen.shape
    rows = _rows_of_a_run(tokens, per_token, config.num_experts)
    of = {"config": config, "precision": precision}
    # Products that round their rows too are those of the other forms, whatever the number of tokens.
    if routing.chosen.size < size(stack) and not getattr(stack.gate_up, "dynamic", False):
        other = of_chosen
    else:
        other = of_all if len(x) <= _DENSE else functools.partial(in_runs, rows=rows, skip=False)
    cpu = one_by_one if len(x) <= _SHORTEST else functools.partial(in_runs, rows=rows, skip=True)
    forms = {"cpu": functools.partial(cpu, **of), "default": functools.partial(other, **of)}
    return lax.platform_dependent(x, routing, stack, **forms)


def size(stack: Stack) -> int:
    """``E``."""
    return len(jax.tree.leaves(stack)[0])


def _rows_of_a_run(tokens: int, per_token: int, experts: int) -> int:
    """About as many as an expert gets, were they chosen evenly."""
    even = max(_SHORTEST, min(_LONGEST, tokens * per_token // experts))
    return min(tokens, 1 << (even - 1).bit_length())


def one_by_one(
    x: Float[Array, "T D"], routing: Routing, stack: Stack, *, config: Experts, precision: Precision
) -> Float[Array, "T D"]:
    """All tokens through one expert after the other, without those that no token chose.

    Weights are cut out of the stack within the branch: on CPUs XLA would otherwise convert a stack of bfloat16 as a
    whole, before the loop.
    """

    def step(out: Array, expert: Array) -> tuple[Array, None]:
        here = routing.chosen == expert
        goes = jnp.any(here, axis=1, keepdims=True)

        def add(out: Array) -> Array:
            one = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, expert, keepdims=False), stack)
            weights = jnp.sum(jnp.where(here, routing.weights, 0), axis=1, keepdims=True)
            return out + jnp.where(goes, _weighed(x, weights, one, config, precision), 0)

        return lax.cond(jnp.any(goes), add, lambda out: out, out), None

    out, _ = lax.scan(step, jnp.zeros(x.shape, jnp.float32), jnp.arange(size(stack), dtype=jnp.int32))
    return out.astype(precision.activations)


def in_runs(
    x: Float[Array, "T D"],
    routing: Routing,
    stack: Stack,
    *,
    config: Experts,
    precision: Precision,
    rows: int,
    skip: bool,
) -> Float[Array, "T D"]:
    """Pairs of token and expert sorted by expert and cut into runs of one expert, one run after the other.

    Args:
        x: Tokens.
        routing: Their experts.
        stack: Parameters.
        config: Of the experts.
        precision: Of their products.
        rows: Pairs in a run.
        skip: Whether runs that nobody needs are left out by a branch, as in :func:`one_by_one`.
    """
    tokens, width = x.shape
    experts = size(stack)
    pairs = routing.chosen.size
    expert = routing.chosen.reshape(-1)
    weight = routing.weights.reshape(-1)
    here = (expert >= 0) & (expert < experts)
    order = jnp.argsort(jnp.where(here, expert, experts), stable=True).astype(jnp.int32)
    each = jnp.arange(experts, dtype=jnp.int32)
    sizes = jnp.sum(expert[:, None] == each[None, :], axis=0, dtype=jnp.int32)
    runs = -(-sizes // rows)
    ends = jnp.cumsum(runs, dtype=jnp.int32)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    most = min(experts, pairs) + (0 if tokens <= rows else pairs // rows)
    run = jnp.arange(most, dtype=jnp.int32)
    within = jnp.arange(rows, dtype=jnp.int32)
    of_run = jnp.minimum(jnp.searchsorted(ends, run, side="right").astype(jnp.int32), experts - 1)
    place = (starts + (runs - ends) * rows)[of_run, None] + run[:, None] * rows + within[None, :]
    needed = run < ends[-1]
    valid = needed[:, None] & (place < (starts + sizes)[of_run, None])
    pair = order[jnp.minimum(place, pairs - 1)]
    token = jnp.where(valid, pair // routing.chosen.shape[1], tokens)

    def add(out: Array, expert: Array, token: Array, weight: Array) -> Array:
        one = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, expert, keepdims=False), stack)
        given = x.at[token].get(mode="fill", fill_value=0)
        return out.at[token].add(_weighed(given, weight[:, None], one, config, precision), mode="drop")

    def step(out: Array, run: tuple[Array, ...]) -> tuple[Array, None]:
        needed, *arguments = run
        if not skip:
            return add(out, *arguments), None
        return lax.cond(needed, add, lambda out, *_: out, out, *arguments), None

    out = jnp.zeros((tokens, width), jnp.float32)
    out, _ = lax.scan(step, out, (needed, of_run, token, weight[pair]))
    return out.astype(precision.activations)


def of_all(
    x: Float[Array, "T D"], routing: Routing, stack: Stack, *, config: Experts, precision: Precision
) -> Float[Array, "T D"]:
    """Every token through every expert, and what was chosen is taken."""
    tokens = jnp.arange(len(x), dtype=jnp.int32)[:, None]
    experts = size(stack)
    chosen = _within(routing, experts)
    given = jnp.broadcast_to(x, (experts, *x.shape))
    weights = routing.weights
    if config.router == "sigmoid-of-input":
        each = jnp.zeros((len(x), experts), weights.dtype).at[tokens, chosen].set(weights, mode="drop")
        given = given * each.T[:, :, None].astype(x.dtype)
        weights = jnp.ones_like(weights)
    out = jax.vmap(
        functools.partial(_expert, limit=config.limit, times=functools.partial(product, precision=precision))
    )(given, stack)
    taken = out.at[chosen, tokens].get(mode="fill", fill_value=0)
    return _in_turn(_times_weight(taken, weights[..., None])).astype(precision.activations)


def of_chosen(
    x: Float[Array, "T D"], routing: Routing, stack: Stack, *, config: Experts, precision: Precision
) -> Float[Array, "T D"]:
    """The chosen experts of every token, each read where it lies; as sums of products, which a gather fuses with."""
    experts = size(stack)
    here = (routing.chosen >= 0) & (routing.chosen < experts)
    index = jnp.where(here, routing.chosen, 0)
    one = jax.tree.map(lambda leaf: leaf[index], stack)
    given = x[:, None]
    if config.router == "sigmoid-of-input":
        given = given * routing.weights[..., None].astype(x.dtype)
    given = jnp.broadcast_to(given, (*index.shape, x.shape[1]))

    def times(rows: Array, kernels: Any) -> Array:
        scale: Array | None = None
        if isinstance(kernels, Fp8Kernel):  # as products scale it: behind the sum, or before
            scale = kernels.scale[..., 0, :] if kernels.per_channel else None
            kernels = kernels.dense(precision.operands) if scale is None else kernels.unscaled(precision.operands)
        rows, kernels = (of.astype(precision.operands).astype(jnp.float32) for of in (rows, kernels))
        out = jnp.sum(rows[..., None] * kernels, axis=-2)
        return (out if scale is None else out * scale).astype(precision.activations)

    out = _expert(given, one, limit=config.limit, times=times)
    if config.router != "sigmoid-of-input":
        out = _times_weight(out, routing.weights[..., None])
    return _in_turn(jnp.where(here[..., None], out, 0)).astype(precision.activations)


def _within(routing: Routing, experts: int) -> Array:
    """The chosen; those that the stack has not lie behind it (a negative index would count from the end)."""
    return jnp.where(routing.chosen < 0, experts, routing.chosen)


def _in_turn(parts: Float[Array, "T k D"]) -> Float[Array, "T D"]:
    """The sum over ``k`` from the first to the last, in float32."""
    parts = parts.astype(jnp.float32)
    return functools.reduce(jnp.add, [parts[:, at] for at in range(parts.shape[1])])


def _weighed(x: Array, weights: Array, stack: Stack, config: Experts, precision: Precision) -> Array:
    expert = functools.partial(_expert, limit=config.limit, times=functools.partial(product, precision=precision))
    if config.router == "sigmoid-of-input":
        return expert(x * weights.astype(x.dtype), stack).astype(jnp.float32)
    return _times_weight(expert(x, stack), weights)


def _times_weight(y: Array, weights: Array) -> Array:
    return y.astype(jnp.float32) * weights.astype(jnp.float32)


def _expert(
    x: Float[Array, "*rows D"],
    one: Stack,
    *,
    limit: float | None,
    times: Callable[..., Array],
) -> Float[Array, "*rows D"]:
    """A gated MLP; ``one`` is a stack without its leading axis, ``times`` multiplies rows by one of its kernels."""
    both = _plus(times(x, one.gate_up), one.gate_up_bias)
    both = keep_fused(both).reshape(*x.shape[:-1], -1, 2)
    gate = both[..., 0]
    up = both[..., 1]
    if limit is None:
        inner = jax.nn.silu(gate) * up
    else:
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    return _plus(times(inner, one.down), one.down_bias)


def _plus(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + lax.broadcast_to_rank(bias.astype(y.dtype), y.ndim)
