"""The statistics of certificates: distributions from reports, false alarms, and injected errors that are found."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from eagle3_jax.certify import Draws, Sampling, Test, judge
from eagle3_jax.certify.faulty import FAULTS, FaultySampler
from eagle3_jax.certify.statistics import _log_gain, number_texts
from eagle3_jax.testing.report import ALPHA

LEVEL = ALPHA / 20
REPORTED = np.log([[0.4, 0.3, 0.2]])  # two more tokens have 0.06 and 0.04
UNKNOWN = math.nan
# Probabilities of the three reported tokens and of all others; only proportions are known where the others are not.
KNOWN: dict[str, tuple[Sampling, list[float]]] = {
    "the others are one cell": (Sampling(), [0.4, 0.3, 0.2, 0.1]),
    "another temperature": (Sampling(temperature=0.5), [16 / 29, 9 / 29, 4 / 29, UNKNOWN]),
    "top-k of reported tokens": (Sampling(temperature=2.0, top_k=2), [2 / (2 + 3**0.5), 3**0.5 / (2 + 3**0.5), 0, 0]),
    "top-k of more tokens": (Sampling(top_k=10), [4 / 9, 3 / 9, 2 / 9, UNKNOWN]),
    "a nucleus of reported tokens": (Sampling(top_p=0.6), [4 / 7, 3 / 7, 0, 0]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_distribution_is_known_from_the_reported_tokens(name: str) -> None:
    sampling, expected = KNOWN[name]
    probs, determined = sampling.distributions(REPORTED)
    np.testing.assert_allclose(probs, [expected])
    assert determined.all()


@pytest.mark.parametrize("top_p", [0.95, 0.7], ids=["it ends among the others", "rounding decides"])
def test_a_nucleus_is_undetermined(top_p: float) -> None:
    assert not Sampling(top_p=top_p).distributions(REPORTED)[1].any()


def test_no_tokens_give_no_tests() -> None:
    draws = FaultySampler().draws(4, 4)
    assert judge(draws[draws.index > 99], alpha=LEVEL) == []


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(top_p=0.0),
        Sampling(top_k=-1),
        Sampling(temperature=0.7, top_p=0.9),
        Sampling(top_k=50, top_p=0.9),
    ],
)
def test_settings_that_the_reports_do_not_determine_are_refused(sampling: Sampling) -> None:
    with pytest.raises(ValueError, match=r"expected a temperature above 0|do not show where the nucleus ends"):
        sampling.check(20)


def test_the_gain_of_a_bet_is_a_product_of_predictions() -> None:
    """Of counts 2 and 1: each token is predicted by the counts before it and the distribution."""
    distribution = np.array([0.25, 0.75])
    scale = 8.0
    predicted = (
        (scale * distribution[0])
        * (scale * distribution[0] + 1)
        * (scale * distribution[1])
        / (scale * (scale + 1) * (scale + 2))
    )
    expected = math.log(predicted / (distribution[0] ** 2 * distribution[1]))
    assert _log_gain(np.array([2, 1]), distribution, scale) == pytest.approx(expected)


def test_texts_are_numbered_by_prompt_and_tokens() -> None:
    assert number_texts([0, 0, 1], [[5, 6], [5, 7], [5]]) == [[0, 1], [0, 1], [2]]
    assert number_texts([0], [list(range(9))]) == [[0, 1, 2, 3, 4, 5, 6, -1, -1]]


def judged(draws: Draws, seed: int = 0) -> list[Test]:
    return judge(draws[draws.index > 0], alpha=LEVEL, seed=seed)


def test_a_correct_sampler_gives_p_values_that_are_uniform_or_larger() -> None:
    """200 runs; a test whose p-values were half as large as they should be would fail here."""
    sampler = FaultySampler()
    below: dict[str, list[float]] = {}
    for seed in range(200):
        for test in judged(sampler.draws(64, 16, seed=seed), seed):
            below.setdefault(test.name, []).append(test.p_value)
    for name, p_values in below.items():
        assert min(p_values) > 1e-5, name
        for limit in (0.01, 0.05, 0.2):
            count = int((np.array(p_values) <= limit).sum())
            assert stats.binom.sf(count - 1, len(p_values), limit) > 1e-4, (
                f"{name}: {count} of {len(p_values)} <= {limit}"
            )


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("greedy drafts judged as if sampled", 64),
        ("typical acceptance", 256),
        ("drafts sampled at T 0.7 and declared at 1", 256),
        ("nucleus applied to the redraw, not to acceptance", 64),
        ("bonus sampled from the position before", 64),
        ("redrawn from p, not from the residual", 4096),
    ],
)
def test_an_injected_error_is_found(name: str, requests: int) -> None:
    fault = FAULTS[name]
    sampling = Sampling(top_p=0.9) if fault.plain_acceptance else None
    right = FaultySampler(sampling=sampling).draws(requests, 32, seed=3)
    wrong = FaultySampler(fault, sampling=sampling).draws(requests, 32, seed=3)
    assert min(test.p_value for test in judged(right)) > LEVEL
    assert min(test.p_value for test in judged(wrong)) < LEVEL


def test_reused_random_numbers_are_found_in_pairs() -> None:
    """Each place is uniform, but consecutive ones are equal."""
    rng = np.random.default_rng(0)
    number = np.repeat(rng.random(4000), 2)
    tokens = (number[:, None] > np.cumsum([0.25, 0.25, 0.25])).sum(axis=1)
    index = np.tile([1, 2], 4000)
    draws = Draws(
        probs=np.tile([0.25, 0.25, 0.25, 0.25], (8000, 1)),
        ids=np.tile([0, 1, 2], (8000, 1)),
        tokens=tokens,
        prompts=np.zeros(8000, int),
        requests=np.repeat(np.arange(4000), 2),
        index=index,
        chunk_index=np.zeros(8000, int),
        texts=np.full(8000, -1),
    )
    p_values = {test.name: test.p_value for test in judge(draws, alpha=LEVEL)}
    assert p_values["pairs of places"] < LEVEL
    assert p_values["places in the distribution"] > 1e-4


def test_a_bias_that_cancels_over_ranks_is_found_behind_the_same_text() -> None:
    """Half of the texts prefer the likeliest token, the others avoid it: places are uniform on average."""
    rng = np.random.default_rng(0)
    number = 20_000
    text = rng.integers(0, 2, number)
    tokens = (rng.random(number) > np.where(text, 0.55, 0.45)).astype(int)
    draws = Draws(
        probs=np.tile([0.5, 0.5, 0.0], (number, 1)),
        ids=np.tile([0, 1], (number, 1)),
        tokens=tokens,
        prompts=text,
        requests=np.arange(number),
        index=np.ones(number, int),
        chunk_index=np.zeros(number, int),
        texts=text,
    )
    p_values = {test.name: test.p_value for test in judge(draws, alpha=LEVEL)}
    assert p_values["counts behind the same text"] < LEVEL
    assert p_values["places in the distribution"] > 1e-4
