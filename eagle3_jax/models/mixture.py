"""Four algorithms for the sum over chosen experts.

They are for few and for many tokens, on CPUs and on accelerators.
"""

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
from eagle3_jax.models.quantised import Fp8Kernel, GroupedKernel
from eagle3_jax.models.routers import Routing

# Rows of a run. CPUs loop over experts for at most _SHORTEST tokens.
_SHORTEST = 8
_LONGEST = 128
# Up to this number of tokens, running all experts takes an accelerator less time than sorting.
_DENSE = 128


class Stack(NamedTuple):
    """The experts' parameters; the first axis of every leaf is ``E``."""

    gate_up: Any  #: ``[E D 2I]``, columns ``[I, 2]``.
    down: Any  #: ``[E I D]``.
    gate_up_bias: Float[Array, "E columns"] | None  #: ``[E 2I]``.
    down_bias: Float[Array, "E D"] | None  #: ``[E D]``.


def mixture(
    x: Float[Array, "T D"], routing: Routing, stack: Stack, config: Experts, precision: Precision
) -> Float[Array, "T D"]:
    """Returns ``Σ w_e · expert_e(x)`` over the chosen experts in the stack.

    The algorithm depends on the device and the number of tokens (docs/design.md, 18). All of them
    add the experts of a token in ascending order, in float32.

    Args:
        x: ``[T D]``, input of the experts.
        routing: Experts and weights of each token. Ids count from the first expert of the stack; an
            id outside the stack adds nothing.
        stack: The experts' parameters.
        config: Number, router and gates of the experts.
        precision: Types of products and activations.
    """
    tokens, per_token = routing.chosen.shape
    rows = _rows_per_run(tokens, per_token, config.num_experts)
    run = functools.partial(loop_over_runs, rows=rows)

    cpu: Callable[..., Array] = functools.partial(run, skip=True)
    if tokens <= _SHORTEST:
        cpu = loop_over_experts

    default: Callable[..., Array] = functools.partial(run, skip=False)
    # gather_chosen does not quantise rows, so dynamic kernels use the other algorithms for any
    # number of tokens.
    is_dynamic = getattr(stack.gate_up, "dynamic", False)
    if routing.chosen.size < count_experts(stack) and not is_dynamic:
        default = gather_chosen
    elif tokens <= _DENSE:
        default = run_all

    options = {"config": config, "precision": precision}
    return lax.platform_dependent(
        x,
        routing,
        stack,
        cpu=functools.partial(cpu, **options),
        default=functools.partial(default, **options),
    )


def count_experts(stack: Stack) -> int:
    """Returns ``E``, the number of experts in a stack."""
    return len(jax.tree.leaves(stack)[0])


def _rows_per_run(tokens: int, per_token: int, experts: int) -> int:
    """Returns a power of two: about the rows of an expert if tokens choose experts evenly."""
    even = max(_SHORTEST, min(_LONGEST, tokens * per_token // experts))
    return min(tokens, 1 << (even - 1).bit_length())


def loop_over_experts(
    x: Float[Array, "T D"], routing: Routing, stack: Stack, *, config: Experts, precision: Precision
) -> Float[Array, "T D"]:
    """Sends all tokens through one expert after the other and skips experts that no token chose.

    Weights are read from the stack within the branch; otherwise XLA would convert a whole stack of
    bfloat16 before the loop on CPUs.
    """

    def step(out: Array, expert: Array) -> tuple[Array, None]:
        is_chosen = routing.chosen == expert
        goes = jnp.any(is_chosen, axis=1, keepdims=True)

        def add(out: Array) -> Array:
            kernels = _kernels_of(stack, expert)
            weights = jnp.sum(jnp.where(is_chosen, routing.weights, 0), axis=1, keepdims=True)
            weighed = _run_weighed(x, weights, kernels, config, precision)
            return out + jnp.where(goes, weighed, 0)

        return lax.cond(jnp.any(goes), add, lambda out: out, out), None

    zeros = jnp.zeros(x.shape, jnp.float32)
    out, _ = lax.scan(step, zeros, jnp.arange(count_experts(stack), dtype=jnp.int32))
    return out.astype(precision.activations)


def loop_over_runs(
    x: Float[Array, "T D"],
    routing: Routing,
    stack: Stack,
    *,
    config: Experts,
    precision: Precision,
    rows: int,
    skip: bool,
) -> Float[Array, "T D"]:
    """Sorts pairs of token and expert by expert, and computes runs of pairs of one expert.

    Shapes are static, so there are always ``most`` runs, and the last ones may have no pairs.

    Args:
        x: ``[T D]``, input of the experts.
        routing: Experts and weights of each token.
        stack: The experts' parameters.
        config: Number, router and gates of the experts.
        precision: Types of products and activations.
        rows: Pairs in a run.
        skip: Whether a branch skips runs without pairs, as in :func:`loop_over_experts`.
    """
    tokens, width = x.shape
    experts = count_experts(stack)
    pairs = routing.chosen.size
    expert = routing.chosen.reshape(-1)
    weight = routing.weights.reshape(-1)

    # Pairs of experts outside the stack come last.
    in_stack = (expert >= 0) & (expert < experts)
    order = jnp.argsort(jnp.where(in_stack, expert, experts), stable=True).astype(jnp.int32)

    # Of each expert: its pairs, its runs, and its first pair in the order.
    ids = jnp.arange(experts, dtype=jnp.int32)
    sizes = jnp.sum(expert[:, None] == ids[None, :], axis=0, dtype=jnp.int32)
    runs = -(-sizes // rows)
    run_stops = jnp.cumsum(runs, dtype=jnp.int32)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes

    # The expert of each run. Every expert has at most one run that is not full.
    most = min(experts, pairs) + (0 if tokens <= rows else pairs // rows)
    run = jnp.arange(most, dtype=jnp.int32)
    offset = jnp.arange(rows, dtype=jnp.int32)
    of_run = jnp.minimum(
        jnp.searchsorted(run_stops, run, side="right").astype(jnp.int32), experts - 1
    )

    # Index among the sorted pairs, as if the runs of an expert began at run 0.
    index_at_run_0 = (starts + (runs - run_stops) * rows)[of_run, None]
    index = index_at_run_0 + run[:, None] * rows + offset[None, :]
    needed = run < run_stops[-1]
    valid = needed[:, None] & (index < (starts + sizes)[of_run, None])
    pair = order[jnp.minimum(index, pairs - 1)]
    # A row that is not valid reads a token that does not exist, which gives zeros and is dropped.
    token = jnp.where(valid, pair // routing.chosen.shape[1], tokens)

    def add(out: Array, expert: Array, token: Array, weight: Array) -> Array:
        kernels = _kernels_of(stack, expert)
        inputs = x.at[token].get(mode="fill", fill_value=0)
        weighed = _run_weighed(inputs, weight[:, None], kernels, config, precision)
        return out.at[token].add(weighed, mode="drop")

    def step(out: Array, run: tuple[Array, ...]) -> tuple[Array, None]:
        needed, *arguments = run
        if not skip:
            return add(out, *arguments), None
        return lax.cond(needed, add, lambda out, *_: out, out, *arguments), None

    out = jnp.zeros((tokens, width), jnp.float32)
    out, _ = lax.scan(step, out, (needed, of_run, token, weight[pair]))
    return out.astype(precision.activations)


def run_all(
    x: Float[Array, "T D"], routing: Routing, stack: Stack, *, config: Experts, precision: Precision
) -> Float[Array, "T D"]:
    """Sends every token through every expert and keeps the outputs of the chosen experts."""
    tokens = jnp.arange(len(x), dtype=jnp.int32)[:, None]
    experts = count_experts(stack)
    # An expert outside the stack gets the index after its end. A negative index would count from
    # the end.
    chosen = jnp.where(routing.chosen < 0, experts, routing.chosen)

    inputs = jnp.broadcast_to(x, (experts, *x.shape))
    weights = routing.weights
    if config.routing.weighs_input:
        zeros = jnp.zeros((len(x), experts), weights.dtype)
        by_expert = zeros.at[tokens, chosen].set(weights, mode="drop")
        inputs = inputs * by_expert.T[:, :, None].astype(x.dtype)
        weights = jnp.ones_like(weights)

    multiply = functools.partial(product, precision=precision)
    run_expert = functools.partial(_run_expert, limit=config.limit, multiply=multiply)
    out = jax.vmap(run_expert)(inputs, stack)
    chosen_out = out.at[chosen, tokens].get(mode="fill", fill_value=0)
    return _sum_in_order(_weigh(chosen_out, weights[..., None])).astype(precision.activations)


def gather_chosen(
    x: Float[Array, "T D"], routing: Routing, stack: Stack, *, config: Experts, precision: Precision
) -> Float[Array, "T D"]:
    """Gathers the kernels of the chosen experts of every token.

    Products are multiplications and sums, so that XLA fuses the gather with them and copies no
    kernel.
    """
    experts = count_experts(stack)
    in_stack = (routing.chosen >= 0) & (routing.chosen < experts)
    index = jnp.where(in_stack, routing.chosen, 0)
    kernels = jax.tree.map(lambda leaf: leaf[index], stack)

    inputs = x[:, None]
    if config.routing.weighs_input:
        inputs = inputs * routing.weights[..., None].astype(x.dtype)
    inputs = jnp.broadcast_to(inputs, (*index.shape, x.shape[1]))

    multiply = functools.partial(_multiply_gathered, precision=precision)
    out = _run_expert(inputs, kernels, limit=config.limit, multiply=multiply)
    if not config.routing.weighs_input:
        out = _weigh(out, routing.weights[..., None])
    return _sum_in_order(jnp.where(in_stack[..., None], out, 0)).astype(precision.activations)


def _multiply_gathered(rows: Array, kernel: Any, precision: Precision) -> Array:
    """Multiplies each row with a kernel of its own."""
    # An FP8 kernel is scaled as in `product`: after the sum, if every output has one scale.
    scale: Array | None = None
    if isinstance(kernel, GroupedKernel):
        if isinstance(kernel, Fp8Kernel) and kernel.per_channel:
            scale = kernel.scale[..., 0, :]
            kernel = kernel.unscaled(precision.operands)
        else:
            kernel = kernel.dense(precision.operands)

    rows = rows.astype(precision.operands).astype(jnp.float32)
    kernel = kernel.astype(precision.operands).astype(jnp.float32)
    out = jnp.sum(rows[..., None] * kernel, axis=-2)
    return (out if scale is None else out * scale).astype(precision.activations)


def _sum_in_order(parts: Float[Array, "T k D"]) -> Float[Array, "T D"]:
    """Returns the sum over ``k`` from the first to the last, in float32."""
    parts = parts.astype(jnp.float32)
    return functools.reduce(jnp.add, [parts[:, index] for index in range(parts.shape[1])])


def _kernels_of(stack: Stack, expert: Array) -> Stack:
    """Returns the parameters of one expert of a stack."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, expert, keepdims=False), stack)


def _run_weighed(
    x: Array, weights: Array, kernels: Stack, config: Experts, precision: Precision
) -> Array:
    """Returns an expert's output in float32, with weights applied to its input or its output."""
    multiply = functools.partial(product, precision=precision)
    run_expert = functools.partial(_run_expert, limit=config.limit, multiply=multiply)
    if config.routing.weighs_input:
        return run_expert(x * weights.astype(x.dtype), kernels).astype(jnp.float32)
    return _weigh(run_expert(x, kernels), weights)


def _weigh(y: Array, weights: Array) -> Array:
    """Returns ``weights · y`` in float32."""
    return y.astype(jnp.float32) * weights.astype(jnp.float32)


def _run_expert(
    x: Float[Array, "*rows D"],
    kernels: Stack,
    *,
    limit: float | None,
    multiply: Callable[..., Array],
) -> Float[Array, "*rows D"]:
    """Computes a gated MLP.

    Args:
        x: Rows.
        kernels: A stack without its first axis.
        limit: See :class:`~eagle3_jax.models.config.Experts`.
        multiply: Multiplies rows by a kernel.
    """
    fused = _add_bias(multiply(x, kernels.gate_up), kernels.gate_up_bias)
    fused = keep_fused(fused).reshape(*x.shape[:-1], -1, 2)
    gate = fused[..., 0]
    up = fused[..., 1]

    if limit is None:
        inner = jax.nn.silu(gate) * up
    else:
        gate = jnp.minimum(gate, limit)
        up = jnp.clip(up, -limit, limit)
        inner = (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
    return _add_bias(multiply(inner, kernels.down), kernels.down_bias)


def _add_bias(y: Array, bias: Array | None) -> Array:
    return y if bias is None else y + lax.broadcast_to_rank(bias.astype(y.dtype), y.ndim)
