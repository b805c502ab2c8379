"""A checked command line of ``eagle3 generate`` and how its batches are run."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_jax import GenerationResult, SamplingParams, SpeculativeDecoder


@dataclasses.dataclass(frozen=True)
class Task:
    """One prompt, ready to be fed.

    Attributes:
        tokens: Its ids.
        text: As it was given; ``None`` where ids were.
        max_new_tokens: Its limit.
    """

    tokens: list[int]
    text: str | None
    max_new_tokens: int


@dataclasses.dataclass(frozen=True)
class Job:
    """A checked command line.

    Attributes:
        decoder: Target and drafter.
        tasks: One per prompt.
        sampling: The same for all.
        seed: Of the random keys.
        batch_size: Prompts decoded at once.
        trace: Where every round is written.
    """

    decoder: SpeculativeDecoder
    tasks: list[Task]
    sampling: SamplingParams
    seed: int
    batch_size: int
    trace: Path | None

    def chunks(self) -> Iterator[tuple[int, list[Task]]]:
        """Batches with their seeds.

        The first has the seed itself and the others one of their own, or equal prompts would give equal samples.
        """
        import numpy as np

        for index, start in enumerate(range(0, len(self.tasks), self.batch_size)):
            derived = int(np.random.SeedSequence((self.seed, index)).generate_state(1)[0]) if index else self.seed
            yield derived, self.tasks[start : start + self.batch_size]

    def run(self, tasks: Sequence[Task], seed: int, rounds: list[dict[str, Any]] | None) -> GenerationResult:
        """One batch; its seconds without compilation.

        Args:
            tasks: The batch.
            seed: Its own.
            rounds: Where the rounds of each prompt are put; ``None`` when nobody asks for them.
        """
        from eagle3_jax.measure.timing import CompileClock
        from eagle3_jax.trace import record

        prompts, limits = [task.tokens for task in tasks], [task.max_new_tokens for task in tasks]
        start = time.perf_counter()
        with CompileClock() as clock:
            if rounds is None:
                result = self.decoder.generate(prompts, max_new_tokens=limits, sampling=self.sampling, seed=seed)
            else:
                traced = record(self.decoder, prompts, max_new_tokens=limits, sampling=self.sampling, seed=seed)
                rounds += traced.prompts
                result = traced.result
        return dataclasses.replace(result, seconds=time.perf_counter() - start - clock.seconds)


@contextlib.contextmanager
def status(text: str, *, quiet: bool = False) -> Iterator[None]:
    """A spinner on the standard error, where that is a terminal.

    It takes the line that the cursor is on: whatever has been printed must have ended its line.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    with console.status(text):
        yield
