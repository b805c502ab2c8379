"""Acceptance, speed-up and rollout: formulas against hand-computed and published values."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
from deployments import served

from eagle3_jax.theory.rollout import (
    REQUESTS_FOR_P99,
    MeasuredCosts,
    Traffic,
    plan_rollout,
    to_markdown,
)
from eagle3_jax.theory.speedup import (
    TrafficClass,
    best_chain_length,
    conditional_rate_from_tau,
    draft_rate_from_tau,
    rates_for_speedup,
    simulate,
    speedup,
    tau_from_conditional_rate,
)


@pytest.mark.parametrize(
    ("alpha", "k"), [(Fraction(1, 2), 2), (Fraction(7, 10), 5), (Fraction(0), 3), (Fraction(1), 4)]
)
def test_tau_is_the_expectation_over_every_pattern_of_accepted_tokens(alpha, k):
    expected = Fraction(0)
    for pattern in itertools.product((True, False), repeat=k):
        probability = math.prod(
            (alpha if accepted else 1 - alpha for accepted in pattern), start=Fraction(1)
        )
        expected += probability * (1 + len(list(itertools.takewhile(bool, pattern))))
    assert tau_from_conditional_rate(float(alpha), k) == pytest.approx(float(expected), abs=1e-12)


def test_rates_are_recovered_from_lengths():
    assert draft_rate_from_tau(4.5, 5) == pytest.approx(0.7)
    assert conditional_rate_from_tau(1.75, 2) == pytest.approx(0.5)  # 1 + 1/2 + 1/4
    # One 70B head on MT-Bench, K = 3, measured as τ 2.92: "0.64" and "0.79" are the same head.
    assert draft_rate_from_tau(2.92, 3) == pytest.approx(0.64)
    assert conditional_rate_from_tau(2.92, 3) == pytest.approx(0.79, abs=0.005)


def test_one_pair_of_costs_explains_what_vllm_measured():
    """Llama-3.1-8B on one H100, batch 1: τ and ms per output token for K = 2..7.

    From vllm-project/vllm 20780.
    """
    measured = zip(
        range(2, 8),
        (2.36, 2.79, 3.08, 3.32, 3.46, 3.54),
        (4.32, 4.09, 4.05, 4.13, 4.20, 4.29),
        strict=True,
    )
    for k, tau, milliseconds in measured:
        predicted = speedup(tau, num_draft_tokens=k, verify_cost=1.18, draft_cost=0.144)
        assert predicted == pytest.approx(7.07 / milliseconds, rel=0.03)


@pytest.mark.parametrize(("gain", "tau"), [(6.01, None), (6.0, 6.0), (3.0, 3.0), (0.5, 1.0)])
def test_a_speedup_takes_a_tau_that_may_be_out_of_reach(gain, tau):
    rates = rates_for_speedup(gain, num_draft_tokens=5, verify_cost=0.5, draft_cost=0.1)
    assert (rates and rates.mean_acceptance_length) == tau


def test_the_best_chain_grows_with_alpha_and_is_none_when_nothing_pays():
    costs = {"verify_costs": [1.18] * 10, "draft_costs": [0.144] * 10}
    assert [best_chain_length(alpha, **costs) for alpha in (0.1, 0.5, 0.6, 0.7, 0.8)] == [
        0,
        2,
        3,
        4,
        5,
    ]


def simulated(alpha: float, seed: int = 0):
    return simulate(
        [TrafficClass(share=1.0, conditional_acceptance_rate=alpha)],
        num_draft_tokens=5,
        verify_cost=1.2,
        draft_cost=0.1,
        num_requests=2000,
        output_tokens=121,
        seed=seed,
    )


def test_the_simulation_has_the_mean_of_the_formula_and_depends_on_its_seed_only():
    simulation = simulated(0.7)
    tau = tau_from_conditional_rate(0.7, 5)
    # The accepted tokens of a round have a standard deviation of 1.9, and there are 2000·120/τ
    # rounds.
    assert simulation.mean_acceptance_length == pytest.approx(
        tau, abs=5 * 1.9 / math.sqrt(2000 * 120 / tau)
    )
    assert simulation == simulated(0.7) != simulated(0.7, seed=1)

    always = simulated(1.0)
    never = simulated(0.0)
    # Six tokens a round of 1.2 + 5·0.1.
    assert always.time_per_output_token.p99 == pytest.approx(20 * 1.7 / 120)
    assert never.time_per_output_token.p50 == pytest.approx(1.7)
    assert (always.slower_than_plain, never.slower_than_plain) == (0.0, 1.0)


def rollout(
    requests_per_second: float = 5.0,
    concurrency: int = 16,
    costs: tuple[float, float] | None = None,
):
    return plan_rollout(
        served(),
        Traffic(
            requests_per_second, prompt_tokens=1024, output_tokens=256, concurrency=concurrency
        ),
        num_draft_tokens=4,
        conditional_acceptance_rate=0.75,
        measured=costs and MeasuredCosts(*costs),
    )


def test_stages_last_until_a_99th_percentile_can_be_judged():
    assert math.ceil(3.8416 * 0.0099 / 0.0025**2) == REQUESTS_FOR_P99 == 6086
    stages = rollout().stages
    assert [(stage.share, stage.hours) for stage in stages] == [
        (0.01, 34),
        (0.1, 24.0),
        (0.5, 24.0),
        (1.0, 168.0),
    ]
    assert stages[0].requests == pytest.approx(34 * 180)
    assert rollout(requests_per_second=500.0).stages[0].hours == 1.0


def test_gates_follow_from_measured_costs_and_what_cannot_work_is_not_to_be_started():
    plan = rollout(costs=(1.4, 0.1))
    tau = 1 + 0.75 + 0.5625 + 0.421875 + 0.31640625
    assert plan.expected.mean_acceptance_length == pytest.approx(tau)
    assert plan.break_even_tau == pytest.approx(1.8)
    assert plan.least_tau == pytest.approx((1.8 + tau) / 2)
    assert plan.largest_time_ratio == pytest.approx((1 + 1.8 / tau) / 2)
    assert plan.predicted_speedup == pytest.approx(tau / 1.8)

    assert not plan.obstacles
    for poor, reason in (
        (rollout(costs=(4.0, 0.1)), "speed"),
        (rollout(concurrency=1000), "memory"),
    ):
        assert f"- **Do not start.** {reason}: " in to_markdown(poor, target="t", head="h")


def test_the_schedule_covers_every_batch_once_and_drafts_less_in_large_ones():
    schedule = rollout(concurrency=512).schedule
    assert (schedule[0].first, schedule[-1].last) == (1, 1024)
    assert all(after.first == before.last + 1 for before, after in itertools.pairwise(schedule))
    lengths = [part.num_draft_tokens for part in schedule]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] == 4 > lengths[-1]
