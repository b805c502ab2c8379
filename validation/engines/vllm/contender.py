"""vLLM as a contender of the benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle3_jax.bench.contenders import Contender, Run, Tokens
from eagle3_jax.stats import SpeculationStats
from validation.engines.vllm.bridge import Completion, Engine


@dataclasses.dataclass
class VLLMContender(Contender):
    """A loaded engine of vLLM."""

    name: str  #: Name in reports.
    dtype: str  #: Precision in reports.
    engine: Engine  #: An engine of a worker process or a server.
    temperature: float = 0.0  #: 0 decodes greedily. Runs have no seed, so every one samples other tokens.

    @property
    def drafts(self) -> bool:
        """Whether it was loaded with speculation."""
        return self.engine.options.speculative is not None

    @property
    def largest_batch(self) -> int | None:
        """The batch it was loaded for: more requests would wait."""
        return self.engine.options.max_num_seqs

    def run(self, prompts: Sequence[Tokens], max_new_tokens: int) -> Run:
        """Time to first token as vLLM reports it, or the time of a run for one token."""
        done = self.engine.generate(prompts, max_new_tokens=max_new_tokens, temperature=self.temperature)
        first_times = [
            completion.first_token_seconds
            for completion in done.completions
            if completion.first_token_seconds is not None
        ]
        first = max(first_times) if first_times else self.engine.generate(prompts, max_new_tokens=1).seconds
        return Run(
            min(first, done.seconds),
            max(done.seconds - first, 1e-9),
            [completion.tokens for completion in done.completions],
            stats_of(done.counters, done.completions),
        )


def stats_of(counters: dict[str, Any], completions: Sequence[Completion]) -> SpeculationStats | None:
    """The counters of vLLM, one row for each request if the reported steps add up to the counters."""
    if not counters:
        return None
    total = SpeculationStats(**{field.name: np.asarray(counters[field.name]) for field in _FIELDS})
    if any(completion.accepted is None or completion.drafted is None for completion in completions):
        return total
    rows = [_row(completion, len(np.asarray(counters["num_accepted_tokens_per_pos"]))) for completion in completions]
    by_row = SpeculationStats(**{name: np.stack([row[name] for row in rows]) for name in rows[0]})
    return by_row if SpeculationStats.merge([by_row]).to_json() == total.to_json() else total


_FIELDS = dataclasses.fields(SpeculationStats)


def _row(completion: Completion, depth: int) -> dict[str, Any]:
    accepted = np.asarray(completion.accepted, int)
    drafted = np.asarray(completion.drafted, int)
    accepted = accepted[drafted > 0]
    return {
        "num_drafts": np.sum(drafted > 0),
        "num_draft_tokens": np.sum(drafted),
        "num_accepted_tokens": np.sum(accepted),
        "num_accepted_tokens_per_pos": np.array([np.sum(accepted > position) for position in range(depth)]),
    }
