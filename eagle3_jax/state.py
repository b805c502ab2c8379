"""What the loop carries: prompts in, one state for all rows, and what a round and a generation leave."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Key

from eagle3_jax.cache import Cache
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.types import Draft, FinishReason, SamplingParams, Verdict


class LoopParams(NamedTuple):
    """Arrays of both models.

    Attributes:
        target: Parameters of the target.
        drafter: Parameters of the drafter.
    """

    target: Any
    drafter: Any


@struct.dataclass(kw_only=True)
class Prompts:
    """A ragged batch of prompts and what is asked of each row.

    Attributes:
        tokens: ``[B T]``, padded behind ``length``.
        length: ``[B]``, at least 1.
        limit: ``[B]``, sequence length (prompt included) at which a row stops.
        limit_reason: ``[B]``, the :class:`FinishReason` when it does.
        stop_tokens: ``[B M]``, ids that end a row, -1 padded; the stop token itself is kept.
        sampling: One value per row.
        keys: One key per row.
    """

    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    limit: Int[Array, " B"]
    limit_reason: Int[Array, " B"]
    stop_tokens: Int[Array, "B M"]
    sampling: SamplingParams
    keys: Key[Array, " B"]


@struct.dataclass(kw_only=True)
class GenerationState:
    """The whole carry of the loop; every leaf leads with ``B``, so rows are inserted and taken by one ``tree.map``.

    The last token of a row is the root: committed, but not yet run through the target, so that
    ``cache.length == length - 1`` always.

    Attributes:
        tokens: ``[B S]``, prompt and output.
        length: ``[B]``, tokens known, root included.
        limit: ``[B]``, length at which the row stops.
        limit_reason: ``[B]``, why it then stopped.
        stop_tokens: ``[B M]``, ids that end a row, -1 padded.
        finish: ``[B]``, a :class:`FinishReason`.
        cache: What the target keeps of the committed tokens.
        drafter: The drafter's own state.
        sampling: One value per row.
        keys: One key per row.
        stats: Counters per row.
    """

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    limit: Int[Array, " B"]
    limit_reason: Int[Array, " B"]
    stop_tokens: Int[Array, "B M"]
    finish: Int[Array, " B"]
    cache: Cache
    drafter: Any
    sampling: SamplingParams
    keys: Key[Array, " B"]
    stats: SpeculationStats

    @property
    def running(self) -> Bool[Array, " B"]:
        """Rows that have not finished."""
        return self.finish == FinishReason.RUNNING

    def __repr__(self) -> str:
        """A line, whatever the arrays are: on this host, elsewhere, consumed, traced, or their shapes alone."""
        leaves, rows = (self.finish, self.length), self.finish.shape[0]
        here = all(isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, Tracer) for leaf in leaves)
        if here and any(getattr(leaf, "is_deleted", bool)() for leaf in leaves):
            return f"GenerationState({rows} rows, consumed by a step)"
        if not here or not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
            return f"GenerationState({rows} rows, capacity of {self.tokens.shape[1]} tokens)"
        finish, length = jax.device_get(leaves)
        running, known = np.sum(finish == FinishReason.RUNNING), f"{length.min()} to {length.max()}"
        return f"GenerationState({rows} rows, {running} running, {known} of {self.tokens.shape[1]} tokens known)"


@struct.dataclass(kw_only=True)
class Outcome:
    """What a finished generation leaves: the state without its caches.

    Attributes:
        tokens: ``[B S]``, prompt and output.
        length: ``[B]``.
        finish: ``[B]``.
        stats: Counters per row.
    """

    tokens: Int[Array | np.ndarray, "B S"]
    length: Int[Array | np.ndarray, " B"]
    finish: Int[Array | np.ndarray, " B"]
    stats: SpeculationStats


@struct.dataclass(kw_only=True)
class Round:
    """One round as it happened, for streams and traces.

    Attributes:
        state: After the round.
        draft: What was proposed.
        verdict: What was accepted.
        positions: ``[B N]``, absolute position of every node.
    """

    state: GenerationState
    draft: Draft
    verdict: Verdict
    positions: Int[Array, "B N"]
