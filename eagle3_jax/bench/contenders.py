"""Contenders of a benchmark: anything that decodes a batch of prompts and measures the time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from eagle3_jax import loop as loops
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters.plain import Plain
from eagle3_jax.measure.timing import timed
from eagle3_jax.stats import SpeculationStats
from eagle3_jax.types import SamplingMode, SamplingParams
from eagle3_jax.verifiers.simulated import SimulatedAcceptance

Tokens = list[int]


@dataclasses.dataclass(frozen=True)
class Run:
    """One batch of prompts decoded once."""

    prefill_seconds: float  #: Time from the prompts to the first token of every row.
    decode_seconds: float  #: Time of all further tokens of all rows.
    tokens: list[Tokens]  #: New tokens of each row, the first included.
    #: Counters of the drafts, per row or for the whole batch; ``None`` if nothing was drafted.
    stats: SpeculationStats | None = None

    def stats_of(self, rows: Sequence[int]) -> SpeculationStats | None:
        """Returns the counters of some rows; ``None`` if only those of the batch are known."""
        if self.stats is None:
            return None
        if np.ndim(self.stats.num_drafts) == 1:
            by_row = jax.tree.map(lambda leaf: np.asarray(leaf)[list(rows)], self.stats)
            return SpeculationStats.merge([by_row])
        return SpeculationStats.merge([self.stats]) if len(rows) == len(self.tokens) else None


class Contender:
    """Anything that decodes batches of prompts."""

    name: str  #: Name in reports.
    dtype: str  #: Precision in reports.
    #: Whether it speculates; without counters its number of rounds is then unknown.
    drafts: bool = False
    num_draft_steps: int = 0  #: ``G`` of a decoder of this library.
    lossless: bool = True  #: Whether its output follows the target's distribution.
    #: Simulated acceptance rates, up to the depth of the drafts; ``None`` if acceptance is not
    #: simulated.
    simulated_rates: list[float] | None = None
    largest_batch: int | None = None  #: Maximum number of prompts at once; ``None`` for any number.

    def run(self, prompts: Sequence[Tokens], max_new_tokens: int) -> Run:
        """Decodes a batch to the limit and ignores stop tokens.

        Decoding is greedy, unless the contender has a temperature.
        """
        raise NotImplementedError


@dataclasses.dataclass
class DecoderContender(Contender):
    """A decoder of this library."""

    name: str  #: Name in reports.
    dtype: str  #: Precision in reports.
    #: A decoder without stop tokens, so that every contender writes as many tokens.
    decoder: SpeculativeDecoder
    temperature: float = 0.0  #: Sampling temperature; 0 is greedy. Every run has the same seed.

    def __post_init__(self) -> None:
        loop = self.decoder.loop
        self.drafts = not isinstance(loop.drafter, Plain)
        self.num_draft_steps = loop.drafter.max_depth if self.drafts else 0
        self.lossless = self.decoder.lossless
        if isinstance(loop.verifier, SimulatedAcceptance):
            self.simulated_rates = list(loop.verifier.rates[: loop.drafter.max_depth]) or None

    def run(self, prompts: Sequence[Tokens], max_new_tokens: int) -> Run:
        """Runs the prefill and then the whole loop on the device, and waits for each."""
        sampling = SamplingParams(temperature=self.temperature)
        sampling_mode = SamplingMode.TEMPERATURE if self.temperature else SamplingMode.GREEDY
        loop = dataclasses.replace(self.decoder.loop, sampling_mode=sampling_mode)

        state, prefill_seconds = timed(
            self.decoder.prefill, prompts, max_new_tokens=max_new_tokens, sampling=sampling
        )
        state, decode_seconds = timed(loops.run, loop, self.decoder.params, state)

        tokens, length, stats = jax.device_get((state.tokens, state.length, state.stats))
        new_tokens = [
            tokens[row, len(prompt) : length[row]].tolist() for row, prompt in enumerate(prompts)
        ]
        return Run(prefill_seconds, decode_seconds, new_tokens, stats)

    def chunk_seconds(self, prompts: Sequence[Tokens], max_new_tokens: int) -> list[float]:
        """Returns the seconds between the chunks of a stream.

        The host launches each round and waits for it, so a stream is slower than :meth:`run`, which
        launches all rounds at once.
        """
        times = []
        for latest in self.decoder.rounds(prompts, max_new_tokens=max_new_tokens):
            jax.block_until_ready(latest.verdict)
            times.append(time.perf_counter())
        return np.diff(times).tolist()
