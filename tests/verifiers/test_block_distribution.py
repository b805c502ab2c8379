"""Block verification: its exact distribution, its gain, and where it is the token rule."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny
from exact_distributions import (
    CHAIN,
    VOCABULARY,
    Distribution,
    Drafts,
    P,
    Q,
    deterministic,
    distribution,
    distribution_of_the_code,
    sampled,
)
from oracle import Tree
from random_drafts import random_distribution

from eagle3_jax import BlockVerification, Exact
from eagle3_jax.acceptance import verify
from eagle3_jax.types import SamplingMode, SamplingParams
from eagle3_jax.verifiers.block import verify_block

LONG = (-1, 0, 1, 2)


def padded(drafts: Drafts, valid: tuple[bool, ...]) -> Drafts:
    """Returns the same drafts, in which some nodes must not be accepted."""

    def masked(prefix: tuple[int, ...]) -> Iterator[tuple[Fraction, Tree]]:
        for mass, tree in drafts(prefix):
            yield mass, tree._replace(valid=valid)

    return masked


CASES: dict[str, tuple[Distribution, Drafts]] = {
    "a sampled chain": (P, sampled(Q, CHAIN)),
    "a sampled chain of three": (P, sampled(Q, LONG)),
    "a target that cannot emit some drafts": (distribution("sparse target", 1), sampled(Q, CHAIN)),
    "a draft that cannot propose some tokens": (P, sampled(distribution("sparse draft", 1), CHAIN)),
    "a certain target": (distribution("sure target", 2), sampled(Q, CHAIN)),
    "a draft equal to the target": (P, sampled(P, CHAIN)),
    "a deterministic chain": (P, deterministic(Q, CHAIN)),
    "a chain cut short": (P, padded(sampled(Q, LONG), (True, True, True, False))),
    "a chain with a hole": (P, padded(sampled(Q, LONG), (True, True, False, True))),
    "nothing drafted": (P, padded(sampled(Q, CHAIN), (True, False, False))),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_have_exactly_the_autoregressive_distribution_with(name: str) -> None:
    """The distance from the target's distribution is zero, with and without a stop token."""
    p, drafts = CASES[name]
    horizon = 4

    # The token rule decides point masses. It has the same distribution and other boxes.
    cells = oracle.cells if name == "a deterministic chain" else oracle.block_cells
    rounds = distribution_of_the_code(p, drafts, horizon, verify_block, cells)

    for stops in ((), (1,)):
        emitted = oracle.distribution_of_rounds(rounds, horizon, stops)
        distance = oracle.total_variation(
            emitted, oracle.autoregressive_distribution(p, horizon, stops)
        )
        assert distance == 0, f"{name}, stops {stops}: total variation {float(distance):.3g}"


def mean_accepted(p: Distribution, q: Distribution, length: int, rule: str) -> Fraction:
    """Returns the mean number of draft tokens accepted in the first round, in closed form.

    It is ``Σ_i Pr(τ >= i)``.

    Token ``i`` is reached and accepted with mass ``Π min(p, q)`` by the token rule, and with
    ``q(d_1..d_i) P_i`` by the block rule.
    """
    # For each prefix: its mass under q, and the share of it that survives.
    mean = Fraction(0)
    above = {(): (Fraction(1), Fraction(1))}

    for _ in range(length):
        here = {}
        for prefix, (mass, survival) in above.items():
            for token, (a, b) in enumerate(zip(p(prefix), q(prefix), strict=True)):
                if b:
                    ratio = a / b if rule == "block" else min(Fraction(1), a / b)
                    here[*prefix, token] = mass * b, min(Fraction(1), survival * ratio)

        mean += sum(mass * survival for mass, survival in here.values())
        above = here

    return mean


def test_blocks_accept_more_on_average_and_never_less() -> None:
    """For random pairs of three tokens the published rules accept 0.89 and 0.93 of two drafted."""
    rng = random.Random(0)
    means = {"token": [], "block": []}

    def random_row() -> list[Fraction]:
        weights = [Fraction(rng.randint(1, 1000)) for _ in range(VOCABULARY)]
        return [weight / sum(weights) for weight in weights]

    for _ in range(200):
        rows = {context: (random_row(), random_row()) for context in ((), (0,), (1,), (2,))}
        p, q = (lambda prefix, rows=rows, side=side: rows[prefix][side] for side in (0, 1))
        for rule, rule_means in means.items():
            rule_means.append(mean_accepted(p, q, 2, rule))
    by_token, by_block = means.values()
    assert all(block >= token for block, token in zip(by_block, by_token, strict=True))
    assert float(sum(by_block) - sum(by_token)) / 200 == pytest.approx(0.035, abs=0.01)


@pytest.mark.parametrize("parents", [(-1, 0), CHAIN])
def test_the_library_accepts_as_much_as_the_rules_say(parents: tuple[int, ...]) -> None:
    mean_lengths = {}
    for name, rule, cells in (
        ("token", verify, oracle.cells),
        ("block", verify_block, oracle.block_cells),
    ):
        emitted = distribution_of_the_code(P, sampled(Q, parents), 1, rule, cells)(())

        mean_lengths[name] = sum(mass * (len(tokens) - 1) for tokens, mass in emitted.items())
        assert mean_lengths[name] == mean_accepted(P, Q, len(parents) - 1, name)

    assert (
        mean_lengths["block"] > mean_lengths["token"]
        if len(parents) > 2
        else mean_lengths["block"] == mean_lengths["token"]
    )


def test_one_drafted_token_is_decided_bit_for_bit_as_by_the_token_rule() -> None:
    rng = np.random.default_rng(0)
    rows = 512
    vocabulary = 7

    p, q = (
        np.stack([random_distribution(rng, vocabulary) for _ in range(2 * rows)]) for _ in range(2)
    )
    p = p.reshape(rows, 2, vocabulary).astype(np.float32)
    q = q.reshape(rows, 2, vocabulary).astype(np.float32)

    tokens = np.array(
        [
            [0, rng.choice(vocabulary, p=weights / weights.sum())]
            for weights in q[:, 1].astype(float)
        ],
        np.int32,
    )
    draft = tiny.draft_of(tokens, [-1, 0], probs=q)

    dice = dict(
        accept=jnp.asarray(rng.random((rows, 2)), jnp.float32),
        choose=jnp.asarray(rng.random((rows, 1)), jnp.float32),
    )
    ours, theirs = (
        rule(draft, jnp.asarray(p), max_depth=1, **dice) for rule in (verify_block, verify)
    )

    assert np.array_equal(ours.num_accepted, theirs.num_accepted)
    assert 0 < float(ours.num_accepted.mean()) < 1
    assert np.array_equal(ours.next_token, theirs.next_token)


def test_equal_distributions_are_accepted_whole_whatever_the_dice() -> None:
    """Rounding leaves no residual to sample from and no survival below 1."""
    rng = np.random.default_rng(0)
    rows = 256
    vocabulary = 1000
    nodes = 6

    node_distributions = np.stack(
        [random_distribution(rng, vocabulary) for _ in range(nodes)]
    ).astype(np.float32)
    tokens = np.stack(
        [rng.choice(vocabulary, rows, p=q / q.sum()) for q in node_distributions.astype(float)],
        axis=1,
    )

    probs = jnp.broadcast_to(jnp.asarray(node_distributions), (rows, nodes, vocabulary))
    draft = tiny.draft_of(tokens, range(-1, nodes - 1), probs=probs)

    highest = jnp.full((rows, nodes), 1 - 2.0**-24)
    target_probs = jnp.concatenate([probs[:, 1:], probs[:, :1]], axis=1)

    verdict = verify_block(
        draft, target_probs, accept=highest, choose=jnp.full((rows, 2), 0.5), max_depth=nodes - 1
    )

    assert (np.asarray(verdict.num_accepted) == nodes - 1).all()


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-24])
def test_a_token_without_target_mass_is_neither_accepted_nor_sampled(uniform: float) -> None:
    p = np.array([0.0, 0.5, 0.5], np.float32)
    q = np.array([1.0, 0.0, 0.0], np.float32)
    draft = tiny.draft_of([[0, 0, 0]], [-1, 0, 1], probs=[[q, q, q]])
    probs = jnp.asarray(np.stack([p, p, p]))[None]

    verdict = verify_block(
        draft,
        probs,
        accept=jnp.full((1, 3), uniform),
        choose=jnp.full((1, 1), uniform),
        max_depth=2,
    )

    assert int(verdict.num_accepted[0]) == 0
    assert int(verdict.next_token[0]) in (1, 2)


def test_rows_without_a_sampled_draft_are_decided_as_by_the_token_rule() -> None:
    rng = np.random.default_rng(1)
    rows = 64
    nodes = 4
    vocabulary = 5

    logits = jnp.asarray(rng.normal(size=(rows, nodes, vocabulary)), jnp.float32)
    best = jnp.argmax(logits, axis=-1)
    right = jnp.asarray(rng.random((rows, nodes - 1)) < 0.7)

    tokens = jnp.where(right, best[:, :-1], (best[:, :-1] + 1) % vocabulary)
    tokens = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), tokens.astype(jnp.int32)], axis=1)
    valid = np.where(np.arange(nodes) > 0, rng.random(tokens.shape) < 0.9, True)
    draft = tiny.draft_of(tokens, range(-1, nodes - 1), valid, jax.nn.one_hot(tokens, vocabulary))

    keys = jax.random.split(jax.random.key(0), rows)
    cold = SamplingParams(temperature=jnp.zeros(rows))

    for sampling_mode, proposed in (
        (SamplingMode.GREEDY, dataclasses.replace(draft, probs=None)),
        (SamplingMode.TEMPERATURE, draft),
    ):
        ours, theirs = (
            rule(proposed, logits, cold, keys, sampling_mode=sampling_mode, max_depth=3)
            for rule in (BlockVerification(), Exact())
        )
        assert tiny.same_bits(ours, theirs)
