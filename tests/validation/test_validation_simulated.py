"""L9 without weights: other rates of acceptance than the simulated ones are detected."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3_jax.stats import SpeculationStats
from validation.simulated import AcceptanceDistribution

RATES = (0.7, 0.49, 0.343)


def counted(rates: tuple[float, ...], rounds: int, seed: int) -> SpeculationStats:
    """Rounds that accept with these rates, from uniforms, one for each round."""
    dice = np.random.default_rng(seed).random(rounds)
    positions = np.array([(dice < rate).sum() for rate in rates])
    return SpeculationStats(
        num_drafts=np.array([rounds]),
        num_draft_tokens=np.array([rounds * len(rates)]),
        num_accepted_tokens=np.array([positions.sum()]),
        num_accepted_tokens_per_pos=positions[None],
    )


def test_dice_of_these_rates_pass_and_others_fail() -> None:
    """The declared deviation is detected nine times in ten; a correct engine always passes."""
    distribution = AcceptanceDistribution(RATES)
    rounds = 6000
    assert distribution.mean == pytest.approx(1.533)
    assert distribution.deviation == pytest.approx(np.sqrt(3.885 - 1.533**2))
    for seed in range(200):
        scores = distribution.scores(counted(RATES, rounds, seed))
        assert max(map(abs, scores)) <= distribution.most

    visible = distribution.sees(rounds)
    off = tuple(np.array(RATES) * (1 + visible / distribution.mean))
    means = [distribution.scores(counted(off, rounds, seed))[0] for seed in range(200)]
    assert visible < 0.11 and sum(abs(mean) <= distribution.most for mean in means) <= 40


def test_one_position_that_is_off_is_seen_although_the_mean_is_right() -> None:
    distribution = AcceptanceDistribution(RATES)
    scores = distribution.scores(counted((0.75, 0.49, 0.293), 6000, 0))
    assert abs(scores[0]) < distribution.most < abs(scores[1])
