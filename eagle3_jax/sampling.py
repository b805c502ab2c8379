"""From logits to the distribution that is sampled, and the random keys of each row.

Prefill, plain decoding and verification use the same function, so they cannot disagree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.devices.kernels import argmax, draw, largest, num_digits, uniforms
from eagle3_jax.devices.sharding import on_rows
from eagle3_jax.types import SamplingMode, SamplingParams


def probabilities(
    logits: Float[Array, "B N V"],
    sampling: SamplingParams,
    sampling_mode: SamplingMode = SamplingMode.TRUNCATED,
) -> Float[Array, "B N V"]:
    """Returns the target's distribution after temperature, then top-k, then top-p, in float32.

    The order is that of Hugging Face transformers.

    Args:
        logits: The target's logits after ``N`` tokens of each row.
        sampling: One value per row. A row of temperature 0 becomes a point mass on its argmax
            (lowest id in a tie).
        sampling_mode: ``TRUNCATED`` applies ``top_k`` and ``top_p``; ``TEMPERATURE`` skips their
            sort.
    """

    def per_row(value: Any) -> Array:
        return jnp.broadcast_to(jnp.asarray(value), logits.shape[:1])

    sampling = jax.tree.map(per_row, sampling)
    # On a mesh each device gets whole rows. Otherwise every sort, sum and draw would gather the
    # vocabulary by itself.
    logits = on_rows(logits.astype(jnp.float32))
    temperature = jnp.asarray(sampling.temperature)[:, None, None]

    # The maximum is subtracted before the division, which could overflow: infinity minus infinity
    # is NaN.
    value, index = largest(logits)
    best = value[..., None]
    below_best = jnp.where(logits == best, 0.0, logits - best)
    # A smaller divisor would be flushed to zero.
    smallest = jnp.finfo(jnp.float32).tiny
    divisor = jnp.where(temperature > 0, jnp.maximum(temperature, smallest), 1.0)
    scaled = below_best / divisor
    if sampling_mode is SamplingMode.TRUNCATED:
        scaled = _truncate(scaled, jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p))

    greedy = jax.nn.one_hot(index, logits.shape[-1], dtype=jnp.float32)
    is_sampled = temperature > 0
    return jnp.where(is_sampled, jax.nn.softmax(scaled, axis=-1), greedy)


def _truncate(
    logits: Float[Array, "B N V"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B N V"]:
    """Sets everything outside top-k, then outside top-p, to minus infinity."""
    size = logits.shape[-1]
    ids = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    # The sort gives the values with the order. An argsort and a gather write two more arrays of
    # this size on a GPU.
    negated, order = lax.sort((-logits, ids), num_keys=1, is_stable=True)
    ranked = -negated

    # Top-k. Ties with the k-th stay, as in Hugging Face transformers.
    is_limited = (top_k > 0) & (top_k < size)
    last_rank = jnp.where(is_limited, top_k, size)[:, None, None] - 1
    last_rank = jnp.broadcast_to(last_rank, (*ranked.shape[:2], 1))
    smallest = jnp.take_along_axis(ranked, last_rank, axis=-1)
    ranked = jnp.where(ranked >= smallest, ranked, -jnp.inf)

    # Top-p: the smallest set with at least this mass. A token belongs to it if the more likely ones
    # have less; the most likely token always does.
    mass = jax.nn.softmax(ranked, axis=-1)
    mass_before = jnp.cumsum(mass, axis=-1) - mass
    in_nucleus = (mass_before < top_p[:, None, None]) | (top_p[:, None, None] >= 1.0)
    in_nucleus = in_nucleus.at[..., 0].set(True)
    ranked = jnp.where(in_nucleus, ranked, -jnp.inf)

    # A scatter restores the order. On a CPU a second sort would double the cost of the whole
    # function.
    def restore(order: Int[Array, " V"], ranked: Float[Array, " V"]) -> Float[Array, " V"]:
        return jnp.zeros_like(ranked).at[order].set(ranked, unique_indices=True)

    return jax.vmap(jax.vmap(restore))(order, ranked)


def residual(
    p: Float[Array, "*B V"], q: Float[Array, "*B V"]
) -> tuple[Float[Array, "*B V"], Float[Array, "*B"]]:
    """Returns the distribution after a rejection, and its mass before normalization.

    It is ``max(p - q, 0)``, normalized (Leviathan et al., 2023, section 2.3). If ``p`` nowhere
    exceeds ``q``, the mass is 0 and the result is ``p``.
    """
    excess = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(excess, axis=-1)
    has_mass = mass[..., None] > 0
    divisor = jnp.where(mass > 0, mass, 1.0)[..., None]
    normalized = jnp.where(has_mass, excess / divisor, p)
    return normalized, mass


def row_keys(seed: int | Sequence[int], batch: int) -> Key[Array, " B"]:
    """Returns one key per row; row ``b`` has the same key in a batch of any size.

    Two calls with the same seed share their random numbers. Use different seeds for batches that
    must be independent.

    Args:
        seed: One seed for the batch, or one per row: a row then has the key of row 0 in a batch of
            that seed.
        batch: ``B``, rows.

    Raises:
        ValueError: A seed is not a whole number from 0 to 2^32 - 1, or there is not one per row.
    """
    if isinstance(seed, Sequence | np.ndarray):
        if len(seed) != batch:
            raise ValueError(f"{len(seed)} seeds for {batch} prompts; give one each")
        return jnp.concatenate([row_keys(seed_of_row, 1) for seed_of_row in seed])

    is_whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not is_whole or not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed!r}; expected a whole number from 0 to {2**32 - 1}")
    return _row_keys(jax.random.key(np.uint32(seed)), batch)


@functools.partial(jax.jit, static_argnames=("batch",))
def _row_keys(key: Key[Array, ""], batch: int) -> Key[Array, " B"]:
    fold_in_rows = jax.vmap(jax.random.fold_in, (None, 0))
    return fold_in_rows(key, jnp.arange(batch))


def keys_at(keys: Key[Array, " B"], position: Int[Array, " B"], purpose: int) -> Key[Array, " B"]:
    """Returns keys for one position of each row and one purpose.

    They depend only on the row and the position, never on other rows or on the number of rounds
    before.
    """
    fold_in_rows = jax.vmap(jax.random.fold_in)
    at_position = fold_in_rows(keys, position)
    fold_in_purpose = jax.vmap(jax.random.fold_in, (0, None))
    return fold_in_purpose(at_position, purpose)


__all__ = [
    "argmax",
    "draw",
    "keys_at",
    "largest",
    "num_digits",
    "probabilities",
    "residual",
    "row_keys",
    "uniforms",
]
