"""Sends the requests of a certificate, several at a time, and keeps count of what failed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from eagle3_jax.certify.source import Completion, Report, ServerError, Source
from eagle3_jax.certify.statistics import Sampling

Prompt = str | list[int]
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
        fields = {"temperature": self.sampling.temperature, "seed": self.seed + request}

        # A server may refuse what it does not know, so neutral values are left to the client.
        for name in ("top_k", "top_p", "min_p"):
            value = getattr(self.sampling, name)
            if value != getattr(Sampling, name):
                fields[name] = value
        return fields


class Request(NamedTuple):
    """What is asked once: a prompt, and fields such as ``max_tokens``."""

    prompt: Prompt
    fields: Mapping[str, Any]

    def with_fields(self, **fields: Any) -> Request:
        """Returns the request with further fields, which replace those of the same name."""
        return self._replace(fields={**self.fields, **fields})


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

    def ask(self, request: Request) -> Completion:
        """Returns the answer to one request."""
        return self.source.complete(
            request.prompt, num_reported=self.plan.num_reported, **request.fields
        )

    def complete(
        self, name: str, requests: Sequence[Request], *, at_a_time: int = 0
    ) -> dict[int, Completion]:
        """Returns the answers to requests, by number, without those that failed.

        Args:
            name: What is asked for, for the progress.
            requests: The requests.
            at_a_time: Requests at a time; 0 for the plan's number.
        """
        size = getattr(self.source, "batch_size", 1)
        if size > 1:
            return self._complete_batches(name, requests, size)

        return self.each(
            name, len(requests), lambda row: self.ask(requests[row]), at_a_time=at_a_time
        )

    def _complete_batches(
        self, name: str, requests: Sequence[Request], size: int
    ) -> dict[int, Completion]:
        """Returns the answers of a function that takes batches of prompts."""
        starts = range(0, len(requests), size)

        def send(batch: int) -> list[Completion]:
            prompts, fields = zip(*requests[starts[batch] :][:size], strict=True)
            return self.source.complete_batch(  # type: ignore[attr-defined]
                prompts, fields, num_reported=self.plan.num_reported
            )

        results = self.each(name, len(starts), send)
        return {
            starts[batch] + index: answer
            for batch, answers in results.items()
            for index, answer in enumerate(answers)
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
                    # Three failures end no run, however short.
                    if num_failed > max(3.0, _MOST_FAILED * number):
                        self.stopped = f"{num_failed} requests failed: {error}"
                        break
                self._on_progress(f"{name}: {len(results)} of {number}")
        except KeyboardInterrupt:
            # What was answered until then is judged.
            self.stopped = "interrupted"
        finally:
            # Requests on their way are not waited for.
            pool.shutdown(wait=False, cancel_futures=True)
        return dict(sorted(results.items()))
