"""The expected results as plain Python: loops, no cache, no code of the library."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

TextDistribution = dict[tuple[int, ...], Fraction | float]
Interval = tuple[Fraction, Fraction]


class Tree(NamedTuple):
    """A draft: node 0 is the root, ``q[node]`` the distribution that the node was sampled from."""

    tokens: Sequence[int]
    parents: Sequence[int]
    q: Sequence[Sequence[Fraction]]
    valid: Sequence[bool]


class Cell(NamedTuple):
    """A box of uniforms within which the rule makes the same decision, and its volume."""

    mass: Fraction
    accept: dict[int, Interval]
    choose: Interval


def one_hot(token: int, size: int) -> list[Fraction]:
    return [Fraction(x == token) for x in range(size)]


def residual(p: Sequence[Fraction], q: Sequence[Fraction]) -> list[Fraction]:
    """Returns ``norm(max(p - q, 0))`` (Leviathan et al., 2023)."""
    difference = [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return [x / sum(difference) for x in difference]


def cells(tree: Tree, p: Sequence[Sequence[Fraction]]) -> Iterator[Cell]:
    """Yields every decision of the published rule, with the exact uniforms that lead to it."""

    def visit(
        node: int, current: int, want: Sequence[Fraction], mass: Fraction, box: dict
    ) -> Iterator[Cell]:
        if node == len(tree.tokens):
            low = Fraction(0)
            for weight in want:
                if weight:
                    yield Cell(mass * weight, box, (low, low + weight))
                low += weight

        elif not tree.valid[node] or tree.parents[node] != current:
            yield from visit(node + 1, current, want, mass, box)

        else:
            token = tree.tokens[node]
            q = tree.q[node]
            bound = min(Fraction(1), want[token] / q[token])
            if bound > 0:
                yield from visit(
                    node + 1, node, p[node], mass * bound, {**box, node: (Fraction(0), bound)}
                )
            if bound < 1:
                remaining = residual(want, q)
                refused = {**box, node: (bound, Fraction(1))}
                yield from visit(node + 1, current, remaining, mass * (1 - bound), refused)

    yield from visit(1, 0, p[0], Fraction(1), {})


def block_survivals(
    tree: Tree, p: Sequence[Sequence[Fraction]]
) -> tuple[list[Fraction], list[Fraction]]:
    """Returns ``P_i`` and ``h_i`` (root: 1) of a chain that ends before its padding.

    Algorithm 2 of Sun et al., 2024.
    """
    length = tree.valid.index(False) - 1 if False in tree.valid else len(tree.tokens) - 1
    survival = [Fraction(1)]
    passes = [Fraction(1)]

    for i in range(1, length + 1):
        token = tree.tokens[i]
        ratio = p[i - 1][token] / tree.q[i][token]
        survival.append(min(Fraction(1), survival[-1] * ratio))

    for i in range(1, length):
        mass = sum(
            max(survival[i] * a - b, Fraction(0)) for a, b in zip(p[i], tree.q[i + 1], strict=True)
        )
        refused = mass + 1 - survival[i]
        passes.append(mass / refused if refused else Fraction(1))

    return survival, [*passes, survival[-1]] if length else [Fraction(1)]


def block_cells(tree: Tree, p: Sequence[Sequence[Fraction]]) -> Iterator[Cell]:
    """Yields cells as :func:`cells` does, by block verification.

    All tests run, and the last that passes counts.
    """
    survival, passes = block_survivals(tree, p)
    last = len(passes) - 1

    for outcome in itertools.product((False, True), repeat=last):
        mass = Fraction(1)
        box = {}
        for node, passed in enumerate(outcome, 1):
            mass *= passes[node] if passed else 1 - passes[node]
            box[node] = (Fraction(0), passes[node]) if passed else (passes[node], Fraction(1))
        if not mass:
            continue

        count = max((node for node, passed in enumerate(outcome, 1) if passed), default=0)
        drafted = tree.q[count + 1] if count < last else [Fraction(0)] * len(p[0])
        remaining = [
            max(survival[count] * a - b, Fraction(0))
            for a, b in zip(p[count], drafted, strict=True)
        ]

        low = Fraction(0)
        for weight in remaining:
            if weight:
                share = weight / sum(remaining)
                yield Cell(mass * share, box, (low, low + share))
                low += share


def autoregressive_distribution(
    p: Callable[[tuple[int, ...]], Sequence], horizon: int, stops: Sequence[int] = ()
) -> TextDistribution:
    """Returns the distribution of the target's texts, to a stop token or the horizon.

    It is ``p(x1) p(x2 | x1) ...``.
    """
    distribution: TextDistribution = {(): 1}

    for _ in range(horizon):
        longer: TextDistribution = {}
        for prefix, mass in distribution.items():
            if prefix and prefix[-1] in stops:
                longer[prefix] = mass
                continue
            for token, weight in enumerate(p(prefix)):
                if weight:
                    longer[*prefix, token] = mass * weight

        distribution = longer
    return distribution


def distribution_of_rounds(
    rounds: Callable[[tuple[int, ...]], TextDistribution], horizon: int, stops: Sequence[int] = ()
) -> TextDistribution:
    """Returns the distribution of texts of rounds, each cut at a stop token or the horizon."""
    distribution: Counter = Counter()

    def finished(prefix: tuple[int, ...]) -> bool:
        return len(prefix) == horizon or bool(prefix and prefix[-1] in stops)

    def extend(prefix: tuple[int, ...], mass: Fraction) -> None:
        if finished(prefix):
            distribution[prefix] += mass
            return
        for emitted, weight in rounds(prefix).items():
            longer = prefix
            for token in emitted:
                longer = longer if finished(longer) else (*longer, token)
            extend(longer, mass * weight)

    extend((), Fraction(1))
    return dict(distribution)


def total_variation(a: TextDistribution, b: TextDistribution) -> Fraction | float:
    differences = [a.get(x, 0) - b.get(x, 0) for x in {*a, *b}]
    return sum(map(abs, differences)) / 2


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Returns the nodes from below the root to ``node``."""
    return [] if node == 0 else [*path_to(parents, parents[node]), node]


def children(parents: Sequence[int], node: int) -> list[int]:
    return [child for child, parent in enumerate(parents) if parent == node]


def posterior_greedy(
    tokens: Sequence[int], parents: Sequence[int], target_tokens: Sequence[int]
) -> tuple[list[int], int]:
    """EAGLE's greedy ``evaluate_posterior``: the first leaf's row with the longest match."""
    best: list[int] = []
    for leaf in range(len(tokens)):
        if children(parents, leaf):
            continue

        row = path_to(parents, leaf)
        matches = 0
        for node in row:
            if tokens[node] != target_tokens[parents[node]]:
                break
            matches += 1
        best = row[:matches] if matches > len(best) else best

    return best, target_tokens[best[-1] if best else 0]


def posterior_sampled(
    tokens: Sequence[int],
    parents: Sequence[int],
    p: Sequence[Sequence[float]],
    accept: Sequence[float],
    choose: float,
) -> tuple[list[int], int]:
    """EAGLE's sampling ``evaluate_posterior``: zero each refused sibling and renormalise."""
    node = 0
    path = []
    want = list(p[0])

    while True:
        for child in children(parents, node):
            if accept[child] < want[tokens[child]]:
                node = child
                want = list(p[child])
                path.append(child)
                break
            want[tokens[child]] = 0.0

            want = [x / sum(want) for x in want]
        else:
            return path, next(x for x in range(len(want)) if math.fsum(want[: x + 1]) > choose)


def warped(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Applies temperature, then top-k, then top-p, which is Hugging Face's order."""
    best = max(logits)
    if temperature == 0:
        return [float(x == list(logits).index(best)) for x in range(len(logits))]
    weights = [math.exp((logit - best) / temperature) for logit in logits]

    if 0 < top_k < len(weights):
        least = sorted(weights)[-top_k]
        weights = [w if w >= least else 0.0 for w in weights]

    weights = [w / math.fsum(weights) for w in weights]

    if top_p < 1:
        mass = 0.0
        nucleus = set()
        for token in sorted(range(len(weights)), key=lambda x: -weights[x]):
            if mass < top_p:
                nucleus.add(token)
            mass += weights[token]
        weights = [w if token in nucleus else 0.0 for token, w in enumerate(weights)]

    return [w / math.fsum(weights) for w in weights]
