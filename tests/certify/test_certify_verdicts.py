"""Verdicts about servers with injected faults, and about correct ones that look odd."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from faulty_sampler import (
    FAULTS,
    PROMPTS,
    FaultySampler,
    FaultySource,
    noisy,
    to_bfloat16,
)
from scipy import special

from eagle3_jax.certify.asking import Plan
from eagle3_jax.certify.certificate import Certificate, Verdict
from eagle3_jax.certify.examine import certify
from eagle3_jax.certify.source import Completion, Report, ServerError
from eagle3_jax.certify.statistics import Sampling

PLAN = Plan(prompts=PROMPTS, concurrency=1, with_fields=False)
LARGE = {"vocab_size": 200}  # twenty reported tokens leave a quarter of the probability


def verdict_on(source: FaultySource, plan: Plan = PLAN) -> Certificate:
    return certify(source, plan)


def unmet(certificate: Certificate) -> set[str]:
    return {entry.name for entry in certificate.requirements if not entry.is_met}


def test_a_correct_server_is_lossless_and_the_verdict_names_what_it_would_have_seen() -> None:
    certificate = verdict_on(FaultySource(FaultySampler(**LARGE)))
    assert certificate.verdict is Verdict.LOSSLESS, certificate.reason
    assert "would have found an acceptance 20 % too willing" in certificate.reason
    assert (
        "acceptance of every sampled draft where draft and target are 15 % apart"
        in certificate.reason
    )
    assert all(entry.is_met for entry in certificate.requirements)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_accepting_every_draft_is_found(seed: int) -> None:
    """Draft and target are 0.26 apart, which cells of places do not show in as many tokens."""
    sampler = FaultySampler(FAULTS["every draft accepted"], **LARGE)
    certificate = verdict_on(FaultySource(sampler), dataclasses.replace(PLAN, seed=10_000 * seed))
    assert certificate.verdict is Verdict.NOT_LOSSLESS, certificate.reason


def test_too_few_requests_promise_nothing() -> None:
    certificate = verdict_on(
        FaultySource(), dataclasses.replace(PLAN, num_requests=256, num_long=16)
    )
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert "sight" in unmet(certificate) and "ask for more requests" in certificate.reason


def test_wrong_logits_behind_drafts_do_not_raise_the_limit_of_noise() -> None:
    certificate = verdict_on(
        FaultySource(behind_drafts=3.0), dataclasses.replace(PLAN, num_requests=0, num_long=0)
    )
    assert certificate.verdict is Verdict.NOT_LOSSLESS
    assert (
        "greedy tokens, scored by force" in certificate.reason
        and "the noise is 0.0001" in certificate.reason
    )


def test_differences_that_rounding_might_explain_are_inconclusive() -> None:
    certificate = verdict_on(
        FaultySource(behind_drafts=0.1), dataclasses.replace(PLAN, num_requests=0, num_long=0)
    )
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert "greedy scores" in unmet(certificate) and "stale keys and values" in certificate.reason


class Unread(FaultySource):
    """Reports drafted tokens in a way that cannot be read, and accepts unlikely drafts."""

    def report(self, token: int, p: np.ndarray, num_reported: int, is_drafted: bool) -> Report:
        return (
            Report(token, math.nan, {})
            if is_drafted
            else super().report(token, p, num_reported, is_drafted)
        )


def test_reports_that_cannot_be_read_are_no_agreement() -> None:
    certificate = verdict_on(Unread(FaultySampler(FAULTS["every draft accepted"])))
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert "readable reports" in unmet(certificate)


class RedrawsTheLikeliest(FaultySource):
    """Redraws by arg-max at top-p 0.9."""

    def sample(
        self,
        number: int,
        before: list[int],
        max_tokens: int,
        seed: int,
        temperature: float,
        fields: dict[str, Any],
    ) -> tuple[list[int], list[int]]:
        tokens, chunk_index = super().sample(number, before, max_tokens, seed, temperature, fields)
        for index in range(1, max_tokens):
            if chunk_index[index] == 0:
                likeliest = int(self.distribution(number, tokens[:index]).argmax())
                tokens = [*tokens[:index], likeliest, *tokens[index + 1 :]]
        return tokens, chunk_index


def test_a_nucleus_that_the_reports_hardly_show_is_judged_among_the_reported_tokens() -> None:
    sampler = FaultySampler(sampling=Sampling(top_p=0.9), **LARGE)
    plan = dataclasses.replace(PLAN, sampling=Sampling(top_p=0.9))
    right = verdict_on(FaultySource(sampler), plan)
    assert right.verdict is Verdict.LOSSLESS, right.reason
    assert verdict_on(RedrawsTheLikeliest(sampler), plan).verdict is Verdict.NOT_LOSSLESS


class DraftsNothing(FaultySource):
    """Does not speculate where log-probabilities are asked for."""

    def complete(self, prompt: Sequence[int], **fields: Any) -> Completion:
        answer = super().complete(prompt, **fields)
        self.num_drafts = 0
        return dataclasses.replace(answer, chunk_index=[0] * len(answer.reports))


def test_a_server_that_drafted_nothing_is_not_certified() -> None:
    certificate = verdict_on(DraftsNothing())
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert "no draft was counted while log-probabilities were asked for" in certificate.reason
    plain = verdict_on(DraftsNothing(), dataclasses.replace(PLAN, speculation="none"))
    assert plain.verdict is Verdict.LOSSLESS, plain.reason


class RepeatsSeeds(FaultySource):
    """Has 300 seeds."""

    def seed(self, seed: int) -> int:
        return seed % 300


def test_repeated_seeds_are_not_certified() -> None:
    assert verdict_on(RepeatsSeeds()).verdict is not Verdict.LOSSLESS


class OfflineReports(FaultySource):
    """Reports something else than it samples from, with drafts and without."""

    def reported(
        self, number: int, before: list[int], is_drafted: bool, temperature: float, fields: Any
    ) -> np.ndarray:
        return special.softmax(np.log(self.distribution(number, before)) / 0.8)


def test_reports_that_do_not_describe_the_sampler_are_inconclusive() -> None:
    certificate = verdict_on(OfflineReports())
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert "the reports do not describe the sampler" in certificate.reason


@pytest.mark.parametrize("sampling", [Sampling(0.95), Sampling(top_p=0.9)])
def test_processed_reports_are_recognised(sampling: Sampling) -> None:
    source = FaultySource(FaultySampler(sampling=sampling), processed=True)
    certificate = verdict_on(source, dataclasses.replace(PLAN, sampling=sampling))
    assert certificate.facts["sampling"]["processed"]
    assert certificate.verdict is Verdict.LOSSLESS, certificate.reason


COARSE = {
    "two decimals": functools.partial(round, ndigits=2),
    "one decimal": functools.partial(round, ndigits=1),
    "bfloat16": to_bfloat16,
}


@pytest.mark.parametrize("grid", COARSE)
def test_coarse_and_noisy_reports_of_a_correct_server_are_no_proof(grid: str) -> None:
    certificate = verdict_on(FaultySource(noise=0.003, round_to=COARSE[grid]))
    expected = Verdict.INCONCLUSIVE if grid == "one decimal" else Verdict.LOSSLESS
    assert certificate.verdict is expected, certificate.reason


def test_large_noise_is_inconclusive() -> None:
    certificate = verdict_on(FaultySource(noise=0.5))
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert "little noise" in unmet(certificate)


class SilentWhileSampling(FaultySource):
    """Reports greedy tokens only, and accepts every draft while sampling."""

    def complete(self, prompt: Sequence[int], **fields: Any) -> Completion:
        answer = super().complete(prompt, **fields)
        return (
            dataclasses.replace(answer, reports=[], chunk_index=[])
            if fields["temperature"]
            else answer
        )


def test_answers_without_reports_are_no_agreement() -> None:
    certificate = verdict_on(SilentWhileSampling(FaultySampler(FAULTS["every draft accepted"])))
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert {"readable reports", "judged tokens"} <= unmet(certificate)


class DraftsGreedyTokensOnly(FaultySource):
    """Speculates for greedy requests only."""

    def complete(self, prompt: Sequence[int], **fields: Any) -> Completion:
        before = self.num_drafts
        answer = super().complete(prompt, **fields)
        if fields["temperature"]:
            self.num_drafts = before
            answer = dataclasses.replace(answer, chunk_index=[0] * len(answer.reports))
        return answer


def test_drafts_of_greedy_tokens_say_nothing_about_sampled_ones() -> None:
    certificate = verdict_on(DraftsGreedyTokensOnly())
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert unmet(certificate) == {"drafts of sampled tokens"}


class DraftsSeldom(FaultySource):
    """Counts a draft for one token of thirty, as n-grams find."""

    def counters(self) -> dict[str, Any]:
        return {"num_drafts": self.num_drafts // 60, "num_accepted_tokens": self.num_drafts // 90}


def test_few_drafts_are_little_sight() -> None:
    certificate = verdict_on(DraftsSeldom())
    assert certificate.verdict is Verdict.INCONCLUSIVE and unmet(certificate) == {"sight"}


class RestartsItsCounters(DraftsNothing):
    """Counts from zero again after a restart."""

    def counters(self) -> dict[str, Any]:
        self._asked = getattr(self, "_asked", 1000) - 100
        return {"num_draft_tokens": self._asked}


def test_counters_that_fall_are_no_sign_of_drafts() -> None:
    assert verdict_on(RestartsItsCounters()).verdict is Verdict.INCONCLUSIVE


class Stale(FaultySource):
    """Decodes and reports sampled tokens by keys of which scoring knows nothing."""

    def scored(self, number: int, before: list[int]) -> np.ndarray:
        return (
            self.sampler.target[number, (before[-1] + 1) % 64]
            if before
            else self.sampler.first[number]
        )


def test_likely_tokens_that_scoring_does_not_list_are_differences() -> None:
    certificate = verdict_on(Stale(), dataclasses.replace(PLAN, num_greedy=0))
    assert certificate.verdict is not Verdict.LOSSLESS, certificate.reason


class ScoresHalf(FaultySource):
    """Scores every second answer."""

    def score(
        self, prompt: Sequence[int], completion: Completion, *, num_reported: int
    ) -> list[Report]:
        reports = super().score(prompt, completion, num_reported=num_reported)
        self._scored = getattr(self, "_scored", 0) + 1
        return reports if self._scored % 2 else []


def test_answers_that_are_not_scored_are_missed() -> None:
    certificate = verdict_on(ScoresHalf())
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert {"greedy tokens", "scored samples"} <= unmet(certificate)


class RefusesControls(FaultySource):
    """Accepts every draft, and answers no request for a single sampled token."""

    def complete(self, prompt: Sequence[int], **fields: Any) -> Completion:
        if fields["temperature"] and fields["max_tokens"] == 1:
            raise ServerError("no")
        return super().complete(prompt, **fields)


def test_a_failed_test_without_a_control_is_inconclusive() -> None:
    certificate = verdict_on(RefusesControls(FaultySampler(FAULTS["every draft accepted"])))
    assert certificate.verdict is Verdict.INCONCLUSIVE
    assert "too few tokens without drafts were compared" in certificate.reason


class MisreportsEachText(FaultySource):
    """Samples rightly, but reports another distribution behind each token, drafted or not."""

    def reported(
        self, number: int, before: list[int], is_drafted: bool, temperature: float, fields: Any
    ) -> np.ndarray:
        p = self.distribution(number, before)
        return noisy(p, 0.3, seed=100 * number + before[-1]) if before else p

    def scored(self, number: int, before: list[int]) -> np.ndarray:
        return self.reported(number, before, False, 0.0, {})


@pytest.mark.parametrize("seed", range(3))
def test_reports_that_are_wrong_with_and_without_drafts_prove_nothing(seed: int) -> None:
    """First tokens are sure here, so they do not show it; only tokens behind the same texts do."""
    plan = dataclasses.replace(PLAN, seed=10_000 * seed, num_greedy=0)
    certificate = verdict_on(MisreportsEachText(FaultySampler(sureness=0.999)), plan)
    assert certificate.verdict is Verdict.INCONCLUSIVE, certificate.reason
    assert "the reports do not describe the sampler" in certificate.reason
