"""vLLM as a contender of the benchmark."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from eagle3_jax.bench.contenders import Contender, Run, Tokens
from eagle3_jax.stats import SpeculationStats
from validation.engines.vllm.bridge import Completion, Engine
from validation.parity import COUNTERS, count_rounds


@dataclasses.dataclass
class VLLMContender(Contender):
    """A loaded engine of vLLM."""

    name: str  #: Name in reports.
    dtype: str  #: Precision in reports.
    engine: Engine  #: An engine of a worker process or a server.
    temperature: float = (
        0.0  #: 0 decodes greedily. Runs have no seed, so every one samples other tokens.
    )

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
        done = self.engine.generate(
            prompts, max_new_tokens=max_new_tokens, temperature=self.temperature
        )
        first_times = [completion.first_token_seconds or 0.0 for completion in done.completions]
        first = max(first_times) or self.engine.generate(prompts, max_new_tokens=1).seconds
        return Run(
            min(first, done.seconds),
            max(done.seconds - first, 1e-9),
            done.outputs,
            stats_of(done.counters, done.completions),
        )


def stats_of(
    counters: dict[str, Any], completions: Sequence[Completion]
) -> SpeculationStats | None:
    """The counters of vLLM, a row for each request if the reported steps add up to them."""
    if not counters:
        return None
    total = SpeculationStats(**{name: np.asarray(counters[name]) for name in COUNTERS})
    depth = len(counters["num_accepted_tokens_per_pos"])
    steps = [(completion.accepted, completion.drafted) for completion in completions]
    rows = [count_rounds(*row, depth) for row in steps if None not in row]  # type: ignore[arg-type]
    if len(rows) < len(steps) or SpeculationStats.merge(rows) != total:
        return total
    return jax.tree.map(lambda *counts: np.stack(counts), *rows)
