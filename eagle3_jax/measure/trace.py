"""A generation with a record of every round."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.devices.sharding import to_host
from eagle3_jax.loaded import Prompt
from eagle3_jax.results import GenerationResult
from eagle3_jax.state import Round
from eagle3_jax.types import SamplingParams


class Trace(NamedTuple):
    """A generation and its rounds."""

    result: GenerationResult  #: The result, equal to that of ``SpeculativeDecoder.generate``.
    prompts: list[dict[str, Any]]  #: Token ids and rounds of each prompt, ready for JSON.


def record(
    decoder: SpeculativeDecoder,
    prompts: Sequence[Prompt],
    *,
    max_new_tokens: Sequence[int],
    sampling: SamplingParams,
    seed: int | Sequence[int],
) -> Trace:
    """Generates round by round with the step that ``generate`` compiles into its loop, and records every round.

    Args:
        decoder: The decoder.
        prompts: Texts or token ids.
        max_new_tokens: One limit per prompt.
        sampling: Scalars for all rows, or ``[B]`` arrays.
        seed: Random seed, 0 to 2^32 - 1, or one per prompt.
    """
    encoded = [decoder.target.encode(prompt) for prompt in prompts]
    start = time.perf_counter()
    state = decoder.prefill(encoded, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
    rounds: list[list[dict[str, Any]]] = [[] for _ in encoded]
    while (running := to_host(state.running)).any():
        latest = decoder.step(state)
        for row, description in enumerate(describe(latest)):
            if running[row]:
                rounds[row].append(description)
        state = latest.state
    seconds = time.perf_counter() - start
    traces = [
        {"prompt_ids": ids, "rounds": of_prompt}
        for ids, of_prompt in zip(encoded, rounds, strict=True)
    ]
    return Trace(decoder.result(state, encoded, seconds=seconds), traces)


def describe(latest: Round) -> list[dict[str, Any]]:
    """Returns the rows of one round; padding nodes are left out and the others keep their order."""
    draft = latest.draft
    verdict = latest.verdict
    nodes_of_rows = (draft.tokens, draft.parents, latest.positions, draft.valid)
    outcomes = (verdict.path, verdict.num_accepted, verdict.next_token)
    columns = to_host((*nodes_of_rows, *outcomes))
    rows = []
    for tokens, parents, positions, valid, path, accepted, following in zip(*columns, strict=True):
        nodes = np.flatnonzero(valid)
        number = {int(node): index for index, node in enumerate(nodes)} | {-1: -1}
        rows.append(
            {
                "tokens": tokens[nodes].tolist(),
                "parents": [number[int(parent)] for parent in parents[nodes]],
                "positions": positions[nodes].tolist(),
                "path": [number[int(node)] for node in path if node >= 0],
                "num_accepted": int(accepted),
                "next_token": int(following),
            }
        )
    return rows
