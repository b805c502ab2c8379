"""The values that the loop takes, carries and returns: prompts, state, round, outcome."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from flax import struct
from jax.core import Tracer
from jaxtyping import Array, Bool, Int, Key

from eagle3_jax.cache import Cache
from eagle3_jax.stats import LogProbs, SpeculationStats
from eagle3_jax.types import Draft, FinishReason, SamplingParams, Verdict


class LoopParams(NamedTuple):
    """The arrays of both models.

    Attributes:
        target: Parameters of the target.
        drafter: Parameters of the drafter.
    """

    target: Any
    drafter: Any


class Prompts(struct.PyTreeNode, kw_only=True):
    """A ragged batch of prompts, with the options of each row.

    Attributes:
        tokens: ``[B T]``, padded after ``length``.
        length: ``[B]``, at least 1.
        limit: ``[B]``, sequence length (prompt included) at which a row stops.
        limit_reason: ``[B]``, the :class:`FinishReason` when it does.
        stop_tokens: ``[B M]``, ids that end a row, -1 padded; the stop token itself is kept.
        sampling: One value per row.
        keys: One key per row.
        logprobs: ``L``, likeliest tokens with log-probabilities besides each new token; ``None``
            records none.
        sampling_logprobs: Whether the log-probability of each new token under the distribution that
            it is sampled from is recorded as well.
    """

    tokens: Int[Array, "B T"]
    length: Int[Array, " B"]
    limit: Int[Array, " B"]
    limit_reason: Int[Array, " B"]
    stop_tokens: Int[Array, "B M"]
    sampling: SamplingParams
    keys: Key[Array, " B"]
    logprobs: int | None = struct.field(pytree_node=False, default=None)
    sampling_logprobs: bool = struct.field(pytree_node=False, default=False)


class GenerationState(struct.PyTreeNode, kw_only=True):
    """The whole carry of the loop.

    ``B`` is the first axis of every leaf, so one ``tree.map`` inserts or takes rows.

    The last token of a row is the root: committed, but not yet run through the target. So
    ``cache.length`` is always ``length - 1``.

    Attributes:
        tokens: ``[B S]``, prompt and output.
        length: ``[B]``, committed tokens, root included.
        limit: ``[B]``, length at which the row stops.
        limit_reason: ``[B]``, the :class:`FinishReason` at the limit.
        stop_tokens: ``[B M]``, ids that end a row, -1 padded.
        finish: ``[B]``, a :class:`FinishReason`.
        cache: The target's cache of the committed tokens.
        drafter: The drafter's state.
        sampling: One value per row.
        keys: One key per row.
        stats: Counters per row.
        logprobs: Log-probabilities of the output, if the loop records them.
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
    logprobs: LogProbs | None = None

    @property
    def running(self) -> Bool[Array, " B"]:
        """Rows that have not finished."""
        return self.finish == FinishReason.RUNNING

    def __repr__(self) -> str:
        """One line for arrays of any kind: here, on another host, consumed, traced, only shapes."""
        leaves = (self.finish, self.length)
        rows = self.finish.shape[0]
        capacity = self.tokens.shape[1]
        if not all(map(_is_concrete, leaves)):
            return f"GenerationState({rows} rows, capacity of {capacity} tokens)"
        if any(getattr(leaf, "is_deleted", bool)() for leaf in leaves):
            return f"GenerationState({rows} rows, consumed by a step)"
        if not all(getattr(leaf, "is_fully_addressable", True) for leaf in leaves):
            return f"GenerationState({rows} rows, capacity of {capacity} tokens)"

        finish, length = jax.device_get(leaves)
        running = np.sum(finish == FinishReason.RUNNING)
        known = f"{length.min()} to {length.max()}"
        return (
            f"GenerationState({rows} rows, {running} running, {known} of {capacity} tokens known)"
        )


def _is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | jax.Array) and not isinstance(leaf, Tracer)


class Outcome(struct.PyTreeNode, kw_only=True):
    """The result of a finished generation: the state without its caches."""

    tokens: Int[Array | np.ndarray, "B S"]  #: ``[B S]``, prompt and output.
    length: Int[Array | np.ndarray, " B"]  #: ``[B]``.
    finish: Int[Array | np.ndarray, " B"]  #: ``[B]``.
    stats: SpeculationStats  #: Counters per row.
    logprobs: LogProbs | None = None  #: Log-probabilities of the output, if the loop records them.


class Round(struct.PyTreeNode, kw_only=True):
    """One round, for streams and traces.

    Attributes:
        state: The state after the round.
        draft: The proposal.
        verdict: The decision of the verifier.
        positions: ``[B N]``, absolute position of every node.
    """

    state: GenerationState
    draft: Draft
    verdict: Verdict
    positions: Int[Array, "B N"]
