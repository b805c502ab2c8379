"""Sends the requests of a certificate, several at a time, and keeps count of what failed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from eagle3_jax.certify.source import Completion, Report, ServerError, Source
from eagle3_jax.certify.statistics import Sampling

Prompt = str | list[int]
_NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
_MOST_FAILED = 0.1  # share of the requests that may fail before the run ends


@dataclasses.dataclass(frozen=True)
class Plan:
    """The requests of a certificate.

    Attributes:
        prompts: Texts or token ids.
        sampling: Temperature and warpers of the sampled answers.
        num_requests: Number of short sampled answers, which share a few prompts so that texts
            repeat.
        short_tokens: Tokens of each of these: the first one, and as many as a usual draft has.
        num_long: Number of long sampled answers.
        max_new_tokens: Tokens of a long or greedy answer.
        num_greedy: Number of greedy answers; 0 for none.
        num_reported: Log-probabilities of each position.
        concurrency: Requests at a time.
        seed: Seed of the first request; each has its own.
        speculation: Whether drafts must be ``seen``, are ``assumed``, or there are ``none``.
        with_fields: Whether fields of the request and states of the server are examined too.
    """

    prompts: Sequence[Prompt]
    sampling: Sampling = Sampling()
    num_requests: int = 2048
    short_tokens: int = 4
    num_long: int = 96
    max_new_tokens: int = 32
    num_greedy: int = 16
    num_reported: int = 20
    concurrency: int = 8
    seed: int = 0
    speculation: Literal["seen", "assumed", "none"] = "seen"
    with_fields: bool = True

    def fields(self, request: int) -> dict[str, Any]:
        """Returns the fields of a sampled request, which has a seed of its own."""
        warpers = {name: getattr(self.sampling, name) for name in _NEUTRAL}
        # A server may refuse what it does not know, so neutral values are left to the client.
        active = {name: value for name, value in warpers.items() if value != _NEUTRAL[name]}
        return {"temperature": self.sampling.temperature, "seed": self.seed + request, **active}


class Asker:
    """Asks a source.

    Attributes:
        source: The server or function.
        plan: What it is asked.
        answered: Number of answers.
        failures: The errors of requests that failed.
        stopped: Why no more requests are sent; empty while they are.
    """

    def __init__(self, source: Source, plan: Plan, on_progress: Callable[[str], None]) -> None:
        self.source = source
        self.plan = plan
        self.answered = 0
        self.failures: list[str] = []
        self.stopped = ""
        self._on_progress = on_progress

    def for_source(self, source: Source) -> Asker:
        """Returns what asks another source, and counts with this one."""
        asker = Asker(source, self.plan, self._on_progress)
        asker.failures = self.failures
        return asker

    def complete(
        self,
        name: str,
        prompts: Sequence[Prompt],
        fields: Callable[[int], Mapping[str, Any]],
        *,
        at_a_time: int = 0,
    ) -> dict[int, Completion]:
        """Returns the answers to prompts, by number, without those that failed.

        Args:
            name: What is asked for, for the progress.
            prompts: The prompts.
            fields: Returns the fields of a request by its number.
            at_a_time: Requests at a time; 0 for the plan's number.
        """
        size = getattr(self.source, "batch_size", 1)
        if size > 1:
            return self._complete_batches(name, prompts, fields, size)

        def send(row: int) -> Completion:
            return self.source.complete(
                prompts[row], num_reported=self.plan.num_reported, **fields(row)
            )

        return self.each(name, len(prompts), send, at_a_time=at_a_time)

    def _complete_batches(
        self,
        name: str,
        prompts: Sequence[Prompt],
        fields: Callable[[int], Mapping[str, Any]],
        size: int,
    ) -> dict[int, Completion]:
        """Returns the answers of a function that takes batches of prompts."""
        batches = [
            range(start, min(start + size, len(prompts))) for start in range(0, len(prompts), size)
        ]

        def send(batch: int) -> list[Completion]:
            rows = batches[batch]
            return self.source.complete_batch(  # type: ignore[attr-defined]
                [prompts[row] for row in rows],
                [fields(row) for row in rows],
                num_reported=self.plan.num_reported,
            )

        results = self.each(name, len(batches), send)
        return {
            row: results[batch][row - batches[batch][0]]
            for batch in results
            for row in batches[batch]
        }

    def score(
        self, name: str, answers: Sequence[tuple[Prompt, Completion]]
    ) -> dict[int, list[Report]]:
        """Returns the reports of given answers behind their own prefixes, by number."""
        number = self.plan.num_reported
        return self.each(
            name, len(answers), lambda row: self.source.score(*answers[row], num_reported=number)
        )

    def each(
        self, name: str, number: int, send: Callable[[int], Any], *, at_a_time: int = 0
    ) -> dict[int, Any]:
        """Returns the results of ``send`` for ``0 .. number - 1``, without those that failed."""
        results: dict[int, Any] = {}
        if self.stopped:
            return results
        num_failed = 0
        pool = concurrent.futures.ThreadPoolExecutor(at_a_time or self.plan.concurrency)
        try:
            futures = {pool.submit(send, row): row for row in range(number)}
            for future in concurrent.futures.as_completed(futures):
                try:
                    results[futures[future]] = future.result()
                    self.answered += 1
                except ServerError as error:
                    self.failures.append(str(error))
                    num_failed += 1
                    if num_failed > max(3.0, _MOST_FAILED * number):
                        self.stopped = f"{num_failed} requests failed: {error}"
                        break
                self._on_progress(f"{name}: {len(results)} of {number}")
        except KeyboardInterrupt:
            self.stopped = "interrupted"
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return dict(sorted(results.items()))
