"""Certificates of Python functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from faulty_sampler import CORRECT, FAULTS, PROMPTS, Fault, FaultySampler, FaultySource

from eagle3_jax.certify.certificate import Verdict
from eagle3_jax.certify.function import certify_sampler
from eagle3_jax.certify.statistics import Sampling


def rounds(
    source: FaultySource, prompt_ids: list[int], seed: int, sampling: Sampling, number: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """The answer of a source, round by round, with log-probabilities of the whole vocabulary."""
    answer = source.complete(
        prompt_ids, num_reported=1, max_tokens=number, temperature=sampling.temperature, seed=seed
    )
    tokens = answer.tokens
    log_probs = np.log(
        [source.distribution(prompt_ids[0], [*prompt_ids[1:], *tokens[:i]]) for i in range(number)]
    )
    starts = [index for index, position in enumerate(answer.chunk_index) if position == 0]
    for start, end in zip(starts, [*starts[1:], number], strict=True):
        yield tokens[start:end], log_probs[start:end]


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        (CORRECT, Verdict.LOSSLESS),
        (FAULTS["greedy drafts judged as if sampled"], Verdict.NOT_LOSSLESS),
    ],
    ids=["correct", "greedy drafts judged as if sampled"],
)
def test_a_function_that_yields_rounds_is_judged(fault: Fault, verdict: Verdict) -> None:
    source = FaultySource(FaultySampler(fault))
    certificate = certify_sampler(lambda *request: rounds(source, *request), PROMPTS)
    assert certificate.verdict is verdict, certificate.reason


def test_a_function_of_batches_is_judged_by_the_same_tokens() -> None:
    source = FaultySource()
    sizes = []

    def sampler(
        prompts: list[list[int]], seeds: list[int], sampling: Sampling, number: int
    ) -> list[Any]:
        sizes.append(len(prompts))
        return [
            rounds(source, ids, seed, sampling, number)
            for ids, seed in zip(prompts, seeds, strict=True)
        ]

    options = {"num_requests": 100, "num_long": 20}
    batched = certify_sampler(sampler, PROMPTS, batch_size=32, **options)
    single = certify_sampler(lambda *request: rounds(source, *request), PROMPTS, **options)
    assert batched.tests == single.tests and max(sizes) == 32


def test_a_function_that_shows_no_rounds_must_be_known_to_speculate() -> None:
    p = np.array([0.5, 0.3, 0.2])

    def sampler(
        prompt_ids: list[int], seed: int, sampling: Sampling, number: int
    ) -> tuple[Any, np.ndarray]:
        tokens = np.random.default_rng(seed).choice(3, size=number, p=p)
        return tokens if sampling.temperature else np.zeros(number, int), np.log(
            np.tile(p, (number, 1))
        )

    certificate = certify_sampler(sampler, [[1], [2]])
    assert certificate.verdict is Verdict.INCONCLUSIVE and "nothing shows" in certificate.reason
    certificate = certify_sampler(sampler, [[1], [2]], speculation="assumed")
    assert certificate.verdict is Verdict.LOSSLESS, certificate.reason


def test_log_probabilities_of_another_shape_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"2 tokens with log-probabilities of shape \(5,\); expected a row"
    ):
        certify_sampler(lambda *request: ([1, 2], np.zeros(5)), [[1]])
