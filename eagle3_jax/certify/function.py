"""A Python function that samples, as what a certificate asks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eagle3_jax.certify.asking import Plan
from eagle3_jax.certify.certificate import Certificate
from eagle3_jax.certify.examine import certify
from eagle3_jax.certify.source import Completion, Refused, Report
from eagle3_jax.certify.statistics import Sampling

#: Tokens ``[T]``, and the log-probabilities ``[T V]`` of their positions before temperature and
#: warpers.
Sampled = tuple[Any, Any]
#: What a sampler returns for a prompt: all tokens at once, or the tokens of each round.
Answer = Sampled | Iterable[Sampled]


def certify_sampler(
    sampler: Callable[..., Any],
    prompts: Sequence[list[int]],
    *,
    batch_size: int = 1,
    on_progress: Callable[[str], None] = lambda message: None,
    **options: Any,
) -> Certificate:
    """Judges whether a Python function that speculates samples from what it reports.

    Example::

        def sampler(prompt_ids, seed, sampling, max_new_tokens):
            rounds = my_rounds(prompt_ids, seed, sampling.temperature, max_new_tokens)
            for tokens, log_probs in rounds:
                yield tokens, log_probs  # [n], and [n V] before temperature and warpers

        print(certify_sampler(sampler, prompts=[[1, 2, 3], [4, 5]]).headline)

    Args:
        sampler: Takes the ids of a prompt, a seed, settings (temperature 0 is greedy) and a number
            of tokens. It returns tokens and the log-probabilities of their positions, or yields
            them round by round; the first token comes alone then. With a batch it takes lists of
            prompts and seeds, and returns a list of such answers.
        prompts: Token ids.
        batch_size: Most prompts of a call; 1 for a sampler of one prompt.
        on_progress: Takes a line about each call.
        options: Of :class:`Plan`. A function that does not yield rounds needs
            ``speculation="assumed"``.

    Raises:
        ValueError: The sampler returns something else.
    """
    plan = Plan(prompts=prompts, **{"concurrency": 1, "with_fields": False} | options)
    return certify(Function(sampler, batch_size), plan, on_progress=on_progress)


class Function:
    """A function as a source.

    Attributes:
        facts: Its name.
        scoring: ``prefixes``: a text is scored by the first token behind each of its prefixes.
        batch_size: Most prompts of a call.
    """

    def __init__(self, sampler: Callable[..., Any], batch_size: int = 1) -> None:
        self._sampler = sampler
        self.batch_size = batch_size
        self.facts: dict[str, Any] = {"model": getattr(sampler, "__name__", type(sampler).__name__)}
        self.scoring = "prefixes"

    def complete(
        self, prompt: str | Sequence[int], *, num_reported: int, **fields: Any
    ) -> Completion:
        """Calls the function for a prompt."""
        return self.complete_batch([prompt], [fields], num_reported=num_reported)[0]

    def complete_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        fields: Sequence[Mapping[str, Any]],
        *,
        num_reported: int,
    ) -> list[Completion]:
        """Calls the function for prompts, whose fields differ in their seeds only."""
        if any(isinstance(prompt, str) for prompt in prompts):
            raise Refused("a function continues token ids, not texts")

        seeds = [values.get("seed", 0) for values in fields]
        settings = {name: value for name, value in fields[0].items() if name != "seed"}
        number = settings.pop("max_tokens")
        sampling = Sampling(**settings)

        ids: list[list[int]] = [list(prompt) for prompt in prompts]  # type: ignore[arg-type]
        if self.batch_size == 1:
            answers = [self._sampler(ids[0], seeds[0], sampling, number)]
        else:
            answers = self._sampler(ids, seeds, sampling, number)
        return [
            _completion(prompt, answer, number, num_reported)
            for prompt, answer in zip(ids, answers, strict=True)
        ]

    def score(
        self, prompt: str | Sequence[int], completion: Completion, *, num_reported: int
    ) -> list[Report]:
        """Asks for the first token behind each prefix."""
        tokens = completion.tokens
        prefixes = [[*prompt, *tokens[:position]] for position in range(len(tokens))]
        fields = {"max_tokens": 1, "temperature": 0.0}  # no draft reaches a first token
        scored = []
        for start in range(0, len(tokens), self.batch_size):
            batch = prefixes[start : start + self.batch_size]
            answers = self.complete_batch(batch, [fields] * len(batch), num_reported=num_reported)
            for token, answer in zip(tokens[start:], answers, strict=False):
                top = answer.reports[0].top
                scored.append(Report(token, top.get(token, math.nan), top))
        return scored

    def apart(self) -> dict[str, Any]:
        """Returns nothing: nothing is cached."""
        return {}

    def counters(self) -> dict[str, Any]:
        """Returns nothing: a function counts nothing."""
        return {}


def _completion(prompt: list[int], answer: Answer, number: int, num_reported: int) -> Completion:
    """Returns an answer of a function with its likeliest tokens."""
    rounds: list[Sampled] = [answer] if isinstance(answer, tuple) else list(answer)  # type: ignore[list-item]
    reports: list[Report] = []
    chunk_index: list[int] = []
    for tokens, log_probs in rounds:
        values = np.asarray(log_probs, dtype=np.float64)
        if values.ndim != 2 or len(values) != len(tokens):
            raise ValueError(
                f"the sampler returned {len(tokens)} tokens with log-probabilities of shape"
                f" {values.shape}; expected a row of log-probabilities of the whole vocabulary for"
                " each token"
            )
        reports += [
            _report(int(token), row, num_reported)
            for token, row in zip(tokens, values, strict=True)
        ]
        # An answer that comes at once shows no rounds.
        chunk_index += range(len(tokens)) if len(rounds) > 1 else [0] * len(tokens)

    return Completion(
        text=" ".join(str(report.token) for report in reports[:number]),
        reports=reports[:number],
        chunk_index=chunk_index[:number],
        prompt_ids=prompt,
        finish_reason="length" if len(reports) >= number else "stop",
    )


def _report(token: int, log_probs: np.ndarray, num_reported: int) -> Report:
    """Returns the report of a token from the log-probabilities ``[V]`` of its position."""
    number = min(num_reported, len(log_probs))
    likeliest = np.argpartition(-log_probs, number - 1)[:number].tolist()
    top = {listed: float(log_probs[listed]) for listed in {*likeliest, token}}
    return Report(token, top[token], top)
