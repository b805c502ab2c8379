"""The statistics of ``validation``: against closed forms, and whether each detects its bugs."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import chi2, norm

from eagle3_jax.measure.frequencies import fit_counts, smallest_deviation
from validation.statistics import (
    Excess,
    Score,
    directed,
    drafted,
    kolmogorov_smirnov,
    randomised_pit,
    smallest_shift,
    surprisal,
    towards,
)

P = np.array([[0.5, 0.25, 0.25, 0.0], [0.1, 0.2, 0.3, 0.4]])
Q = np.array([[0.25, 0.25, 0.0, 0.5], [0.4, 0.3, 0.2, 0.1]])
TOKENS = np.array([0, 3])


def moments(score: np.ndarray, p: np.ndarray) -> tuple[float, float]:
    mean = sum(a * b for a, b in zip(p, score, strict=True) if a)
    return mean, sum(a * (b - mean) ** 2 for a, b in zip(p, score, strict=True) if a)


def test_surprisal_has_the_entropy_as_its_mean() -> None:
    score = surprisal(P, TOKENS)
    np.testing.assert_allclose(score.observed, [math.log(2), -math.log(0.4)])
    assert score.mean[0] == pytest.approx(1.5 * math.log(2))
    assert score.variance[0] == pytest.approx(0.25 * math.log(2) ** 2)
    for row in range(2):
        bits = [-math.log(x) if x else 0.0 for x in P[row]]
        assert (score.mean[row], score.variance[row]) == pytest.approx(moments(bits, P[row]))
    assert surprisal(P, np.array([3, 0])).z == math.inf, "a token without mass"


def test_a_directed_score_is_the_cut_log_ratio() -> None:
    score = directed(P, Q, np.array([2, 0]))
    np.testing.assert_allclose(score.observed, [-10.0, math.log(4)])
    for row in range(2):
        ratio = [
            max(-10.0, math.log(b / a)) if a and b else -10.0
            for a, b in zip(P[row], Q[row], strict=True)
        ]
        assert (score.mean[row], score.variance[row]) == pytest.approx(moments(ratio, P[row]))


def test_a_drafted_token_counts_as_often_as_it_has_mass() -> None:
    score = drafted(P, np.array([[1, -1], [3, 0]]), TOKENS)
    assert score.observed.tolist() == [0.0, 1.0]
    np.testing.assert_allclose(score.mean, [0.25, 0.5])
    np.testing.assert_allclose(score.variance, [0.25 * 0.75, 0.25])


def test_z_is_the_sum_over_its_standard_deviation() -> None:
    score = Score(np.array([1.0, 2.0, 5.0]), np.array([0.0, 1.0, 1.0]), np.array([1.0, 3.0, 5.0]))
    assert score.z == pytest.approx(6 / 3)
    assert score[np.array([True, True, False])].z == pytest.approx(2 / 2)
    assert Score(np.ones(2), np.ones(2), np.zeros(2)).z == 0


def test_the_transform_adds_up_the_mass_before_a_token() -> None:
    uniforms = np.array([0.5, 0.25])
    np.testing.assert_allclose(randomised_pit(P, TOKENS, uniforms, order=-P), [0.25, 0.1])
    np.testing.assert_allclose(
        randomised_pit(P, TOKENS, uniforms, order=np.zeros_like(P)), [0.25, 0.7]
    )
    np.testing.assert_allclose(
        randomised_pit(P, np.array([2, 1]), uniforms, order=-P), [0.875, 0.75]
    )


def test_goodness_of_fit_is_that_of_the_closed_form() -> None:
    """Outcomes in any order, and expected counts of any sum."""
    expected = np.array([0.3, 0.5, 0.2])
    counts = np.array([290, 520, 190])
    fit = fit_counts(counts, 3 * expected)
    pearson = 20**2 / 500 + 10**2 / 300 + 10**2 / 200
    likelihood = 2 * sum(
        count * math.log(count / (1000 * mass))
        for count, mass in zip(counts, expected, strict=True)
    )
    assert fit.chi_square == pytest.approx(chi2.sf(pearson, 2))
    assert fit.g_test == pytest.approx(chi2.sf(likelihood, 2))
    assert (fit.draws, fit.degrees, fit.distance) == (1000, 2, pytest.approx(0.02))


def test_rare_outcomes_are_counted_together() -> None:
    expected = np.append(np.full(100, 0.1 / 100), 0.9)
    fit = fit_counts(np.append(np.ones(100, int), 900), expected)
    assert fit.degrees == 1
    assert fit.chi_square == pytest.approx(1.0)
    assert fit_counts(np.append(1 + np.arange(100) % 2, 850), expected).chi_square < 1e-6
    # The second outcome joins the first, and nothing is left.
    assert fit_counts(np.array([1000, 0]), np.array([0.999, 0.001])).chi_square == 1
    impossible = fit_counts(np.array([999, 1]), np.array([1.0, 0.0]))
    assert impossible.chi_square == impossible.g_test == 0 and impossible.impossible == (1,)
    assert impossible.reason == "1 outcomes of probability 0, as 1"


# ---------------------------------------------------------------- injected bugs in simulated rounds


class Played(NamedTuple):
    """Tokens of simulated rounds, with the inputs of the statistics."""

    p: np.ndarray
    q: np.ndarray
    tokens: np.ndarray
    index: np.ndarray


VOCABULARY = 1000
DRAFTED = 4
ROUNDS = 2500


@functools.cache
def played(bug: str) -> Played:
    """Plays rounds of Leviathan's rule on random distributions, with one bug.

    ``q`` is what the drafter declares.
    """
    rng = np.random.default_rng(7)

    def draw(weights: np.ndarray) -> int:
        uniform = rng.random() * weights.sum()
        return int(np.searchsorted(np.cumsum(weights), uniform, side="right"))

    rows: list[tuple] = []
    for _ in range(ROUNDS):
        logits = 1.5 * rng.normal(size=(DRAFTED + 1, VOCABULARY))
        p = softmax(logits, -1)
        q = softmax(logits + 0.8 * rng.normal(size=logits.shape), -1)
        for j in range(DRAFTED):
            draft_weights = q[j]
            # Drafted from its 50 likeliest tokens.
            if bug == "raw q declared":
                draft_weights = np.where(q[j] >= np.sort(q[j])[-50], q[j], 0.0)
            is_argmax = bug == "argmax drafted, q declared"
            token = int(np.argmax(q[j])) if is_argmax else draw(draft_weights)
            if rng.random() * q[j][token] < p[j][token]:
                rows.append((p[j], q[j], token, j))
                continue

            residual = np.maximum(p[j] - q[j], 0.0)
            if bug == "residual softmax":
                residual = softmax(residual)
            elif bug == "resample from p":
                residual = p[j]
            rows.append((p[j], q[j], draw(residual), j))
            break
        else:
            bonus_weights = q[-1] if bug == "bonus from q" else p[-1]
            rows.append((p[-1], q[-1], draw(bonus_weights), DRAFTED))
    p, q, tokens, index = map(np.array, zip(*rows, strict=True))
    return Played(p, q, tokens, index)


def verdicts(run: Played) -> dict[str, float]:
    """The z of every score, and the transforms' p-values as a z of the same tail."""
    uniforms = np.random.default_rng(11).random(run.tokens.size)
    scores = {
        "entropy": surprisal(run.p, run.tokens),
        "directed": directed(run.p, run.q, run.tokens),
    }
    z_scores = {name: score.z for name, score in scores.items()}
    z_scores["bonus"] = scores["directed"][run.index == DRAFTED].z
    for name, order in (("rank", -run.p), ("direction", -towards(run.p, run.q))):
        tail = kolmogorov_smirnov(randomised_pit(run.p, run.tokens, uniforms, order=order))
        z_scores[name] = float(norm.isf(max(tail, 1e-300)))
    return z_scores


def test_nothing_is_seen_in_correct_rounds() -> None:
    run = played("none")
    assert run.tokens.size > 6000
    assert set(run.index) == set(range(DRAFTED + 1))
    assert all(abs(z) < 4 for z in verdicts(run).values())


# Each bug, and the statistics that see it.
SEEN_BY = {
    "residual softmax": ("entropy", "rank"),
    "raw q declared": ("entropy", "rank"),
    "resample from p": ("directed", "direction"),
    "bonus from q": ("bonus",),
    "argmax drafted, q declared": ("entropy", "rank"),
}


@pytest.mark.parametrize("bug", SEEN_BY)
def test_a_bug_is_seen_by_its_statistics(bug: str) -> None:
    z_scores = verdicts(played(bug))
    assert all(abs(z_scores[name]) > 6 for name in SEEN_BY[bug])


# ---------------------------------------------------------------- power


def test_the_smallest_deviation_is_that_of_the_noncentral_chi_square() -> None:
    """Published: at 5 %, power 0.9 takes a noncentrality of 10.51; with ten degrees 20.53."""
    assert smallest_deviation(10_000, 1, alpha=0.05) == pytest.approx(
        math.sqrt(10.507 / 10_000), rel=1e-3
    )
    assert smallest_deviation(10_000, 10, alpha=0.05) == pytest.approx(
        math.sqrt(20.53 / 10_000), rel=1e-3
    )
    assert smallest_deviation(0, 3, alpha=1e-6) == smallest_deviation(10, 0, alpha=1e-6) == math.inf


@functools.cache
def transitions(seed: int, contexts: int = 12, size: int = 4) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(4 * np.ones(size), contexts)


def sampled(p: np.ndarray, contexts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Samples one token from the distribution of each context."""
    is_after = rng.random((len(contexts), 1)) > np.cumsum(p, axis=1)[contexts]
    return is_after.sum(axis=1).clip(max=p.shape[1] - 1)


def counted(
    p: np.ndarray, sampled_from: np.ndarray, tokens: int, rng: np.random.Generator
) -> Excess:
    """Tokens in strata that are their contexts."""
    contexts = rng.integers(0, len(p), tokens)
    return Excess.of(p, contexts, sampled(sampled_from, contexts, rng), contexts, len(p))


def test_excess_by_distribution_is_pearsons_statistic() -> None:
    p = transitions(0)
    rng = np.random.default_rng(1)
    excess = counted(p, p, 20_000, rng)
    fluctuation = excess.fluctuation()
    pearson = ((excess.observed - excess.expected) ** 2 / excess.expected).sum()
    assert fluctuation.statistic == pytest.approx(pearson)
    assert (fluctuation.degrees, fluctuation.tokens) == (12 * 3, 20_000)
    assert fluctuation.p_value == pytest.approx(chi2.sf(pearson, 36))


def test_p_values_of_excess_are_uniform_in_strata_that_mix_distributions_and_follow_the_past() -> (
    None
):
    """The stratum is the token two positions earlier in a chain of order one.

    So it is known before, and dependent.
    """
    p = transitions(2, contexts=4)
    p_values = []
    for seed in range(400):
        rng = np.random.default_rng(seed)
        texts = np.zeros((300, 12), int)
        for position in range(1, 12):
            texts[:, position] = sampled(p, texts[:, position - 1], rng)
        strata, contexts, tokens = (texts[:, start : start + 10].ravel() for start in range(3))
        p_values.append(Excess.of(p, contexts, tokens, strata, 4).fluctuation().p_value)
    assert kolmogorov_smirnov(np.array(p_values)) > 1e-3


def test_a_deviation_of_the_smallest_size_is_seen_nine_times_in_ten() -> None:
    p = transitions(3)
    tokens = 20_000
    alpha = 1e-3
    size = smallest_deviation(tokens, 36, alpha=alpha)
    rng = np.random.default_rng(4)
    tilt = rng.normal(size=p.shape)
    tilt -= (p * tilt).sum(axis=1, keepdims=True)
    tilt /= math.sqrt((p * tilt**2).sum() / len(p))
    seen = [
        counted(p, p * (1 + size * tilt), tokens, rng).fluctuation().p_value < alpha
        for _ in range(400)
    ]
    assert np.mean(seen) == pytest.approx(0.9, abs=0.05)
    unseen = [counted(p, p, tokens, rng).fluctuation().p_value < alpha for _ in range(400)]
    assert np.mean(unseen) < 0.01


def test_a_shift_along_a_score_of_the_smallest_size_is_seen_nine_times_in_ten() -> None:
    p = np.array([[0.5, 0.3, 0.2]])
    tokens = 5000
    rng = np.random.default_rng(5)
    distributions = np.broadcast_to(p, (tokens, 3))
    standard = -np.log(p[0]) - (p[0] * -np.log(p[0])).sum()
    standard /= math.sqrt((p[0] * standard**2).sum())
    moved = p[0] * (1 + smallest_shift(tokens, 3.0) * standard)
    seen = [surprisal(distributions, rng.choice(3, size=tokens, p=moved)).z > 3 for _ in range(400)]
    assert np.mean(seen) == pytest.approx(0.9, abs=0.05)


def test_a_token_without_probability_has_no_p_value_above_0() -> None:
    p = np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
    indices = np.array([0, 0, 1])
    certain = Excess.of(p, indices, np.array([0, 1, 1]), np.zeros(3, int), 1).fluctuation()
    assert (certain.impossible, certain.tokens) == (0, 2), "a certain token is not counted"
    wrong = Excess.of(p, indices, np.array([0, 1, 2]), np.zeros(3, int), 1).fluctuation()
    assert (wrong.p_value, wrong.impossible) == (0.0, 1)
