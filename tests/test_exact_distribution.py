"""Level 0: enumerates the exact output distribution of ``verify`` in rational numbers.

The unit cube of uniforms falls into boxes in which the rule must decide the same. The library's own
``verify`` is run in every box of every draft of every prefix. The volumes of the boxes are the
exact distribution of that code, without statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import oracle
import pytest
from exact_distributions import (
    CHAIN,
    Distribution,
    Drafts,
    P,
    Q,
    Row,
    deterministic,
    distribution,
    distribution_of_the_code,
    proposed,
    sampled,
)
from oracle import Tree

pytestmark = pytest.mark.core


def without_replacement(
    q: Distribution, parents: tuple[int, ...], declares: Callable[[Row, Row], Row]
) -> Drafts:
    """Samples siblings one by one without replacement, as EAGLE-1 proposes at a temperature.

    ``declares`` gets ``q`` and what remains of it after the elder siblings. The output is exact if
    it returns the second.
    """

    def rows(q_row: Row, elders: set[int]) -> tuple[Row, Row]:
        remaining = [
            Fraction(0) if token in elders else weight for token, weight in enumerate(q_row)
        ]
        remaining = (
            [weight / sum(remaining) for weight in remaining] if sum(remaining) else remaining
        )
        return remaining, declares(q_row, remaining)

    return proposed(q, parents, rows)


TREE = (-1, 0, 0, 1, 1)
SIBLINGS = (-1, 0, 0, 1)
CASES: dict[str, tuple[Distribution, Drafts]] = {
    "a sampled chain": (P, sampled(Q, CHAIN)),
    "a deterministic chain": (P, deterministic(Q, CHAIN)),
    "a tree of deterministic siblings": (P, deterministic(Q, TREE)),
    "a tree of all siblings": (P, deterministic(Q, (-1, 0, 0, 0))),
    "a tree of sampled siblings": (P, sampled(Q, SIBLINGS)),
    "siblings sampled without replacement": (
        P,
        without_replacement(Q, TREE, lambda q_row, remaining: remaining),
    ),
    "all siblings sampled without replacement": (
        P,
        without_replacement(Q, (-1, 0, 0, 0), lambda q_row, remaining: remaining),
    ),
    "a target that cannot emit some drafts": (distribution("sparse target", 1), sampled(Q, CHAIN)),
    "a draft that cannot propose some tokens": (
        P,
        sampled(distribution("sparse draft", 1), SIBLINGS),
    ),
    "a certain target and a certain draft": (
        distribution("sure target", 2),
        deterministic(Q, TREE),
    ),
    "a draft equal to the target": (P, sampled(P, SIBLINGS)),
    "nothing drafted": (P, deterministic(Q, CHAIN, (True, False, False))),
    "a draft cut short": (P, deterministic(Q, TREE, (True, True, False, False, True))),
}


@pytest.mark.parametrize("name", CASES)
def test_speculation_has_exactly_the_autoregressive_distribution_with(name: str) -> None:
    """The total variation distance from the target's distribution is exactly zero."""
    p, drafts = CASES[name]
    horizon = 4  # two drafted tokens, the bonus token and one token of the next round
    rounds = distribution_of_the_code(p, drafts, horizon)
    for stops in ((), (1,)):
        emitted = oracle.distribution_of_rounds(rounds, horizon, stops)
        expected = oracle.autoregressive_distribution(p, horizon, stops)
        distance = oracle.total_variation(emitted, expected)
        assert distance == 0, f"{name}, stops {stops}: total variation {float(distance):.3g}"


def test_the_boxes_of_the_rule_fill_the_cube() -> None:
    for p, drafts in CASES.values():
        for _, tree in drafts((0,)):
            target = [p((0, node)) for node in range(len(tree.tokens))]
            assert sum(cell.mass for cell in oracle.cells(tree, target)) == 1


def test_siblings_that_declare_another_distribution_change_the_output() -> None:
    """Two mistakes: ``q`` with the mass of elder siblings, and the likeliest tokens with ``q``."""

    def likeliest(prefix: tuple[int, ...]) -> Iterator[tuple[Fraction, Tree]]:
        for mass, tree in deterministic(Q, TREE)(prefix):
            context = [
                tuple(tree.tokens[n] for n in oracle.path_to(TREE, TREE[node]))
                for node in range(1, len(TREE))
            ]
            yield mass, tree._replace(q=[tree.q[0], *(Q((*prefix, *before)) for before in context)])

    for wrong in (without_replacement(Q, TREE, lambda q_row, remaining: q_row), likeliest):
        emitted = oracle.distribution_of_rounds(distribution_of_the_code(P, wrong, 3), 3)
        assert oracle.total_variation(emitted, oracle.autoregressive_distribution(P, 3)) > 0.02
