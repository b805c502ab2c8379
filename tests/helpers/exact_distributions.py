"""Drafts in rational numbers, and the exact distribution that a rule of the library has on them."""

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
from oracle import Tree

from eagle3_jax.acceptance import verify
from eagle3_jax.types import Draft

VOCABULARY = 3
Distribution = Callable[[tuple[int, ...]], list[Fraction]]
Drafts = Callable[[tuple[int, ...]], Iterator[tuple[Fraction, Tree]]]


def distribution(name: str, zeros: int = 0) -> Distribution:
    """Returns a distribution for every prefix; ``zeros`` of its entries have no mass."""

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
    """Samples nodes from ``q`` after their parents, siblings independently, as SpecInfer does."""
    return proposed(q, parents, lambda q_row, elders: (q_row, q_row))


def deterministic(
    q: Distribution, parents: tuple[int, ...], valid: tuple[bool, ...] | None = None
) -> Drafts:
    """Proposes the likeliest tokens after each parent, siblings by rank, as EAGLE and Medusa do."""

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


def distribution_of_the_code(
    p: Distribution,
    drafts: Drafts,
    horizon: int,
    rule: Callable = verify,
    cells: Callable = oracle.cells,
) -> Callable[[tuple[int, ...]], oracle.TextDistribution]:
    """Returns what a round emits after each prefix.

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
