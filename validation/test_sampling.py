"""L6: sampled tokens of the shipped pair follow the target, at every index of a round.

``p`` comes from transformers, teacher-forced, with its warpers. The control is plain sampling under
the same statistics: if rounding could fail them, it would fail there first.
"""

from __future__ import annotations

import functools
import json

import jax
import pytest

from eagle3_jax import load_drafter, load_target
from eagle3_jax.files.sources import bundled
from validation import sampled
from validation.emissions import Reference, Warpers
from validation.runs import Check
from validation.sampled import METHODS, MOST_Z, K, Sample, decoder_of, judge
from validation.statistics import smallest_shift

pytestmark = pytest.mark.level("L6")

# Rows and tokens each. Truncation sorts the vocabulary, which costs most of a round on a CPU, so
# fewer rows have it.
BATCHES = (
    ((Warpers(0.7), Warpers(1.0), Warpers(1.5)), 20, 180),
    ((Warpers(0.7, top_p=0.9), Warpers(1.0, top_k=50), Warpers(1.5, top_k=50, top_p=0.9)), 8, 110),
)


@functools.cache
def sample(method: str) -> Sample:
    target = load_target()
    decoder = decoder_of(method, target, load_drafter(target=target))
    texts = [
        json.loads(line)["prompt"] for line in bundled("prompts.jsonl").read_text().splitlines()
    ]
    return sampled.sample(
        decoder, [decoder.target.encode(text) for text in texts], Reference(), batches=BATCHES
    )


@pytest.mark.parametrize("method", METHODS)
def test_sampled_tokens_follow_the_targets_distribution_with(check: Check, method: str) -> None:
    method_sample = sample(method)
    judged = judge(method_sample)
    check.table(f"{method}: tokens that should follow p", judged.columns, judged.rows)
    check.number(
        tokens=len(method_sample.index),
        left_out_at_an_edge=method_sample.left_out,
        largest_z=max(map(abs, judged.scores)),
        smallest_p=min(judged.p_values),
        **{
            f"τ at {name}": round(value, 3)
            for name, value in method_sample.acceptance_length.items()
        },
    )

    check.sees = (
        "probabilities that deviate in the direction of a tested score, by"
        f" {100 * smallest_shift(max(judged.judged), MOST_Z):.1f} % rms over all tokens, by"
        f" {100 * smallest_shift(min(judged.judged), MOST_Z):.0f} % in the smallest stratum; not"
        " what leaves every score unchanged"
    )
    assert not judged.wrong, f"{method}: {'; '.join(judged.wrong)}"


@pytest.mark.not_quick  # it samples with two more methods
def test_sampled_drafts_are_accepted_more_often_than_the_likeliest(check: Check) -> None:
    """At a high temperature: ``Σ min(p, q)`` is more than ``p`` of one token."""
    sampled, likeliest = (
        sample(name).acceptance_length
        for name in (f"a chain of {K} sampled tokens", f"a chain of {K} likeliest tokens")
    )
    check.table(
        f"Mean acceptance length τ of a chain of {K}",
        ["setting", "likeliest", "sampled"],
        [[name, round(likeliest[name], 3), round(sampled[name], 3)] for name in likeliest],
    )
    for name in ("T=1", "T=1.5"):
        assert sampled[name] > likeliest[name]


@pytest.fixture(scope="module", autouse=True)
def _forget_samples():
    yield
    sample.cache_clear()
    jax.clear_caches()
