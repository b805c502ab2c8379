"""L2: whole sequences from the compiled loop follow the exact law of a tiny target.

The law is enumerated from plain forwards over every prefix. Seeds are fixed and nothing is tried twice; an exact loop
fails an assertion once in a million.
"""

from __future__ import annotations

import math
from collections import Counter

import jax
import pytest
import test_sampling_law as law
import tiny

from eagle3_jax import loop as loops
from eagle3_jax.contract.frequencies import smallest_deviation
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import Plain
from eagle3_jax.sampling import DraftSampling, Warping, row_keys
from eagle3_jax.tree import Chain, DynamicTree
from validation.checks import Check
from validation.emissions import Warpers, sampling_of
from validation.statistics import goodness_of_fit

pytestmark = pytest.mark.level("L2")

ALPHA = 1e-6
ROWS, RUNS = 512, 8
PREFIX = 3  # tokens, for a certificate on fewer cells than whole sequences have
SETTINGS = tuple(
    Warpers(temperature, top_k, top_p)
    for temperature in (0.5, 1.0, 1.5)
    for top_k, top_p in ((0, 1.0), (2, 1.0), (0, 0.8), (3, 0.9))
)
PROBABILISTIC = DraftSampling.PROBABILISTIC
DRAFTERS = {
    "plain sampling, the control": lambda: LoadedDrafter(Plain()),
    "a chain of 1 likeliest token": lambda: tiny.eagle3(law.TARGET, Chain(1)),
    "a chain of 3 likeliest tokens": lambda: tiny.eagle3(law.TARGET, Chain(3)),
    "a chain of 1 drawn token": lambda: tiny.eagle3(law.TARGET, Chain(1), draft_sampling=PROBABILISTIC),
    "a chain of 3 drawn tokens": lambda: tiny.eagle3(
        law.TARGET, Chain(3), seed=2, draft_vocab_size=3, draft_sampling=PROBABILISTIC
    ),
    "a chain of 5 drawn tokens": lambda: tiny.eagle3(law.TARGET, Chain(5), draft_sampling=PROBABILISTIC),
    "a dynamic tree": lambda: tiny.eagle3(law.TARGET, DynamicTree(num_nodes=7, max_depth=3, top_k=2)),
    "a static tree": lambda: tiny.eagle3(law.TARGET, tiny.STATIC_TREE, draft_vocab_size=3),
    "a tree of drawn siblings": law.DRAFTERS["a sampled tree"],
}


def sequences(drafter: LoadedDrafter) -> dict[Warpers, Counter]:
    """How often each sequence was written under each setting; all settings share one ragged batch."""
    owners = [index for index in range(len(SETTINGS)) for _ in range(ROWS)]
    rows = [law.PROMPTS[index % len(law.PROMPTS)] for index in owners]
    batch = tiny.prompts(rows, limit=law.HORIZON, sampling=sampling_of([SETTINGS[index] for index in owners]))
    loop, params = tiny.bind(law.TARGET, drafter, warping=Warping.TRUNCATED)
    capacity = max(map(len, law.PROMPTS)) + law.HORIZON + loop.drafter.num_nodes
    counts: dict[Warpers, Counter] = {setting: Counter() for setting in SETTINGS}
    for run in range(RUNS):
        fresh = batch.replace(keys=row_keys(run, len(rows)))
        outcome = jax.device_get(loops.generate(loop, params, fresh, capacity=capacity))
        for index, tokens in zip(owners, tiny.outputs(outcome, batch), strict=True):
            counts[SETTINGS[index]][tuple(tokens)] += 1
    return counts


@pytest.mark.parametrize("name", DRAFTERS)
def test_sequences_follow_the_exact_law_with(check: Check, name: str) -> None:
    rows, wrong, sees = [], [], []
    for index, (setting, counts) in enumerate(sequences(DRAFTERS[name]()).items()):
        prompt = law.PROMPTS[index % len(law.PROMPTS)]
        exact = law.exact_law((setting.temperature, setting.top_k, setting.top_p), prompt, ())
        fit = goodness_of_fit(counts, exact)
        sees.append(smallest_deviation(fit.draws, fit.degrees, alpha=ALPHA))
        start = goodness_of_fit(_starts(counts), {x: math.fsum(m) for x, m in _masses(exact).items()})
        rows.append(
            [str(setting), fit.draws, fit.cells, float(f"{fit.chi_square:.2g}"), float(f"{fit.g_test:.2g}")]
            + [
                round(value, 4)
                for value in (fit.distance, fit.certificate(ALPHA), start.distance, start.certificate(ALPHA))
            ]
        )
        if not min(fit.chi_square, fit.g_test) > ALPHA:
            seen = f", {len(fit.impossible)} sequences that the target cannot write" if fit.impossible else ""
            wrong.append(f"{setting}: chi-square p {fit.chi_square:.2g}, G p {fit.g_test:.2g}{seen}")
    check.table(
        f"{name}: sequences of {law.HORIZON} tokens, and their first {PREFIX}; total variation distance as seen (TV), "
        "and what the true one stays below with probability 1 - 1e-6",
        ["setting", "sequences", "cells", "chi-square p", "G p", "TV", "below", f"TV of {PREFIX}", "below"],
        rows,
    )
    check.number(
        sequences=sum(row[1] for row in rows),
        smallest_p=min(min(row[3:5]) for row in rows),
        largest_certificate=max(row[8] for row in rows),
    )
    least, most = min(sees), max(sees)
    check.sees = (
        f"{100 * least:.0f} to {100 * most:.0f} % rms of the probabilities of whole sequences, by setting; "
        "smaller deviations are for the law of long texts"
    )
    assert not wrong, f"{name}: {'; '.join(wrong)}"


def _starts(counts: Counter) -> Counter:
    found: Counter = Counter()
    for sequence, count in counts.items():
        found[sequence[:PREFIX]] += count
    return found


def _masses(exact: dict[tuple[int, ...], float]) -> dict[tuple[int, ...], list[float]]:
    found: dict[tuple[int, ...], list[float]] = {}
    for sequence, mass in exact.items():
        found.setdefault(sequence[:PREFIX], []).append(float(mass))
    return found
