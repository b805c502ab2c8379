"""The distribution of one draw at the sizes of real vocabularies, found without statistics.

A draw is a step function of each of its uniforms, and a uniform is one of 2^24 values. Bisection
finds every step through the library's own ``draw``, and the widths of the steps are the
distribution of that code.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from uniforms import OPTIMISED, VALUES

from eagle3_jax.checks import per_row
from eagle3_jax.drafters.grow import DraftInputs, Level, sample_chain
from eagle3_jax.sampling import draw, num_digits, probabilities, row_keys, uniforms
from eagle3_jax.topology import Chain
from eagle3_jax.types import SamplingMode, SamplingParams

pytestmark = pytest.mark.core

TOLERANCE = 1e-5


def distribution_of_draw(p: np.ndarray) -> np.ndarray:
    """Returns ``[V]`` in float64: the probability of each token for uniforms that are uniform.

    Every uniform takes all its values equally often.
    """
    digits = num_digits(p.size)
    # Compiled here and now: a program of an earlier call would not know what has changed since.
    draws = jax.jit(
        lambda p, uniforms: jax.vmap(draw, in_axes=(None, 0))(p, uniforms),
        compiler_options=OPTIMISED,
    )

    mass = np.array([1.0])
    # For every prefix of digits the numerators that lead there.
    reached = np.zeros((1, 0), int)
    for digit in range(digits):
        below = 64 ** (digits - digit - 1)
        prefixes = np.flatnonzero(mass)
        # The digits that may follow, as numbers.
        first = prefixes[:, None] * 64 + np.arange(64)

        # Bisection for steps[i, j]: how many values of the uniform lead from prefix i to a digit
        # of at most j.
        low = np.zeros(first.shape, int)
        high = np.full(first.shape, VALUES)
        while (low < high).any():
            middle = (low + high) // 2
            tried = np.full((*first.shape, digits), VALUES // 2)
            tried[:, :, :digit] = reached[prefixes][:, None]
            tried[:, :, digit] = np.minimum(middle, VALUES - 1)
            tokens = draws(p, jnp.asarray(tried.reshape(-1, digits) / VALUES, jnp.float32))
            inside = (np.asarray(tokens) // below).reshape(first.shape) <= first
            inside &= middle < VALUES
            low = np.where(inside & (low < high), middle + 1, low)
            high = np.where(inside, high, np.minimum(high, middle))
        assert (low[:, -1] == VALUES).all(), "a uniform leads out of the vocabulary"

        steps = np.concatenate([np.zeros_like(low[:, :1]), low], axis=1)
        middles = (steps[:, 1:] + steps[:, :-1]) // 2

        longer = np.zeros(len(mass) * 64)
        through = np.zeros((len(mass) * 64, digit + 1), int)
        longer[first] = mass[prefixes][:, None] * np.diff(steps, axis=1) / VALUES
        through[first, :digit] = reached[prefixes][:, None]
        through[first, digit] = middles
        mass = longer
        reached = through

    assert not mass[p.size :].any()
    return mass[: p.size]


def distributions(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    normal = rng.normal(size=size) * 2
    softmax = np.exp(normal - normal.max())
    return {
        "Zipf": 1 / np.arange(1, size + 1),
        "Zipf, shuffled": rng.permutation(1 / np.arange(1, size + 1)),
        "uniform": np.ones(size),
        "softmax of normals": softmax,
        "top-k 50 of normals": np.where(normal >= np.sort(normal)[-min(50, size)], softmax, 0.0),
        "nearly certain": np.where(np.arange(size) == size // 2, 1.0, 1e-7),
    }


def check_distribution_of_draw(name: str, size: int) -> float:
    """Returns the total variation distance of one draw from ``p``."""
    weights = distributions(size)[name]
    p = (weights / weights.sum()).astype(np.float32)
    sampled = distribution_of_draw(p)
    exact = p.astype(np.float64) / p.astype(np.float64).sum()

    assert sampled.sum() == pytest.approx(1.0, abs=1e-12)
    assert not sampled[p == 0].any(), "a token without mass can be sampled"
    # Float32 sums and 24 bits end where a token has less than 2^-22 of the mass of its 64
    # neighbours.
    reachable = p > 0 if name != "nearly certain" else p > 2.0**-22
    assert (sampled[reachable] > 0).all(), (
        f"{int((sampled[reachable] == 0).sum())} tokens can never be sampled"
    )

    distance = float(np.abs(sampled - exact).sum() / 2)
    assert distance < TOLERANCE, f"{name}, {size} tokens: total variation {distance:.2g}"
    return distance


@pytest.mark.parametrize("size", [65, 64, 4096, 32_000])
@pytest.mark.parametrize("name", distributions(7))
def test_one_draw_follows_the_distribution_it_is_given(name: str, size: int) -> None:
    check_distribution_of_draw(name, size)


@pytest.mark.parametrize("name", ["Zipf", "softmax of normals", "top-k 50 of normals"])
def test_one_draw_follows_the_distribution_at_the_vocabulary_of_llama_3(name: str) -> None:
    check_distribution_of_draw(name, 128_256)


def test_the_bisection_finds_the_distribution_that_counting_every_uniform_finds() -> None:
    p = np.array([0.5, 0.0, 0.2, 1e-7, 0.3], np.float32)
    every = jnp.arange(VALUES, dtype=jnp.float32)[:, None] / VALUES
    rows = jnp.broadcast_to(p, (VALUES, 5))
    tokens = np.asarray(draw(rows, every))
    shares = np.bincount(tokens, minlength=5) / VALUES
    assert np.array_equal(shares, distribution_of_draw(p))


def test_uniforms_take_all_values_of_24_bits_below_one() -> None:
    values = np.asarray(uniforms(row_keys(0, 64), 4096)).ravel()
    numerators = values.astype(np.float64) * VALUES
    assert values.max() < 1
    assert np.array_equal(numerators, np.round(numerators))
    assert (numerators % 2 == 1).mean() == pytest.approx(0.5, abs=0.01), "the last bit is never set"
    counts = np.bincount((values * 256).astype(int), minlength=256)
    chi2 = ((counts - values.size / 256) ** 2 / (values.size / 256)).sum()
    assert chi2 < 400  # 255 degrees of freedom: p = 1e-8


def test_a_sampled_chain_is_sampled_from_the_distribution_that_it_declares() -> None:
    """The chain is recomputed from the distribution that it declares and the keys of its rows.

    Its vocabulary has three digits.
    """
    batch = 256
    size = 5000
    temperature = 0.7
    logits = np.random.default_rng(0).normal(size=size).astype(np.float32) * 2

    level = Level(logits=jnp.broadcast_to(logits, (batch, 1, size)), carry=None, memory=None)
    inputs = DraftInputs(
        root=jnp.zeros(batch, jnp.int32),
        first=level,
        run=lambda *_: level,
        draft_to_target=jnp.arange(size, dtype=jnp.int32),
        vocab_size=size,
        keys=row_keys(5, batch),
        sampling=per_row(SamplingParams(temperature=temperature), batch),
    )

    draft, _ = sample_chain(Chain(1), inputs)
    q = draft.probs[:, 1]
    assert np.array_equal(
        draw(q, uniforms(row_keys(5, batch), num_digits(size))), draft.tokens[:, 1]
    )

    exact = np.exp(logits.astype(np.float64) / temperature)
    assert np.abs(q[0] - exact / exact.sum()).sum() / 2 < TOLERANCE


@pytest.mark.parametrize("temperature", [0.5, 1e-30, 2e-38, 1.0])
@pytest.mark.parametrize("best", [3e38, 1e30, -1e30, np.inf])
def test_no_logit_and_no_temperature_gives_a_distribution_that_is_none(
    temperature: float, best: float
) -> None:
    logits = jnp.asarray([[[best, best, -3e38, -np.inf]]], jnp.float32)
    for top_k, top_p, sampling_mode in (
        (0, 1.0, SamplingMode.TEMPERATURE),
        (2, 0.99, SamplingMode.TRUNCATED),
    ):
        sampling = tiny.sampling_of([(temperature, top_k, top_p)])
        assert probabilities(logits, sampling, sampling_mode)[0, 0].tolist() == [0.5, 0.5, 0.0, 0.0]
