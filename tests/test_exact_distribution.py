"""Level 0: enumerates the exact output distribution of ``verify`` in rational numbers.

The unit cube of uniforms falls into boxes in which the rule must decide the same. The library's own
``verify`` is run in every box of every draft of every prefix. The volumes of the boxes are the
exact distribution of that code, without statistics.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import Tree

from eagle3_jax.acceptance import verify
from eagle3_jax.types import Draft

pytestmark = pytest.mark.core

VOCABULARY = 3
Distribution = Callable[[tuple[int, ...]], list[Fraction]]
Drafts = Callable[[tuple[int, ...]], Iterator[tuple[Fraction, Tree]]]


def distribution(name: str, zeros: int = 0) -> Distribution:
    """Returns a different distribution for every prefix; ``zeros`` of its entries have no mass."""

    @functools.cache
    def after(prefix: tuple[int, ...]) -> list[Fraction]:
        rng = random.Random(f"{name} {prefix}")
        weights = [rng.randint(1, 9) for _ in range(VOCABULARY)]
        for token in rng.sample(range(VOCABULARY), zeros):
            weights[token] = 0
        return [Fraction(weight, sum(weights)) for weight in weights]

    return after


Row = list[Fraction]


def proposed(
    q: Distribution, parents: tuple[int, ...], rows: Callable[[Row, set[int]], tuple[Row, Row]]
) -> Drafts:
    """Samples the nodes one after the other.

    ``rows`` gets ``q`` after the parent of a node and the tokens of its elder siblings. It returns
    the distribution that the node is sampled from and the one that the draft declares.
    """

    def drafts(prefix: tuple[int, ...]) -> Iterator[tuple[Fraction, Tree]]:
        for below in itertools.product(range(VOCABULARY), repeat=len(parents) - 1):
            tokens = (0, *below)
            declared = [[Fraction(0)] * VOCABULARY]
            mass = Fraction(1)

            for node in range(1, len(parents)):
                context = tuple(tokens[n] for n in oracle.path_to(parents, parents[node]))
                elders = {tokens[n] for n in oracle.children(parents, parents[node]) if n < node}
                sampled_row, declared_row = rows(q((*prefix, *context)), elders)
                mass *= sampled_row[tokens[node]]
                declared.append(declared_row)

            if mass:
                yield mass, Tree(tokens, parents, declared, [True] * len(parents))

    return drafts


def sampled(q: Distribution, parents: tuple[int, ...]) -> Drafts:
    """Samples every node from ``q`` after its parent, siblings independently, as SpecInfer does."""
    return proposed(q, parents, lambda q_row, elders: (q_row, q_row))


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


def deterministic(
    q: Distribution, parents: tuple[int, ...], valid: tuple[bool, ...] | None = None
) -> Drafts:
    """Proposes the likeliest tokens after each parent, siblings by rank.

    EAGLE, Medusa and prompt lookup do that.
    """

    def drafts(prefix: tuple[int, ...]) -> Iterator[tuple[Fraction, Tree]]:
        tokens = [0]
        for node in range(1, len(parents)):
            context = tuple(tokens[n] for n in oracle.path_to(parents, parents[node]))
            weights = q((*prefix, *context))
            ranked = sorted(range(VOCABULARY), key=lambda token: (-weights[token], token))
            tokens.append(ranked[oracle.children(parents, parents[node]).index(node)])
        point_masses = [oracle.one_hot(token, VOCABULARY) for token in tokens]
        yield Fraction(1), Tree(tokens, parents, point_masses, valid or [True] * len(parents))

    return drafts


P = distribution("target")
Q = distribution("draft")
CHAIN = (-1, 0, 1)
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


def distribution_of_the_code(
    p: Distribution,
    drafts: Drafts,
    horizon: int,
    rule: Callable = verify,
    cells: Callable = oracle.cells,
) -> Callable[[tuple[int, ...]], oracle.TextDistribution]:
    """Returns what one round emits after each prefix.

    The library's rule decides in every box of the published one.
    """
    rows = []
    prefixes = [
        x for size in range(horizon) for x in itertools.product(range(VOCABULARY), repeat=size)
    ]
    for prefix in prefixes:
        for proposed, tree in drafts(prefix):
            context = [
                tuple(tree.tokens[n] for n in oracle.path_to(tree.parents, node))
                for node in range(len(tree.tokens))
            ]
            target = [p((*prefix, *after)) for after in context]
            rows += [(prefix, proposed, tree, target, cell) for cell in cells(tree, target)]

    depth = max(
        len(oracle.path_to(tree.parents, node))
        for _, _, tree, _, _ in rows
        for node in range(len(tree.tokens))
    )
    one_hot = all(max(q) == 1 for _, _, tree, _, _ in rows for q in tree.q[1:])
    draft = Draft(
        tokens=jnp.array([tree.tokens for _, _, tree, _, _ in rows], jnp.int32),
        parents=jnp.array([tree.parents for _, _, tree, _, _ in rows], jnp.int32),
        valid=jnp.array([tree.valid for _, _, tree, _, _ in rows]),
        probs=None
        if one_hot
        else jnp.array(np.array([tree.q for _, _, tree, _, _ in rows], np.float32)),
    )
    probs = jnp.array(np.array([target for _, _, _, target, _ in rows], np.float32))

    def emitted(where: float) -> list[tuple[int, ...]]:
        """Returns the code's decision at one point of every box."""
        inside = lambda interval: float(interval[0] + (interval[1] - interval[0]) * Fraction(where))

        nodes = range(draft.tokens.shape[1])
        accept = [
            [inside(cell.accept.get(node, (0, 1))) for node in nodes] for _, _, _, _, cell in rows
        ]
        choose = [inside(cell.choose) for _, _, _, _, cell in rows]

        verdict = rule(
            draft,
            probs,
            accept=jnp.array(np.array(accept, np.float32)),
            choose=jnp.array(np.array(choose, np.float32))[:, None],
            max_depth=depth,
        )

        path, count, following = (
            np.asarray(x) for x in (verdict.path, verdict.num_accepted, verdict.next_token)
        )
        assert ((path >= 0).sum(1) == count).all()

        tokens = [
            [tree.tokens[n] for n in path[i] if n >= 0] for i, (_, _, tree, _, _) in enumerate(rows)
        ]
        return [(*accepted, int(last)) for accepted, last in zip(tokens, following, strict=True)]

    middle = emitted(0.5)
    for edge in (0.001, 0.999):
        differing = sum(ours != theirs for ours, theirs in zip(emitted(edge), middle, strict=True))
        # A number, not the lists: a mutant makes this fail, and pytest would spend minutes on
        # showing their difference.
        assert differing == 0, "the code decides differently within one box of the rule"
    outcomes: dict[tuple[int, ...], Counter] = {prefix: Counter() for prefix in prefixes}
    for (prefix, proposed, _, _, cell), tokens in zip(rows, middle, strict=True):
        outcomes[prefix][tokens] += proposed * cell.mass
    return outcomes.__getitem__


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
