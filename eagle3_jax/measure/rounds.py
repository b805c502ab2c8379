"""Rounds of a decoder, launched as one program and timed."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import loop as loops
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.measure.contenders import Tokens

CompilerOptions = Mapping[str, str | int | float | bool]


@dataclasses.dataclass(frozen=True)
class Pace:
    """How fast some rounds were.

    Attributes:
        seconds: From the launch until the last row had finished.
        rounds: Of the row that took most of them: calls of the target.
        tokens: Written by all rows.
    """

    seconds: float
    rounds: int
    tokens: int

    @property
    def seconds_per_round(self) -> float:
        """Of the batch."""
        return self.seconds / self.rounds

    @property
    def tokens_per_second(self) -> float:
        """Of the batch."""
        return self.tokens / self.seconds


def timed_rounds(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Tokens],
    *,
    max_new_tokens: int,
    tokens: int,
    compiler_options: CompilerOptions | None = None,
) -> Pace:
    """Prefill, then time one launch of the loop. The first call with a decoder and options compiles, within the time.

    Args:
        decoder: Without stop tokens, or a row may end early.
        prompts: Where to start, a row each.
        max_new_tokens: Fixes the capacity, which the cost of attention depends on.
        tokens: What each row writes; at most ``max_new_tokens - 1``, since the prefill writes the first.
        compiler_options: XLA's, such as ``{"xla_gpu_deterministic_ops": True}``, for the rounds alone.
    """
    state = decoder.prefill(prompts, max_new_tokens=max_new_tokens)
    before = state.length
    state = state.replace(limit=jnp.minimum(state.limit, before + tokens))  # type: ignore[attr-defined]
    before = jax.device_get(before)
    ready = jax.block_until_ready(state)  # or the prefill, still under way, would be timed too
    run = _run(tuple(sorted((compiler_options or {}).items())))
    start = time.perf_counter()
    done = jax.block_until_ready(run(decoder.loop, decoder.params, ready))
    seconds = time.perf_counter() - start
    length, stats = jax.device_get((done.length, done.stats))
    written = length - before
    # A round without a draft is not counted among the drafts; it writes one token.
    rounds = np.maximum(stats.num_drafts, written - stats.num_accepted_tokens)
    return Pace(seconds, int(rounds.max()), int(written.sum()))


@functools.cache
def _run(options: tuple[tuple[str, Any], ...]) -> Any:
    """:func:`eagle3_jax.loop.run` under options of the compiler; itself where there are none."""
    if not options:
        return loops.run

    def run(loop: loops.SpeculativeLoop, params: loops.LoopParams, state: loops.GenerationState) -> Any:
        return loop.run(params, state)

    return jax.jit(run, static_argnums=0, donate_argnums=2, compiler_options=dict(options))
