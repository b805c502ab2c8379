"""Simulated acceptance: the counts are those of the rates, and results are not called lossless."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

from eagle3_jax import DynamicTree, SamplingParams, SimulatedAcceptance, SpeculativeDecoder
from eagle3_jax.drafters import NGram

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8]]


@pytest.fixture(scope="module")
def target():
    return tiny.target()


def test_rates_of_a_length_have_the_least_variance_and_conditional_ones_multiply():
    assert SimulatedAcceptance.of_length(3.25, 5).rates == (1.0, 1.0, 0.25, 0.0, 0.0)
    assert SimulatedAcceptance.of_length(1, 2).rates == (0.0, 0.0)
    assert np.allclose(SimulatedAcceptance.of_conditional_rate(0.8, 3).rates, [0.8, 0.64, 0.512])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_exactly_the_length_asked_for_is_accepted_in_every_round(target, shape, temperature):
    tree = DynamicTree(num_nodes=9, max_depth=4, top_k=2)
    options = {"num_speculative_tokens": 4} if shape == "chain" else {"tree": tree}
    decoder = SpeculativeDecoder(
        target, tiny.eagle3(target), verifier=SimulatedAcceptance.of_length(4, 4), **options
    )
    sampling = SamplingParams(temperature=temperature)
    for played in decoder.rounds(PROMPTS, max_new_tokens=40, sampling=sampling):
        assert np.asarray(played.verdict.num_accepted).tolist() == [3, 3, 3]
    result = decoder.generate(PROMPTS, max_new_tokens=40, sampling=sampling)
    assert result.stats.mean_acceptance_length == 4
    assert result.lossless is False


def test_conditional_rates_come_out_at_every_depth(target):
    rule = SimulatedAcceptance.of_conditional_rate(0.7, 3)
    decoder = SpeculativeDecoder(target, tiny.eagle3(target), verifier=rule)
    stats = decoder.generate([[token] for token in range(12)], max_new_tokens=240).stats
    drafts = int(stats.num_drafts)
    for depth, rate in enumerate(stats.acceptance_per_position):
        share = 0.7 ** (depth + 1)
        assert abs(rate - share) < 4 * np.sqrt(share * (1 - share) / drafts)


def test_the_last_token_of_a_round_is_still_the_targets(target):
    """Only acceptance is simulated: if nothing is accepted, the output is the target's own text."""
    none = SimulatedAcceptance.of_length(1, 3)
    result = tiny.check_same_text(
        target, tiny.eagle3(target), PROMPTS, max_new_tokens=20, verifier=none
    )
    assert result.lossless is False


def test_a_draft_that_was_not_made_is_not_accepted(target):
    """Prompt lookup finds nothing in a text without repetition, so nothing is accepted."""
    decoder = SpeculativeDecoder(target, NGram(5), verifier=SimulatedAcceptance.of_length(6, 5))
    for played in decoder.rounds([[1, 2, 3, 4]], max_new_tokens=12):
        drafted = int(np.asarray(played.draft.valid)[0, 1:].sum())
        assert int(played.verdict.num_accepted[0]) == drafted
