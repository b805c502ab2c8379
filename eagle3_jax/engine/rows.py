"""Compiled operations on the rows of a running batch."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from eagle3_jax.devices.sharding import on_rows
from eagle3_jax.state import GenerationState, Prompts
from eagle3_jax.types import FinishReason


class Written(NamedTuple):
    """What a host reads of the rows of a batch, ``[B ...]``."""

    length: Any
    finish: Any
    tokens: Any  #: ``[B width]``, from the first position of each row that is read.
    logprobs: Any  #: Those of ``tokens``; ``None`` if none are recorded.
    stats: Any  #: Counters of all rounds.


@functools.partial(jax.jit, static_argnames=("count",))
def ended_copies(rows: GenerationState, count: int) -> GenerationState:
    """Returns ``count`` rows that have ended.

    They are copies of the first of ``rows``, so every leaf is valid.
    """
    copies = jax.tree.map(lambda leaf: leaf[jnp.zeros((count,), jnp.int32)], rows)
    return on_rows(copies.replace(finish=jnp.full((count,), int(FinishReason.LENGTH), jnp.int32)))


@jax.jit
def siblings(prefix: GenerationState, prompts: Prompts) -> GenerationState:
    """Returns a copy of the first row of ``prefix`` for each prompt, with the options of that."""
    count = prompts.length.shape[0]
    copies = jax.tree.map(lambda leaf: leaf[jnp.zeros((count,), jnp.int32)], prefix)
    options = {
        name: getattr(prompts, name)
        for name in ("limit", "limit_reason", "stop_tokens", "sampling", "keys")
    }
    return on_rows(copies.replace(**options))


@functools.partial(jax.jit, donate_argnames=("state",))
def insert(
    state: GenerationState, rows: GenerationState, indices: Int[Array | np.ndarray, " R"]
) -> GenerationState:
    """Returns the state with ``rows`` in place of its rows ``indices``. It consumes ``state``."""
    inserted = jax.tree.map(lambda live, new: live.at[indices].set(new, mode="drop"), state, rows)
    return on_rows(inserted)


@functools.partial(jax.jit, donate_argnames=("state",))
def end(state: GenerationState, index: Int[Array, ""] | int) -> GenerationState:
    """Returns the state with one row ended. It consumes ``state``."""
    is_ended = jnp.arange(state.finish.shape[0]) == index
    finish = jnp.where(is_ended, int(FinishReason.LENGTH), state.finish)
    return on_rows(state.replace(finish=finish))


@functools.partial(jax.jit, static_argnames=("width",))
def written(
    state: GenerationState, starts: Int[Array | np.ndarray, " B"], *, width: int
) -> Written:
    """Returns what each row has written from its position in ``starts`` on."""
    ahead = jnp.arange(width, dtype=jnp.int32)[None]
    slots = jnp.minimum(starts[:, None] + ahead, state.tokens.shape[1] - 1)
    take = jax.vmap(lambda leaf, slots: leaf[slots])

    logprobs = None
    if state.logprobs is not None:
        logprobs = jax.tree.map(lambda leaf: take(leaf, slots), state.logprobs)
    return Written(state.length, state.finish, take(state.tokens, slots), logprobs, state.stats)
