"""Timing of rounds that are launched as one program."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import loop as loops
from eagle3_jax.bench.contenders import Tokens
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.measure.timing import timed
from eagle3_jax.stats import SpeculationStats

CompilerOptions = Mapping[str, str | int | float | bool]


@dataclasses.dataclass(frozen=True)
class Pace:
    """Speed of some rounds."""

    seconds: float  #: Time from the launch until the last row had finished.
    rounds: int  #: Calls of the target for the row with the most rounds.
    tokens: int  #: Tokens written by all rows.

    @property
    def seconds_per_round(self) -> float:
        """Time of a round of the batch."""
        return self.seconds / self.rounds

    @property
    def tokens_per_second(self) -> float:
        """Speed of the batch."""
        return self.tokens / self.seconds


def timed_rounds(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    tokens: int,
    compiler_options: CompilerOptions | None = None,
) -> Pace:
    """Times one launch of the loop after a prefill; the first call also compiles.

    Args:
        decoder: A decoder without stop tokens; otherwise a row may end early.
        prompts: Prompts, a row each.
        max_new_tokens: Fixes the capacity, which the cost of attention depends on.
        tokens: Tokens per row; at most ``max_new_tokens - 1``, since the prefill writes the first.
        compiler_options: XLA options such as ``{"xla_gpu_deterministic_ops": True}``, for the
            rounds alone.
    """
    state = decoder.prefill(prompts, max_new_tokens=max_new_tokens)
    prefilled = jax.device_get(state.length)
    state = state.replace(limit=jnp.minimum(state.limit, state.length + tokens))
    # Otherwise the time would include the end of the prefill.
    state = jax.block_until_ready(state)
    run = _run(tuple(sorted((compiler_options or {}).items())))
    state, seconds = timed(run, decoder.loop, decoder.params, state)

    length, stats = jax.device_get((state.length, state.stats))
    written = length - prefilled
    rounds = count_rounds(stats, written)
    return Pace(seconds, int(rounds.max()), int(written.sum()))


def count_rounds(stats: SpeculationStats, written: np.ndarray) -> np.ndarray:
    """Returns the rounds of each row, from its counters and the number of tokens it wrote.

    The token of the prefill is not counted. A round without a draft, which prompt lookup has, is
    not counted among the drafts and writes one token. Accepted tokens after the limit are missing
    in ``written``, so the number of such rounds can be a little too small.
    """
    return np.maximum(stats.num_drafts, written - stats.num_accepted_tokens)


@functools.cache
def _run(options: tuple[tuple[str, Any], ...]) -> Any:
    """Returns :func:`eagle3_jax.loop.run`, compiled with options if there are any."""
    if not options:
        return loops.run
    run = loops.SpeculativeLoop.run
    return jax.jit(run, static_argnums=0, donate_argnums=2, compiler_options=dict(options))
