"""Level 1: the acceptance rule under fixed uniforms."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from random_drafts import random_distribution, random_trees

from eagle3_jax.acceptance import verify, verify_greedy, verify_points
from eagle3_jax.sampling import argmax, draw, residual
from eagle3_jax.types import Verdict

pytestmark = pytest.mark.core

GRID = 4096
MIDPOINTS = jnp.array((np.arange(GRID) + 0.5) / GRID, jnp.float32)


def decide(p: np.ndarray, q: np.ndarray, token: int, *, accept: Any, choose: Any) -> Verdict:
    """Returns the verdicts on a root and one drafted token, for a uniform or all of the grid."""
    repeat = lambda x: jnp.broadcast_to(jnp.asarray(x), (GRID, *np.shape(x)))
    column = lambda uniforms: jnp.broadcast_to(jnp.asarray(uniforms, jnp.float32), (GRID,))[:, None]
    draft = tiny.draft_of(repeat(np.array([0, token])), [-1, 0], probs=repeat(np.stack([q, q])))
    probs = repeat(np.stack([p, p]).astype(np.float32))
    return verify(
        draft, probs, accept=jnp.tile(column(accept), 2), choose=column(choose), max_depth=1
    )


@pytest.mark.parametrize("seed", range(6))
def test_a_draft_is_accepted_as_often_as_the_ratio_of_target_to_draft_probability(
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    p = random_distribution(rng, 8, zeros=seed % 3)
    q = random_distribution(rng, 8, zeros=seed // 3)
    for token in np.flatnonzero(q):
        accepted = decide(p, q, int(token), accept=MIDPOINTS, choose=MIDPOINTS).num_accepted
        share = float(jnp.mean(accepted.astype(jnp.float32)))
        expected = min(1.0, p[token] / q[token])
        assert abs(share - expected) <= 1 / GRID


@pytest.mark.parametrize("seed", range(6))
def test_a_refused_draft_is_corrected_from_the_residual(seed: int) -> None:
    """After a refusal the correction follows ``norm(max(p - q, 0))``, cell by cell.

    They agree within one grid step.
    """
    rng = np.random.default_rng(seed)
    p = random_distribution(rng, 8, zeros=seed % 3)
    q = random_distribution(rng, 8, zeros=1)
    token = int(np.argmax(q - p))  # refused with certainty at the upper end of the uniforms
    verdict = decide(p, q, token, accept=1.0 - 2.0**-20, choose=MIDPOINTS)
    assert int(verdict.num_accepted.max()) == 0
    expected = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    counts = np.bincount(np.asarray(verdict.next_token), minlength=8) / GRID
    assert np.abs(np.cumsum(counts) - np.cumsum(expected)).max() <= 1 / GRID + 1e-6


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-24])
def test_a_token_without_target_mass_is_never_accepted_nor_sampled(uniform: float) -> None:
    p = np.array([0.5, 0.0, 0.5, 0.0])
    q = np.array([0.25, 0.25, 0.25, 0.25])
    verdict = decide(p, q, 1, accept=uniform, choose=uniform)
    assert set(np.asarray(verdict.num_accepted)) == {0}
    assert set(np.asarray(verdict.next_token)) <= {0, 2}


@pytest.mark.parametrize("uniform", [0.5, 1.0 - 2.0**-24])
def test_a_sibling_without_mass_is_refused_where_its_elders_round_above_one(uniform: float) -> None:
    """The float32 numbers sum to 1.0000001: the computed remainder for the fourth is negative."""
    elders = np.array([0.5851066708564758, 0.32412686944007874, 0.09076649695634842], np.float32)
    # No elder is taken, however its share rounds.
    accept = jnp.array([[0.0, 2.0, 2.0, 2.0, uniform]], jnp.float32)
    draft = tiny.draft_of([[0, 0, 1, 2, 3]], [-1, 0, 0, 0, 0])
    probs = jnp.broadcast_to(jnp.array([*elders, 0.0], jnp.float32), (1, 5, 4))
    assert float(1.0 - jnp.sum(probs[0, 0])) < 0
    verdict = verify(
        draft, probs, accept=accept, choose=jnp.full((1, 1), 0.5, jnp.float32), max_depth=1
    )
    assert int(verdict.next_token[0]) != 3
    assert int(verdict.num_accepted[0]) == 0


@pytest.mark.parametrize(
    "p", [[0.0, 0.0, 1.0, 0.0], [0.0, 0.3, 0.0, 0.7], [1e-38, 0.0, 1e-38, 0.0], [0.25] * 4]
)
def test_a_draw_never_lands_on_a_token_without_mass(p: list[float]) -> None:
    uniforms = jnp.array([0.0, 1e-30, 0.5, 1.0 - 2.0**-24])
    tokens = draw(jnp.broadcast_to(jnp.array(p), (4, 4)), uniforms[:, None])
    assert all(p[token] > 0 for token in np.asarray(tokens))


def test_a_draw_stays_inside_a_distribution_that_rounds_below_one() -> None:
    p = jnp.array([0.1] * 7 + [0.0], jnp.float32)
    assert int(draw(p, jnp.array([1.0 - 2.0**-24], jnp.float32))) == 6


def test_equal_target_and_draft_always_accept() -> None:
    p = np.array([0.1, 0.2, 0.3, 0.4])
    for token in range(4):
        assert int(decide(p, p, token, accept=MIDPOINTS, choose=MIDPOINTS).num_accepted.min()) == 1


def test_an_empty_residual_accepts_instead_of_dividing_by_zero() -> None:
    # Nothing is left to correct with: q is a little above p at the only token that p has.
    p = np.array([0.0, 1.0, 0.0])
    q = np.array([0.0, 1.0 + 1e-6, 0.0])
    edge = 1.0 - 2.0**-24
    verdict = decide(p, q, 1, accept=edge, choose=edge)
    assert int(verdict.num_accepted.min()) == 1


def test_a_residual_without_mass_is_the_target_itself() -> None:
    p = jnp.array([0.25, 0.75])
    weights, mass = residual(p, p)
    assert float(mass) == 0
    assert np.array_equal(weights, p)


def decisions(verdict: Verdict) -> list[tuple[list[int], int]]:
    paths = np.asarray(verdict.path)
    tokens = np.asarray(verdict.next_token)
    return [
        ([int(n) for n in path if n >= 0], int(token))
        for path, token in zip(paths, tokens, strict=True)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_greedy_verification_is_the_rule_on_point_masses_and_the_official_evaluation(
    seed: int,
) -> None:
    draft, rng = random_trees(64, 9, 4, seed)
    target_tokens = rng.integers(0, 4, (64, 9)).astype(np.int32)
    greedy = verify_greedy(draft, jnp.array(target_tokens), max_depth=8)
    rows = zip(draft.tokens.tolist(), draft.parents.tolist(), target_tokens.tolist(), strict=True)
    expected = [oracle.posterior_greedy(*row) for row in rows]
    assert decisions(greedy) == expected

    point_masses = jax.nn.one_hot(jnp.array(target_tokens), 4)
    dice = jnp.array(rng.random((64, 9)), jnp.float32)
    assert (
        decisions(verify(draft, point_masses, accept=dice, choose=dice[:, :1], max_depth=8))
        == expected
    )


@pytest.mark.parametrize("seed", range(4))
def test_sampled_verification_of_a_deterministic_tree_is_the_official_evaluation(seed: int) -> None:
    draft, rng = random_trees(64, 9, 4, seed)
    probs = np.stack(
        [
            [random_distribution(rng, 4, zeros=int(rng.integers(0, 2))) for _ in range(9)]
            for _ in range(64)
        ]
    )

    dice = rng.random((64, 9))
    choose = rng.random(64)
    accept = jnp.array(dice, jnp.float32)
    last = jnp.array(choose, jnp.float32)[:, None]

    verdict = verify(draft, jnp.array(probs, jnp.float32), accept=accept, choose=last, max_depth=8)
    rows = zip(
        draft.tokens.tolist(),
        draft.parents.tolist(),
        probs.tolist(),
        dice.tolist(),
        choose,
        strict=True,
    )
    assert decisions(verdict) == [oracle.posterior_sampled(*row) for row in rows]


@pytest.mark.parametrize("greedy", [True, False])
def test_nodes_marked_invalid_are_never_accepted(greedy: bool) -> None:
    draft, rng = random_trees(64, 9, 4, seed=5)
    draft = draft.replace(valid=jnp.array(rng.random((64, 9)) < 0.5).at[:, 0].set(True))
    target_tokens = jnp.array(rng.integers(0, 4, (64, 9)), jnp.int32)

    if greedy:
        verdict = verify_greedy(draft, target_tokens, max_depth=8)
    else:
        dice = jnp.zeros((64, 9))
        verdict = verify(
            draft, jax.nn.one_hot(target_tokens, 4), accept=dice, choose=dice[:, :1], max_depth=8
        )

    assert int(verdict.num_accepted.max()) > 0
    for row, (path, _) in enumerate(decisions(verdict)):
        assert all(bool(draft.valid[row, node]) for node in path)


@pytest.mark.parametrize("seed", range(2))
def test_point_masses_are_decided_at_once_as_one_by_one(seed: int) -> None:
    """Compares deciding all nodes at once with deciding one by one.

    Trees are random, with padding and repeated tokens.
    """
    rows = 2048
    nodes = 8
    vocabulary = 5
    rng = np.random.default_rng(seed)

    parents = np.array(
        [[-1, *(rng.integers(0, node) for node in range(1, nodes))] for _ in range(rows)], np.int32
    )
    tokens = rng.integers(0, vocabulary, (rows, nodes)).astype(np.int32)
    valid = (rng.random((rows, nodes)) < 0.8) | (np.arange(nodes) == 0)
    weights = rng.gamma(0.7, size=(rows, nodes, vocabulary)) * (
        rng.random((rows, nodes, vocabulary)) < 0.8
    )
    weights[..., 0] += 1e-3

    probs = jnp.asarray(weights / weights.sum(axis=-1, keepdims=True), jnp.float32)
    accept = jnp.asarray(rng.random((rows, nodes)), jnp.float32)
    choose = jnp.asarray(rng.random((rows, 1)), jnp.float32)
    draft = tiny.draft_of(tokens, parents, valid)
    named = draft.replace(probs=jax.nn.one_hot(tokens, vocabulary))
    likeliest = jnp.argmax(probs, -1)
    greedy = lambda draft, probs, **_: verify_greedy(
        draft, jnp.argmax(probs, -1).astype(jnp.int32), max_depth=nodes - 1
    )
    half = jnp.full_like(accept, 0.5)
    both = [
        (verify_points, verify, draft, probs, accept),
        (greedy, verify, draft, jax.nn.one_hot(likeliest, vocabulary), half),
    ]

    for at_once, one_by_one, draft, target_probs, dice in both:
        options = {"accept": dice, "choose": choose, "max_depth": nodes - 1}
        quick = at_once(draft, target_probs, **options)
        slow = one_by_one(named, target_probs, **options)
        assert len(np.unique(slow.num_accepted)) > 3
        for field in ("num_accepted", "path", "next_token"):
            assert np.array_equal(getattr(quick, field), getattr(slow, field)), field


@pytest.mark.parametrize("size", [1, 2, 37, 4096])
def test_argmax_is_the_lowest_index_of_the_largest(size: int) -> None:
    rng = np.random.default_rng(size)
    few = rng.integers(0, 4, (3, 5, size)).astype(np.float32)  # so many ties
    for x in (few, -few, np.full_like(few, -np.inf), np.where(few == 1, np.inf, few)):
        for find in (argmax, jax.jit(argmax)):
            assert np.array_equal(find(jnp.asarray(x)), np.argmax(x, axis=-1))
