"""The statistics of certificates: distributions from reports, false alarms, and injected errors."""

from __future__ import annotations

import itertools
import math
import types

import jax.numpy as jnp
import numpy as np
import pytest
from faulty_sampler import CORRECT, FAULTS, NUM_PROMPTS, Fault, FaultySampler, draw
from scipy import stats

from eagle3_jax.acceptance import verify
from eagle3_jax.certify.bets import (
    ERRORS,
    VERIFIED,
    bet_on_one_token,
    dirichlet_gain,
    smallest_error,
)
from eagle3_jax.certify.statistics import Draws, Sampling, Test, judge, number_texts, resolution
from eagle3_jax.measure.frequencies import ALPHA, fit_counts
from eagle3_jax.types import Draft

LEVEL = ALPHA / 20
REPORTED = np.log([[0.4, 0.3, 0.2]])  # two more tokens have 0.06 and 0.04
UNKNOWN = math.nan
# Probabilities of the three reported tokens and of all others; only proportions are known where the
# others are not.
KNOWN: dict[str, tuple[Sampling, list[float]]] = {
    "the others are one cell": (Sampling(), [0.4, 0.3, 0.2, 0.1]),
    "another temperature": (Sampling(temperature=0.5), [16 / 29, 9 / 29, 4 / 29, UNKNOWN]),
    "top-k of reported tokens": (
        Sampling(temperature=2.0, top_k=2),
        [2 / (2 + 3**0.5), 3**0.5 / (2 + 3**0.5), 0, 0],
    ),
    "top-k of more tokens": (Sampling(top_k=10), [4 / 9, 3 / 9, 2 / 9, UNKNOWN]),
    "a nucleus of reported tokens": (Sampling(top_p=0.6), [4 / 7, 3 / 7, 0, 0]),
    "a nucleus that ends among the others": (Sampling(top_p=0.95), [4 / 9, 3 / 9, 2 / 9, UNKNOWN]),
    "min-p that excludes a reported token": (Sampling(min_p=0.6), [4 / 7, 3 / 7, 0, 0]),
    "min-p that may keep others": (Sampling(min_p=0.1), [4 / 9, 3 / 9, 2 / 9, UNKNOWN]),
}


@pytest.mark.parametrize("name", KNOWN)
def test_the_distribution_is_known_from_the_reported_tokens(name: str) -> None:
    sampling, expected = KNOWN[name]
    probs, determined = sampling.distributions(REPORTED)
    np.testing.assert_allclose(probs, [expected])
    assert determined.all()


def test_a_nucleus_whose_end_rounding_decides_is_undetermined() -> None:
    assert not Sampling(top_p=0.7).distributions(REPORTED)[1].any()


def test_excluded_tokens_leave_nothing_for_those_that_are_not_reported() -> None:
    probs, _ = Sampling(processed=True).distributions(np.array([[-0.5, -1.5, -9999.0]]))
    assert probs[0, -1] == 0


def test_no_tokens_give_no_tests() -> None:
    draws = FaultySampler().draws(4, 4)
    assert judge(draws[draws.index > 99]) == []


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
    with pytest.raises(
        ValueError, match=r"expected a temperature above 0|do not show where the nucleus ends"
    ):
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
    assert dirichlet_gain(np.array([[2, 1]]), distribution[None], scale) == pytest.approx(expected)


def test_texts_are_numbered_by_prompt_and_tokens() -> None:
    assert number_texts([0, 0, 1], [[5, 6], [5, 7], [5]]) == [[0, 1], [0, 1], [2]]
    assert number_texts([0], [list(range(9))]) == [[0, 1, 2, 3, 4, 5, 6, -1, -1]]


def judged(draws: Draws, seed: int = 0) -> list[Test]:
    return judge(draws[draws.index > 0], seed=seed)


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


@pytest.mark.parametrize("texts", [[-1, -1], [0, 0]], ids=["each text once", "the same text twice"])
def test_a_bet_on_one_token_gains_nothing_on_average_from_a_correct_sampler(
    texts: list[int],
) -> None:
    p = np.array([0.5, 0.3, 0.2])
    average = 0.0
    for cells in itertools.product(range(3), repeat=2):
        bet = bet_on_one_token(np.tile(p, (2, 1)), np.array(cells), np.array(texts))
        average += p[list(cells)].prod() * math.exp(bet.log_gain)
    assert average == pytest.approx(1)


@pytest.mark.parametrize("fault", [CORRECT, Fault(likeliest=True)], ids=["sampled", "likeliest"])
def test_a_correct_round_is_the_acceptance_rule_of_the_library(fault: Fault) -> None:
    """The same random numbers accept the same drafts and sample the same token behind them."""
    sampler = FaultySampler(fault)
    rows = 512
    prompts = np.arange(rows) % NUM_PROMPTS
    rng = np.random.default_rng(0)
    last = rng.integers(64, size=rows)
    draft, accept = rng.random((2, 3, rows))
    choose = rng.random(rows)

    # A round takes these for each position; a correct sampler reads nothing from the zeros.
    of_positions = zip(draft, accept, [choose] * 3, np.zeros((3, rows)), strict=True)
    numbers = itertools.chain(*of_positions, [choose])
    emitted, counts = sampler._round(
        prompts, last, types.SimpleNamespace(random=lambda size: next(numbers))
    )

    tokens = [last]
    q = [np.zeros((rows, 64))]
    for uniform in draft:
        q.append(sampler.draft[prompts, tokens[-1]])
        tokens.append(draw(sampler.draft_source[prompts, tokens[-1]], uniform))
    p = np.stack([sampler.target[prompts, token] for token in tokens], axis=1)
    chain = Draft(
        tokens=jnp.asarray(np.stack(tokens, axis=1)),
        parents=jnp.tile(jnp.arange(-1, 3), (rows, 1)),
        valid=jnp.ones((rows, 4), bool),
        probs=jnp.asarray(np.stack(q, axis=1)),
    )
    verdict = verify(
        chain,
        jnp.asarray(p),
        accept=jnp.asarray(np.vstack([choose, accept]).T),  # the root's is not read
        choose=jnp.asarray(choose[:, None]),
        max_depth=3,
    )
    assert np.array_equal(counts - 1, verdict.num_accepted)
    assert np.array_equal(emitted[np.arange(rows), counts - 1], verdict.next_token)


@pytest.mark.parametrize(
    "name", ["one random number to accept and to redraw", "likeliest draft, 20 % too willing"]
)
def test_the_exact_distribution_of_a_fault_is_that_of_its_tokens(name: str) -> None:
    """A total variation distance of 0.02 would be found."""
    sampler = FaultySampler(FAULTS[name])
    count = 100_000
    prompts = np.zeros(count, int)
    last = np.full(count, 5)
    emitted, _ = sampler._round(prompts, last, np.random.default_rng(0))
    expected = sampler.emitted(prompts[:1], last[:1], last[:1], 0)[0]
    fit = fit_counts(np.bincount(emitted[:, 0], minlength=64), count * expected)
    assert fit.p_value > 1e-4, fit.reason


def test_the_fewest_tokens_of_an_error_are_those_of_a_coin() -> None:
    """The draft has 1/2 and comes with 0.55: (6.4 σ / shift)² = (6.4 · 0.5 / 0.05)² tokens."""
    sampler = FaultySampler(
        Fault(likeliest=True, willing=1.1), vocab_size=2, num_speculative_tokens=40
    )
    sampler.target[:] = 0.5
    assert sampler.fewest_tokens() == pytest.approx((6.4 * 0.5 / 0.05) ** 2, rel=0.05)


@pytest.mark.parametrize(
    ("name", "requests"),
    [
        ("greedy drafts judged as if sampled", 64),
        ("typical acceptance", 256),
        ("drafts sampled at T 0.7 and declared at 1", 512),
        ("nucleus applied to the redraw, not to acceptance", 64),
        ("every draft accepted", 1024),
        ("redrawn from p, not from the residual", 4096),
        ("likeliest draft, every one accepted", 64),
    ],
)
def test_an_injected_error_is_found(name: str, requests: int) -> None:
    fault = FAULTS[name]
    right = FaultySampler(sampling=fault.sampling).draws(requests, 4, seed=3)
    wrong = FaultySampler(fault).draws(requests, 4, seed=3)
    assert min(test.p_value for test in judged(right)) > LEVEL
    assert min(test.p_value for test in judged(wrong)) < LEVEL


@pytest.mark.parametrize(
    "error", ["20 % too willing", "redrawn from p", "residual mixed with 30 % of p"]
)
def test_an_error_with_the_likeliest_draft_is_found_with_four_times_the_fewest_tokens(
    error: str,
) -> None:
    sampler = FaultySampler(FAULTS[f"likeliest draft, {error}"])
    requests = round(4 * sampler.fewest_tokens() / 3)
    assert min(test.p_value for test in judged(sampler.draws(requests, 4, seed=3))) < LEVEL


def test_the_named_error_would_have_been_found() -> None:
    """In 9 of 10 runs of as many tokens, with the likeliest draft at four of five positions."""
    rng = np.random.default_rng(0)
    number = 6000
    p = rng.dirichlet(np.ones(6), number)
    p = -np.sort(-p, axis=1)
    error = smallest_error(p, [entry for entry in ERRORS if entry.willing > 1], level=LEVEL)
    assert error is not None

    num_found = 0
    for _ in range(20):
        is_drafted = rng.random(number) < VERIFIED
        mass = np.where(is_drafted, error.mass(p[:, 0]), p[:, 0])
        others = p[:, 1:] / p[:, 1:].sum(axis=1, keepdims=True)
        behind = 1 + (rng.random(number)[:, None] > others.cumsum(axis=1)).sum(axis=1)
        cells = np.where(rng.random(number) < mass, 0, np.minimum(behind, 5))
        unreported = np.zeros((number, 1))
        bet = bet_on_one_token(np.hstack([p, unreported]), cells, np.full(number, -1))
        num_found += bet.p_value < LEVEL
    assert num_found >= 16  # 18 are expected; fewer than 16 have a probability of 4 %


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.round(np.linspace(-7, -0.1, 500), 2), 0.01),
        (np.linspace(-7, -0.1, 500), 0.0),
        (np.linspace(-7, -0.1, 5), 0.0),
    ],
    ids=["two decimals", "no grid", "too few to tell"],
)
def test_a_grid_of_reports_is_recognised(values: np.ndarray, expected: float) -> None:
    assert resolution(values) == expected


def p_values_of(p: np.ndarray, tokens: np.ndarray, **columns: np.ndarray) -> dict[str, float]:
    """Judges tokens that are all sampled from ``p``."""
    number = len(tokens)
    zeros = np.zeros(number, int)
    ids = np.tile(np.arange(len(p) - 1), (number, 1))
    draws = Draws(np.tile(p, (number, 1)), ids, tokens, prompts=zeros, chunk_index=zeros, **columns)
    return {test.name: test.p_value for test in judge(draws)}


def test_reused_random_numbers_are_found_in_pairs() -> None:
    """Each place is uniform, but consecutive ones are equal."""
    rng = np.random.default_rng(0)
    number = np.repeat(rng.random(4000), 2)
    p_values = p_values_of(
        np.full(4, 0.25),
        (number[:, None] > np.cumsum([0.25, 0.25, 0.25])).sum(axis=1),
        requests=np.repeat(np.arange(4000), 2),
        index=np.tile([1, 2], 4000),
        texts=np.full(8000, -1),
    )
    assert p_values["pairs of places"] < LEVEL
    assert p_values["places in the distribution"] > 1e-4


def test_a_bias_that_cancels_over_ranks_is_found_behind_the_same_text() -> None:
    """Half of the texts prefer the likeliest token, half avoid it; places look uniform."""
    rng = np.random.default_rng(0)
    number = 20_000
    text = rng.integers(0, 2, number)
    p_values = p_values_of(
        np.array([0.5, 0.5, 0.0]),
        (rng.random(number) > np.where(text, 0.55, 0.45)).astype(int),
        requests=np.arange(number),
        index=np.ones(number, int),
        texts=text,
    )
    assert p_values["counts behind the same text"] < LEVEL
    assert p_values["places in the distribution"] > 1e-4
