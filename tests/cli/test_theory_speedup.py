"""What acceptance is worth: formulas against hand-computed values, enumeration, and what others measured."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest

from eagle3_jax.theory.rollout import (
    accepted_variance,
)
from eagle3_jax.theory.speedup import (
    TrafficClass,
    best_chain_length,
    blended_tau,
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
        probability = math.prod((alpha if kept else 1 - alpha for kept in pattern), start=Fraction(1))
        expected += probability * (1 + len(list(itertools.takewhile(bool, pattern))))
    assert tau_from_conditional_rate(float(alpha), k) == pytest.approx(float(expected), abs=1e-12)


def test_rates_are_recovered_from_lengths():
    assert draft_rate_from_tau(4.5, 5) == pytest.approx(0.7)
    assert conditional_rate_from_tau(1.75, 2) == pytest.approx(0.5)  # 1 + 1/2 + 1/4
    assert conditional_rate_from_tau(1.3, 1) == pytest.approx(0.3)  # with one token both rates are the same
    # One 70B head on MT-Bench, K = 3, measured as τ 2.92: "0.64" and "0.79" are the same head.
    assert draft_rate_from_tau(2.92, 3) == pytest.approx(0.64)
    assert conditional_rate_from_tau(2.92, 3) == pytest.approx(0.79, abs=0.005)


def test_one_pair_of_costs_explains_what_vllm_measured():
    """Llama-3.1-8B on one H100, batch 1: τ and time per output token in ms for K = 2..7 (vllm-project/vllm 20780)."""
    measured = zip(range(2, 8), (2.36, 2.79, 3.08, 3.32, 3.46, 3.54), (4.32, 4.09, 4.05, 4.13, 4.20, 4.29), strict=True)
    for k, tau, milliseconds in measured:
        predicted = speedup(tau, num_draft_tokens=k, verify_cost=1.18, draft_cost=0.144)
        assert predicted == pytest.approx(7.07 / milliseconds, rel=0.03)


def test_a_speedup_beyond_everything_accepted_is_out_of_reach():
    assert rates_for_speedup(6.01, num_draft_tokens=5, verify_cost=1.0, draft_cost=0.0) is None
    everything = rates_for_speedup(6.0, num_draft_tokens=5, verify_cost=1.0, draft_cost=0.0)
    assert everything is not None
    assert everything.conditional_acceptance_rate == pytest.approx(1.0)
    nothing = rates_for_speedup(0.5, num_draft_tokens=5, verify_cost=1.0, draft_cost=0.0)
    assert nothing is not None
    assert nothing.mean_acceptance_length == 1.0


def test_the_best_chain_grows_with_alpha_and_is_none_when_nothing_pays():
    costs = {"verify_costs": [1.18] * 10, "draft_costs": [0.144] * 10}
    assert [best_chain_length(alpha, **costs) for alpha in (0.5, 0.6, 0.7, 0.8)] == [2, 3, 4, 5]
    assert best_chain_length(0.1, **costs) == 0


def test_the_exercises_of_the_articles_have_their_answers():
    for overhead, drafts, conditionals in (
        (0.1, (0.24, 0.46), (0.559, 0.752)),
        (0.15, (0.26, 0.49), (0.582, 0.771)),
        (0.5, (0.40, 0.70), (0.709, 0.883)),
        (1.0, (0.60, 1.0), (0.834, 1.0)),
    ):
        for wanted, draft, conditional in zip((2.0, 3.0), drafts, conditionals, strict=True):
            found = rates_for_speedup(wanted, num_draft_tokens=5, verify_cost=1.0, draft_cost=overhead / 5)
            assert found is not None
            assert found.draft_acceptance_rate == pytest.approx(draft, abs=0.006)
            assert found.conditional_acceptance_rate == pytest.approx(conditional, abs=0.001)
    for blended, rates in ((3.91, (4.5, 3.0)), (2.388, [tau_from_conditional_rate(rate, 5) for rate in (0.7, 0.4)])):
        assert blended_tau([0.7, 0.3], rates) == pytest.approx(blended, abs=0.005)


def simulated(traffic: list[tuple[float, float]], seed: int = 0, num_requests: int = 2000):
    classes = [TrafficClass(share=share, conditional_acceptance_rate=alpha) for share, alpha in traffic]
    return simulate(
        classes,
        num_draft_tokens=5,
        verify_cost=1.2,
        draft_cost=0.1,
        num_requests=num_requests,
        output_tokens=121,
        seed=seed,
    )


def test_the_simulation_has_the_mean_of_the_formula_and_depends_on_its_seed_only():
    found = simulated([(1.0, 0.7)])
    rounds = 2000 * 120 / 2.94117
    error = math.sqrt(accepted_variance(0.7, 5) / rounds)
    assert found.mean_acceptance_length == pytest.approx(2.94117, abs=5 * error)
    assert found == simulated([(1.0, 0.7)])
    assert found != simulated([(1.0, 0.7)], seed=1)


def test_the_simulation_is_exact_where_nothing_is_random():
    always, never = simulated([(1.0, 1.0)]), simulated([(1.0, 0.0)])
    assert always.time_per_output_token.p99 == pytest.approx(
        20 * 1.7 / 120
    )  # 120 tokens, six a round, 1.2 + 5·0.1 each
    assert never.time_per_output_token.p50 == pytest.approx(1.7)
    assert (always.slower_than_plain, never.slower_than_plain) == (0.0, 1.0)
