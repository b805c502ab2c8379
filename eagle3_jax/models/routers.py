"""The choice of experts for each token, and their weights."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from eagle3_jax.models.config import Experts
from eagle3_jax.models.layers import Precision, contract

_A_BLOCK = 64  # most tokens of a block; more are a prompt, which is computed once


class Routing(NamedTuple):
    """The experts of each token."""

    #: ``[T k]``, ids in ascending order, which is the order of all sums over experts.
    chosen: Int[Array, "T k"]
    #: ``[T k]``, factors of the experts' outputs, or of their inputs
    #: (:attr:`~eagle3_jax.models.config.Router.weighs_input`).
    weights: Float[Array, "T k"]


def router_logits(
    x: Float[Array, "T D"],
    kernel: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    config: Experts,
    precision: Precision,
) -> Float[Array, "T E"]:
    """Returns ``x W + b``, summed in float32.

    Operands have the model's type, or float32 with mixed precision and for routers with a
    correction. On CPUs the sums of a token do not depend on the number of tokens. A choice is not
    continuous, so a block must choose exactly as single tokens do.
    """
    mixed = precision.operands != precision.activations
    in_float32 = config.routing.has_correction
    operands = jnp.float32 if mixed or in_float32 else precision.operands
    rows = x.astype(operands)
    kernel = kernel.astype(operands)

    product = functools.partial(contract, dtype=jnp.float32)

    def row_by_row(rows: Array, kernel: Array) -> Array:
        # XLA unrolls a loop over one row and rounds differently, so a single row is repeated.
        several = jnp.concatenate([rows] * 2) if len(rows) == 1 else rows
        return lax.map(lambda row: product(row[None], kernel)[0], several)[: len(rows)]

    cpu = row_by_row if len(rows) <= _A_BLOCK else product
    logits = lax.platform_dependent(rows, kernel, cpu=cpu, default=product)

    if bias is not None:
        logits = logits + bias.astype(jnp.float32)[None, :]
    return logits if in_float32 else logits.astype(precision.activations)


def route(
    logits: Float[Array, "T E"], correction: Float[Array, " E"] | None, config: Experts
) -> Routing:
    """Returns the ``k`` experts of every token and their weights. Of equal scores the first wins.

    Args:
        logits: ``[T E]``, from :func:`router_logits`.
        correction: ``[E]``, added to the scores before the choice, and not to the weights; for
            routers that have one.
        config: Router, ``k`` and groups.
    """
    router = config.routing
    score = jax.nn.softmax if router.is_softmax else jax.nn.sigmoid
    in_float32 = logits.astype(jnp.float32)

    if router.chosen_only:
        largest, chosen = lax.top_k(in_float32, config.per_token)
        weights = score(largest)
    elif router.has_correction:
        assert correction is not None
        scores = score(in_float32)
        masked = _mask_groups(scores + correction[None, :], config)
        chosen = lax.top_k(masked, config.per_token)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
    else:
        weights, chosen = lax.top_k(score(in_float32), config.per_token)

    if config.normalise and not router.chosen_only:
        total = jnp.sum(weights, axis=-1, keepdims=True)
        # All sigmoids can round to zero in float32.
        weights = weights / (total if router.is_softmax else total + 1e-20)
    weights = (weights * config.scaling).astype(logits.dtype)

    order = jnp.argsort(chosen, axis=-1)
    return Routing(
        jnp.take_along_axis(chosen, order, axis=-1), jnp.take_along_axis(weights, order, axis=-1)
    )


def _mask_groups(scores: Float[Array, "T E"], config: Experts) -> Float[Array, "T E"]:
    """Sets scores to ``-inf`` outside the groups that are kept (DeepSeek-V3, 2024).

    The kept groups have the largest sums of their two best scores.
    """
    if config.groups == 1:
        return scores

    grouped = scores.reshape(len(scores), config.groups, -1)
    group_scores = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    best = lax.top_k(group_scores, config.kept_groups)[1]
    matches = best[:, :, None] == jnp.arange(config.groups, dtype=jnp.int32)[None, None]
    is_best = jnp.any(matches, axis=1)
    return jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
