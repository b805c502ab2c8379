"""L0 and L1: the acceptance rule, enumerated in rational numbers and swept over given uniforms.

The checks are those of ``tests``, which run on every commit; here their numbers go into the report.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import test_exact_law
import test_thresholds
import test_verify
import tiny

from eagle3_jax import Chain, DraftSampling, SamplingParams
from eagle3_jax.sampling import draw, row_keys, uniforms
from eagle3_jax.types import Observation
from validation.checks import Check


@pytest.mark.level("L0")
def test_every_case_has_exactly_the_autoregressive_law(check: Check) -> None:
    rows = [[name, float(test_exact_law.check_exact_law(name))] for name in test_exact_law.CASES]
    check.table("Total variation distance from the target's law, in rational numbers", ["draft", "distance"], rows)
    check.number(cases=len(rows), largest_distance=max(distance for _, distance in rows))


@pytest.mark.level("L1")
def test_acceptance_and_correction_have_the_frequencies_of_the_rule(check: Check) -> None:
    laws = 8
    for seed in range(laws):
        test_verify.check_acceptance_frequency(seed)
        test_verify.check_residual_law(seed)
    check.number(pairs_of_laws=laws, uniforms_per_pair=test_verify.GRID, tolerance=1 / test_verify.GRID)


@pytest.mark.level("L1")
@pytest.mark.parametrize("name", test_thresholds.RULES)
def test_at_128256_tokens_every_threshold_is_that_of_the_formula_for(check: Check, name: str) -> None:
    found = test_thresholds.check_thresholds(name)
    check.number(thresholds=found["thresholds"], largest_deviation=max(found["accepting"], found["choosing"]))
    check.sees = f"{test_thresholds.TOLERANCE:g} of what is emitted, at 128,256 tokens"


@pytest.mark.level("L1")
def test_verdicts_on_random_trees_are_those_of_the_official_evaluation(check: Check) -> None:
    batches = 8
    for seed in range(batches):
        test_verify.check_greedy_verdicts(seed)
        test_verify.check_sampled_verdicts(seed)
    check.number(trees=64 * batches, differing=0)


@pytest.mark.level("L1")
def test_a_drawn_draft_is_drawn_from_the_very_distribution_that_it_declares(check: Check) -> None:
    """Recomputed from ``probs`` and the row's key alone: no rounding, warper or id map may lie between the two."""
    rows, depth = 2048, 3
    target = tiny.target(13)
    head = tiny.eagle3(target, Chain(depth), draft_vocab_size=7, draft_sampling=DraftSampling.PROBABILISTIC)
    rng = np.random.default_rng(0)
    seen = Observation(
        tokens=jnp.array(rng.integers(0, 13, (rows, 4)), jnp.int32),
        features=jnp.array(rng.normal(size=(rows, 4, 3, 16)), jnp.float32),
        length=jnp.full(rows, 4, jnp.int32),
        next_token=jnp.array(rng.integers(0, 13, rows), jnp.int32),
    )
    state = head.drafter.observe(head.params, head.drafter.init(head.params, rows, 16), seen)
    keys = row_keys(3, rows)
    sampling = SamplingParams(
        temperature=jnp.array(rng.choice([0.5, 1.0, 1.5], rows), jnp.float32),
        top_k=jnp.zeros(rows, jnp.int32),
        top_p=jnp.ones(rows),
    )
    draft = head.drafter.propose(head.params, state, keys, sampling)
    q = np.asarray(draft.probs[:, 1:])
    assert q.dtype == np.float32
    mass = float(np.abs(q.sum(-1) - 1).max())
    assert mass < 1e-6, "a declared distribution does not add up to one"
    outside = np.setdiff1d(np.arange(13), np.asarray(head.params["draft_to_target"]))
    assert not q[..., outside].any(), "mass on a token that the head does not have"
    # Draft ids ascend with target ids here, so the same uniform inverts both cumulative distributions alike.
    again = draw(draft.probs[:, 1:], uniforms(keys, depth)[:, :, None])
    differing = int((again != draft.tokens[:, 1:]).sum())
    check.number(tokens=rows * depth, differing=differing, largest_error_of_the_mass=mass)
    assert differing == 0
