"""Which experts a token goes through, and with which weights."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from eagle3_jax.models.config import Experts
from eagle3_jax.models.layers import Precision, matmul_precision

_A_BLOCK = 64  # Tokens; more than that are a prompt's, which nothing reads twice.


class Routing(NamedTuple):
    """Experts of tokens."""

    chosen: Int[Array, "T k"]  #: ``[T k]``, ascending: what is summed over experts is summed in this order.
    #: ``[T k]``, of their outputs; of their inputs where the router is ``sigmoid-of-input``.
    weights: Float[Array, "T k"]


def router_logits(
    x: Float[Array, "T D"],
    kernel: Float[Array, "D E"],
    bias: Float[Array, " E"] | None,
    config: Experts,
    precision: Precision,
) -> Float[Array, "T E"]:
    """``x W + b``, summed in float32.

    Operands are of the model's type where it sums in that type too; of float32 otherwise (``mixed``), and for sigmoid
    routers always. On CPUs the sums of a token do not depend on how many there are beside it: a choice is not
    continuous, and a block must choose as single tokens do.
    """
    mixed = precision.operands != precision.activations
    operands = jnp.float32 if mixed or config.router == "sigmoid" else precision.operands
    rows = x.astype(operands)
    kernel = kernel.astype(operands)

    def product(rows: Array, kernel: Array) -> Array:
        return lax.dot_general(
            rows,
            kernel,
            (((1,), (0,)), ((), ())),
            precision=matmul_precision(operands),
            preferred_element_type=jnp.float32,
        )

    def row_by_row(rows: Array, kernel: Array) -> Array:
        # One row alone would be another loop than the body of a loop over rows.
        several = jnp.concatenate([rows] * 2) if len(rows) == 1 else rows
        return lax.map(lambda row: product(row[None], kernel)[0], several)[: len(rows)]

    cpu = row_by_row if len(rows) <= _A_BLOCK else product
    logits = lax.platform_dependent(rows, kernel, cpu=cpu, default=product)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)[None, :]
    return logits if config.router == "sigmoid" else logits.astype(precision.activations)


def route(logits: Float[Array, "T E"], correction: Float[Array, " E"] | None, config: Experts) -> Routing:
    """The ``k`` experts of every token, as the router of the configuration chooses; of equals the first.

    Args:
        logits: Of all experts.
        correction: Added to the scores of a ``sigmoid`` router before the choice, and not to the weights.
        config: Of the experts.
    """
    scores = logits.astype(jnp.float32)
    if config.router == "softmax":
        weights, chosen = lax.top_k(jax.nn.softmax(scores, axis=-1), config.per_token)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True) if config.normalise else weights
    elif config.router == "sigmoid":
        assert correction is not None
        scores = jax.nn.sigmoid(scores)
        chosen = lax.top_k(_of_kept_groups(scores + correction[None, :], config), config.per_token)[1]
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        # A sigmoid can be nothing but zeros in float32.
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20) if config.normalise else weights
    else:
        largest, chosen = lax.top_k(scores, config.per_token)
        of_chosen = config.router == "softmax-of-chosen"
        weights = jax.nn.softmax(largest, axis=-1) if of_chosen else jax.nn.sigmoid(largest)
    weights = (weights * config.scaling).astype(logits.dtype)
    order = jnp.argsort(chosen, axis=-1)
    return Routing(*(jnp.take_along_axis(one, order, axis=-1) for one in (chosen, weights)))


def _of_kept_groups(scores: Float[Array, "T E"], config: Experts) -> Float[Array, "T E"]:
    """The scores, ``-inf`` outside the groups with the largest sums of their two best (DeepSeek-V3, 2024)."""
    if config.groups == 1:
        return scores
    grouped = scores.reshape(len(scores), config.groups, -1)
    of_groups = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    kept = lax.top_k(of_groups, config.kept_groups)[1]
    stays = jnp.any(kept[:, :, None] == jnp.arange(config.groups, dtype=jnp.int32)[None, None], axis=1)
    return jnp.where(stays[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
