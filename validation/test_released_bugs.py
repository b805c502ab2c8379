"""L6: bugs that released packages have, under their names. Each check passes here, and fails with the bug planted."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sampling_law
import tiny
from mutants import planted
from planted_bugs import WARPED

from eagle3_jax import DraftSampling, SamplingParams, SpeculativeDecoder, probabilities
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import _grow
from eagle3_jax.tree import Chain, DynamicTree
from validation.checks import Check

pytestmark = pytest.mark.level("L6")

TARGET = tiny.target(13)
SAMPLED = DraftSampling.PROBABILISTIC
DRAFTERS = {
    "a chain of likeliest tokens": lambda: tiny.eagle3(TARGET, Chain(3)),
    "a chain of drawn tokens": lambda: tiny.eagle3(TARGET, Chain(3), draft_vocab_size=9, draft_sampling=SAMPLED),
    "a dynamic tree": lambda: tiny.eagle3(TARGET, DynamicTree(num_nodes=9, max_depth=3, top_k=3)),
    "a tree of drawn siblings": lambda: LoadedDrafter(
        tiny.Sampled((-1, 0, 0, 1, 1, 2)), jnp.array(np.random.default_rng(0).dirichlet(np.ones(13), 13), jnp.float32)
    ),
}


def caught(check: Check, *bug: object, by: Callable[[], None]) -> None:
    """Plant a bug and see the check fail."""
    with planted(*bug), pytest.raises(AssertionError):  # type: ignore[arg-type]
        by()
    check.number(planted_bug="caught")


def check_greedy_rows(name: str) -> None:
    """Greedy rows write the same tokens with sampled neighbours, of any warper, as among themselves."""
    prompts = tiny.random_prompts(12, 13, seed=4, low=2)
    greedy = np.arange(12) % 3 == 0
    decoder = SpeculativeDecoder(TARGET, DRAFTERS[name]())
    mixed = SamplingParams(
        temperature=np.where(greedy, 0.0, np.linspace(0.5, 2.0, 12)).astype(np.float32),
        top_k=np.array([0, 0, 3] * 4, np.int32),
        top_p=np.array([1.0, 0.8, 1.0, 0.9] * 3, np.float32),
    )
    together = decoder.generate(prompts, max_new_tokens=16, sampling=mixed).tokens
    rows = np.flatnonzero(greedy)
    alone = decoder.generate([prompts[row] for row in rows], max_new_tokens=16).tokens
    differing = sum(together[row] != tokens for row, tokens in zip(rows, alone, strict=True))
    assert differing == 0, f"{name}: {differing} greedy rows differ beside sampled ones"


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_greedy_row_beside_a_sampled_row_stays_greedy(check: Check, name: str) -> None:
    """tpu-inference 0.32.0: the verifier of a mixed batch scores greedy rows with ``softmax(-logits)``."""
    check_greedy_rows(name)
    caught(
        check,
        probabilities,
        "jnp.where(temperature > 0, jax.nn.softmax(scaled, axis=-1), greedy)",
        "jax.nn.softmax(jnp.where(temperature > 0, scaled, -logits), axis=-1)",
        by=lambda: check_greedy_rows(name),
    )


def test_temperature_is_applied_before_top_p(check: Check) -> None:
    """tpu-inference 0.32.0: its rejection sampler truncates first and scales after, its plain sampler the reverse."""
    logits = jnp.array(np.random.default_rng(2).normal(size=(1, 1, 8)) * 2, jnp.float32)
    bug = (
        probabilities,
        WARPED,
        "scaled = _truncate(logits, jnp.asarray(sampling.top_k), jnp.asarray(sampling.top_p))"
        " / jnp.where(temperature > 0, temperature, 1.0)",
    )
    for temperature, top_p in ((2.0, 0.8), (0.5, 0.8), (0.5, 0.95)):
        one = SamplingParams(
            temperature=jnp.full(1, temperature), top_k=jnp.zeros(1, jnp.int32), top_p=jnp.full(1, top_p)
        )
        ours = probabilities(logits, one)
        with planted(*bug):
            theirs = probabilities(logits, one)
        distance = float(jnp.abs(ours - theirs).sum() / 2)
        check.number(**{f"distance_of_the_orders_at_T={temperature:g}_top_p={top_p:g}": round(distance, 3)})
    by = lambda: test_sampling_law.check_sampling_law("an EAGLE-3 chain of 1", runs=3)
    by()
    caught(check, *bug, by=by)


def test_an_argmax_draft_is_a_point_mass(check: Check) -> None:
    """keras-hub 0.32.0: the draft is the argmax, and its softmax probability stands in for ``q``."""
    drafter = tiny.eagle3(TARGET, Chain(3)).drafter
    assert drafter.draft_sampling is DraftSampling.GREEDY
    for name in ("an EAGLE-3 chain of 3", "a sampled EAGLE-3 chain"):
        test_sampling_law.check_sampling_law(name, runs=3)
    caught(
        check,
        _grow.draw_chain,
        "jnp.where(greedy, argmax",
        "jnp.where(True, argmax",
        by=lambda: test_sampling_law.check_sampling_law("a sampled EAGLE-3 chain", runs=3),
    )


@pytest.fixture(autouse=True)
def _forget():
    yield
    jax.clear_caches()
