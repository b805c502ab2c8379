"""Compiled operations on the rows of a running batch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.devices.sharding import on_rows
from eagle3_jax.state import GenerationState
from eagle3_jax.types import FinishReason


@functools.partial(jax.jit, static_argnames=("count",))
def ended_copies(rows: GenerationState, count: int) -> GenerationState:
    """Returns ``count`` rows that have ended. They are copies of the first of ``rows``, so every leaf is valid."""
    copies = jax.tree.map(lambda leaf: leaf[jnp.zeros((count,), jnp.int32)], rows)
    return on_rows(copies.replace(finish=jnp.full((count,), int(FinishReason.LENGTH), jnp.int32)))


@functools.partial(jax.jit, donate_argnames=("state",))
def insert(
    state: GenerationState, rows: GenerationState, indices: Int[Array | np.ndarray, " R"]
) -> GenerationState:
    """Returns the state with ``rows`` in place of its rows ``indices``. It consumes ``state``."""
    return on_rows(
        jax.tree.map(lambda live, new: live.at[indices].set(new, mode="drop"), state, rows)
    )


@functools.partial(jax.jit, donate_argnames=("state",))
def end(state: GenerationState, index: Int[Array, ""] | int) -> GenerationState:
    """Returns the state with one row ended. It consumes ``state``."""
    is_ended = jnp.arange(state.finish.shape[0]) == index
    return on_rows(
        state.replace(finish=jnp.where(is_ended, int(FinishReason.LENGTH), state.finish))
    )


@functools.partial(jax.jit, static_argnames=("width",))
def written(state: GenerationState, starts: Int[Array | np.ndarray, " B"], *, width: int) -> tuple:
    """Returns each row's length, finish, tokens and log-probabilities from ``starts`` on, and counters."""
    slots = jnp.minimum(starts[:, None] + jnp.arange(width), state.tokens.shape[1] - 1)
    take = jax.vmap(lambda leaf, slots: leaf[slots])
    scores = (
        None
        if state.logprobs is None
        else jax.tree.map(lambda leaf: take(leaf, slots), state.logprobs)
    )
    return state.length, state.finish, take(state.tokens, slots), scores, state.stats
