"""Level 2: whole sequences from the compiled loop follow the distribution of the target alone.

The exact autoregressive distribution comes from running the target on every prefix. Pearson's
chi-square compares it with what the loop wrote, at a significance of one in a million per assertion
and with fixed seeds, so a failure is a bug. One batch mixes greedy and sampled rows, all warpers,
and prompts of different lengths. So few sequences show only what moves their probabilities by a
tenth or more; ``test_long_distribution`` sees smaller bugs.
"""

from __future__ import annotations

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from sampled_texts import ALPHA, DRAFTERS, HORIZON, TARGET, chi_square, logits_after
from test_long_distribution import check_long_distribution

from eagle3_jax import loop as loops
from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.sampling import probabilities, row_keys
from eagle3_jax.types import SamplingMode, SamplingParams

pytestmark = pytest.mark.core

ROWS_PER_SETTING = 512
PROMPTS = ([2], [1, 3, 0], [0, 0, 2, 1, 3])
SETTINGS = (  # temperature, top-k, top-p
    (0.5, 0, 1.0),
    (1.0, 0, 1.0),
    (1.5, 0, 1.0),
    (0.0, 0, 1.0),
    (2.0, 0, 0.8),
    (0.5, 0, 0.8),
    (1.3, 3, 0.75),
    (0.8, 2, 1.0),
)


def exact_distribution(
    setting: tuple[float, int, float], prompt: list[int], stops: tuple[int, ...]
) -> oracle.TextDistribution:
    known = logits_after(tuple(prompt))
    return oracle.autoregressive_distribution(
        lambda prefix: oracle.warped(known[prefix], *setting), HORIZON, stops
    )


def check_sampling_distribution(name: str, *, runs: int, stops: tuple[int, ...] = ()) -> None:
    owners = [setting for setting in SETTINGS for _ in range(ROWS_PER_SETTING)]
    rows = [PROMPTS[SETTINGS.index(setting) % len(PROMPTS)] for setting in owners]
    batch = tiny.prompts(rows, limit=HORIZON, sampling=tiny.sampling_of(owners), stop_tokens=stops)

    loop, params = tiny.bind(TARGET, DRAFTERS[name](), sampling_mode=SamplingMode.TRUNCATED)
    capacity = max(map(len, PROMPTS)) + HORIZON + loop.drafter.num_nodes

    counts = {setting: Counter() for setting in SETTINGS}
    for run in range(runs):
        fresh = batch.replace(keys=row_keys(run, len(rows)))
        outcome = jax.device_get(loops.generate(loop, params, fresh, capacity=capacity))
        for setting, tokens in zip(owners, tiny.outputs(outcome, batch), strict=True):
            counts[setting][tuple(tokens)] += 1

    for index, setting in enumerate(SETTINGS):
        p_value, report = chi_square(
            counts[setting], exact_distribution(setting, PROMPTS[index % len(PROMPTS)], stops)
        )
        assert p_value > ALPHA, f"{name}, temperature, top-k, top-p = {setting}: {report}"


@pytest.mark.parametrize("name", DRAFTERS)
def test_sequences_follow_the_target_distribution_with(name: str) -> None:
    check_sampling_distribution(name, runs=6 if "EAGLE" in name else 12)


def test_sequences_that_end_at_a_stop_token_follow_the_target_distribution() -> None:
    check_sampling_distribution("an EAGLE-3 dynamic tree", runs=10, stops=(3,))


@pytest.mark.parametrize("name", ["a chain of sampled tokens", "a static tree of sampled tokens"])
def test_tokens_of_long_texts_follow_their_distributions_with(name: str) -> None:
    """Draws that depend on each other: one run of those that a night repeats."""
    fluctuations = check_long_distribution(name, rows=2048, runs=1)
    assert fluctuations["all together"].sees(ALPHA) < 0.031


def test_rows_do_not_repeat_each_others_randomness() -> None:
    """Rows share no key, nor the first token and a later one: texts would repeat too often."""
    drafter = DRAFTERS["an EAGLE-3 chain of 3"]()
    rows = [list(PROMPTS[0])] * 2000
    batch = tiny.prompts(rows, limit=HORIZON, sampling=SamplingParams(temperature=1.5))
    loop, params = tiny.bind(TARGET, drafter, sampling_mode=SamplingMode.TEMPERATURE)
    outcome = loops.generate(loop, params, batch, capacity=16)
    outputs = [tuple(row) for row in tiny.outputs(outcome, batch)]
    distribution = exact_distribution((1.5, 0, 1.0), PROMPTS[0], ())
    pairs = Counter(zip(outputs[::2], outputs[1::2], strict=True))
    repeated = sum(count for (a, b), count in pairs.items() if a == b)
    chance = sum(weight**2 for weight in distribution.values()) * len(outputs) / 2
    assert repeated < chance + 6 * math.sqrt(chance) + 1


ALONE = {
    "top-k alone": (1.0, 2, 1.0),
    "top-p alone": (1.0, 0, 0.8),
    "top-k and top-p": (1.3, 3, 0.75),
}


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("top-k alone", "plain decoding"),
        ("top-p alone", "plain decoding"),
        ("top-k and top-p", "a sampled chain"),
    ],
)
def test_a_batch_that_truncates_in_one_way_only_follows_the_target_distribution(
    name: str, drafter: str
) -> None:
    """The decoder chooses the sampling mode from the batch; here every row truncates alike."""
    temperature, top_k, top_p = ALONE[name]
    decoder = SpeculativeDecoder(TARGET, DRAFTERS[drafter](), stop_tokens=())
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    rows = decoder.generate(
        [PROMPTS[1]] * 3000, max_new_tokens=HORIZON, sampling=sampling, seed=5
    ).tokens
    p_value, report = chi_square(
        Counter(map(tuple, rows)), exact_distribution(ALONE[name], PROMPTS[1], ())
    )
    assert p_value > ALPHA, f"{drafter}, {name}: {report}"


def test_top_p_keeps_no_token_behind_a_set_of_exactly_that_mass() -> None:
    """A set with exactly the mass of top-p is enough.

    Masses are equal powers of two, so every sum is exact.
    """
    size = 8
    counts = np.arange(1, size)
    rows = tiny.sampling_of([(1.0, 0, count / size) for count in counts])
    mass = np.asarray(probabilities(jnp.zeros((size - 1, 1, size)), rows))[:, 0]
    kept_tokens = [np.flatnonzero(row).tolist() for row in mass]
    assert kept_tokens == [list(range(count)) for count in counts]
