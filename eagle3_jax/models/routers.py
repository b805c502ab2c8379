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
    #: ``[T k]``, factors of the experts' outputs, or of their inputs if the router is
    #: ``sigmoid-of-input``.
    weights: Float[Array, "T k"]


def router_logits(
    x: Float[Array, "T D"],
    kernel: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    config: Experts,
    precision: Precision,
) -> Float[Array, "T E"]:
    """Returns ``x W + b``, summed in float32.

    Operands have the model's type, or float32 with mixed precision and for all sigmoid routers. On
    CPUs the sums of a token do not depend on the number of tokens. A choice is not continuous, so a
    block must choose exactly as single tokens do.
    """
    mixed = precision.operands != precision.activations
    operands = jnp.float32 if mixed or config.router == "sigmoid" else precision.operands
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
    return logits if config.router == "sigmoid" else logits.astype(precision.activations)


def route(
    logits: Float[Array, "T E"], correction: Float[Array, " E"] | None, config: Experts
) -> Routing:
    """Returns the ``k`` experts of every token and their weights. Of equal scores the first wins.

    Args:
        logits: ``[T E]``, from :func:`router_logits`.
        correction: ``[E]``, added to the scores of a ``sigmoid`` router before the choice, and not
            to the weights.
        config: Router, ``k`` and groups.
    """
    scores = logits.astype(jnp.float32)
    if config.router == "softmax":
        weights, chosen = lax.top_k(jax.nn.softmax(scores, axis=-1), config.per_token)
        if config.normalise:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    elif config.router == "sigmoid":
        assert correction is not None
        scores = jax.nn.sigmoid(scores)
        masked = _mask_groups(scores + correction[None, :], config)
        chosen = lax.top_k(masked, config.per_token)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.normalise:  # all sigmoids can round to zero in float32
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    else:
        largest, chosen = lax.top_k(scores, config.per_token)
        normalise = config.router == "softmax-of-chosen"
        weights = jax.nn.softmax(largest, axis=-1) if normalise else jax.nn.sigmoid(largest)
    weights = (weights * config.scaling).astype(logits.dtype)
    order = jnp.argsort(chosen, axis=-1)
    sort = lambda values: jnp.take_along_axis(values, order, axis=-1)
    return Routing(sort(chosen), sort(weights))


def _mask_groups(scores: Float[Array, "T E"], config: Experts) -> Float[Array, "T E"]:
    """Sets scores to ``-inf`` outside the groups with the largest sums of their two best (DeepSeek-V3, 2024)."""
    if config.groups == 1:
        return scores
    grouped = scores.reshape(len(scores), config.groups, -1)
    group_scores = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    best = lax.top_k(group_scores, config.kept_groups)[1]
    matches = best[:, :, None] == jnp.arange(config.groups, dtype=jnp.int32)[None, None]
    is_best = jnp.any(matches, axis=1)
    return jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
