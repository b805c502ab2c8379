"""Greedy decoding in whole batches with deterministic kernels, which L3 and L4 compare."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from eagle3_jax import DynamicTree, LoadedDrafter, LoadedTarget
from eagle3_jax import loop as loops
from eagle3_jax.checks import per_row
from eagle3_jax.loop import GenerationState, LoopParams, SpeculativeLoop
from eagle3_jax.sampling import row_keys
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.topology import Chain
from eagle3_jax.types import Draft, FinishReason, SamplingParams
from validation.device import exact_options
from validation.forcing import padded
from validation.parity import parting
from validation.subject import CONTEXT

CHAIN = Chain(3)
TREE = DynamicTree(num_nodes=16, max_depth=4, top_k=4)
SHAPES = {"chain": CHAIN, "tree": TREE}


class Decoded(NamedTuple):
    """Prompts with the tokens that were written after them."""

    states: list[GenerationState]  # final states, a batch each
    tokens: list[list[int]]  # new tokens of every prompt
    stats: SpeculationStats  # of all batches together


@dataclasses.dataclass(frozen=True)
class Decoding:
    """A pair compiled for one batch size, with deterministic kernels by default."""

    target: LoadedTarget
    drafter: LoadedDrafter
    batch: int  # rows
    limit: int  # new tokens of every row
    options: Mapping[str, Any] | None = None  # of the compiler; those of exact_options() if None

    def decode(self, prompts: Sequence[list[int]]) -> Decoded:
        """Decodes prompts, whose number is a multiple of the batch."""
        params = LoopParams(self.target.params, self.drafter.params)
        prefill, run = programs(
            SpeculativeLoop(self.target.model, self.drafter.drafter), params, self
        )
        batches = [
            prompts[start : start + self.batch] for start in range(0, len(prompts), self.batch)
        ]
        states = [run(params, prefill(params, batch_of(batch, self.limit))) for batch in batches]

        rows = [
            row
            for state in states
            for row in zip(*jax.device_get((state.tokens, state.length)), strict=True)
        ]
        new_tokens = [tokens[end - self.limit : end].tolist() for tokens, end in rows]
        return Decoded(states, new_tokens, SpeculationStats.merge(state.stats for state in states))


_programs: dict[Any, tuple[Any, Any]] = {}


def programs(loop: SpeculativeLoop, params: LoopParams, decoding: Decoding) -> tuple[Any, Any]:
    """Prefill and loop, compiled once: several checks share them."""
    options = exact_options() if decoding.options is None else dict(decoding.options)
    key = (loop, decoding.batch, decoding.limit, *options.items())
    if key not in _programs:
        shapes = jax.eval_shape(lambda: batch_of([[0]] * decoding.batch, decoding.limit))
        capacity = -(-(CONTEXT + decoding.limit + loop.drafter.num_nodes) // 64) * 64
        prefill = loops.prefill.lower(loop, params, shapes, capacity=capacity)
        run = loops.run.lower(loop, params, prefill.out_info)
        _programs[key] = prefill.compile(options), run.compile(options)
    return _programs[key]


def forget_programs() -> None:
    """Free the memory of compiled programs for the next module."""
    _programs.clear()


def batch_of(prompts: Sequence[list[int]], limit: int) -> loops.Prompts:
    """A greedy ragged batch that writes ``limit`` tokens a row."""
    rows = len(prompts)
    length = np.array([len(prompt) for prompt in prompts], np.int32)
    return loops.Prompts(
        tokens=padded(prompts, CONTEXT),
        length=jnp.asarray(length),
        limit=jnp.asarray(length + limit),
        limit_reason=jnp.full((rows,), int(FinishReason.LENGTH), jnp.int32),
        stop_tokens=jnp.zeros((rows, 0), jnp.int32),
        sampling=per_row(SamplingParams(), rows),
        keys=row_keys(0, rows),
    )


def with_shape(drafter: LoadedDrafter, topology: Any) -> LoadedDrafter:
    return dataclasses.replace(
        drafter, drafter=dataclasses.replace(drafter.drafter, topology=topology)
    )


def first_differences(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> list[int | None]:
    """Place of the first token that differs in each row; ``None`` where none does."""
    return [parting(row, their_row) for row, their_row in zip(ours, theirs, strict=True)]


@dataclasses.dataclass(frozen=True)
class NeverRight:
    """The topology of another drafter with tokens that the target will not choose.

    Parameters are ``inner`` (the other drafter's) and ``tokens [B S]``, what the target does
    choose.
    """

    inner: Any
    vocab_size: int

    num_nodes = property(lambda self: self.inner.num_nodes)
    max_depth = property(lambda self: self.inner.max_depth)
    aux_layers = property(lambda self: self.inner.aux_layers)
    is_chain = property(lambda self: self.inner.is_chain)

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        return self.inner.init(params["inner"], batch, capacity), jnp.zeros((batch,), jnp.int32)

    def observe(self, params: Any, state: Any, seen: Any) -> Any:
        return self.inner.observe(params["inner"], state[0], seen), state[1] + seen.length

    def propose(self, params: Any, state: Any, keys: Array, sampling: SamplingParams) -> Draft:
        draft = self.inner.propose(params["inner"], state[0], keys, sampling)
        position = jnp.minimum(state[1] + 1, params["tokens"].shape[1] - 1)
        right = jnp.take_along_axis(params["tokens"], position[:, None], axis=1)
        wrong = jnp.where(draft.tokens == right, (right + 1) % self.vocab_size, draft.tokens)
        is_root = jnp.arange(draft.tokens.shape[1]) == 0
        next_state = None if draft.state is None else (draft.state, state[1])
        return dataclasses.replace(
            draft, tokens=jnp.where(is_root, draft.tokens, wrong), state=next_state
        )
