"""Level 1 at the vocabulary of Llama 3: every acceptance rule next to its formula in float64.

Enumeration and frequencies (``test_exact_distribution``, ``test_long_distribution``) use small
vocabularies, where no probability is as small as most are in practice. Here, at 128,256 tokens,
bisection through the library's own rules finds the uniform below which each node is accepted. A
uniform has 2^24 values, so such a threshold is a count. The distribution that the next token is
sampled from is compared token by token; ``test_draw_distribution`` checks the draw itself. The
float32 inputs are exact for the formulas.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from mutants import swapped
from uniforms import OPTIMISED, VALUES

from eagle3_jax.acceptance import verify, verify_points
from eagle3_jax.sampling import draw
from eagle3_jax.types import Draft
from eagle3_jax.verifiers.block import verify_block

pytestmark = pytest.mark.core

SIZE = 128_256
NEAR = 64
REFUSING = 1 - 2.0**-24  # the largest uniform
# The largest deviation of a threshold, times the probability that its decision is reached: a share
# of the output.
TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Decisions:
    """The decisions of a rule on a draft of one node or two."""

    #: For each node: the uniform below which it is accepted if the other is refused, and the
    #: probability of this case.
    accept: list[tuple[float, float]]
    next_token: np.ndarray  #: ``[V]``, weights of the next token if all nodes are refused.
    refused: float  #: The probability that all nodes are refused.


def token_rule(p: np.ndarray, q: np.ndarray, tokens: list[int]) -> Decisions:
    """One or two children of the root (Miao et al., 2023): Leviathan's, also on the residual."""
    target = p[0]
    reached = 1.0
    accept = []
    for node, token in enumerate(tokens, 1):
        accept.append((min(1.0, target[token] / q[node][token]), reached))
        residual = np.maximum(target - q[node], 0.0)
        reached *= residual.sum()
        target = residual / residual.sum() if residual.any() else residual
    return Decisions(accept, target, reached)


def block_rule(p: np.ndarray, q: np.ndarray, tokens: list[int]) -> Decisions:
    """A chain of one or two tokens (Sun et al., 2024)."""
    survival = min(1.0, p[0][tokens[0]] / q[1][tokens[0]])
    residual = np.maximum(p[0] - q[1], 0.0)
    accept = [(survival, 1.0)]
    if len(tokens) == 2:
        mass = np.maximum(survival * p[1] - q[2], 0.0).sum()
        reached = mass + 1 - survival
        second = min(1.0, survival * p[1][tokens[1]] / q[2][tokens[1]])
        accept = [(mass / reached, reached), (second, 1.0)]
    return Decisions(accept, residual, residual.sum())


RULES: dict[str, tuple[Callable, Callable, tuple[int, ...]]] = {
    "the token rule": (verify, token_rule, (-1, 0, 0)),
    "the token rule on point masses": (verify_points, token_rule, (-1, 0, 0)),
    "the block rule": (verify_block, block_rule, (-1, 0, 1)),
}


def distributions(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns ``[V]`` float32 distributions by the name of their shape."""
    softmax = np.exp(rng.normal(size=SIZE) * 2)
    zipf = rng.permutation(1 / np.arange(1, SIZE + 1))
    peak = np.arange(SIZE) == rng.integers(SIZE)

    shapes = {
        "certain but for 5e-4": np.where(peak, 0.9995 * softmax.sum() / 5e-4, softmax),
        "Zipf": zipf,
        "uniform": np.ones(SIZE),
        "softmax of normals": softmax,
        "peaked": np.where(peak, 9 * zipf.sum(), zipf),
        "top-k 50": np.where(softmax >= np.sort(softmax)[-50], softmax, 0.0),
    }

    return {name: (weights / weights.sum()).astype(np.float32) for name, weights in shapes.items()}


def nearly(p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns a distribution so near ``p`` that a residual is below 1e-3.

    Doubles 3e-4 of the mass and raises half of the other tokens by 0.1 %.
    """
    order = rng.permutation(np.flatnonzero(p))
    light = order[p[order] < 3e-4]
    doubled = light[np.cumsum(p[light]) <= 3e-4]
    q = p.astype(np.float64)
    q[order[::2]] *= 1.001
    q[doubled] = 2 * p[doubled]
    return (q / q.sum()).astype(np.float32)


def cases(chain: bool) -> Iterator[tuple[str, np.ndarray, np.ndarray, list[int]]]:
    """Yields a name, ``p [3 V]`` and ``q [3 V]`` in float32, and the tokens of one or two nodes."""
    rng = np.random.default_rng(0)
    targets = distributions(rng)
    drafts = distributions(rng)

    for target_name, p in targets.items():
        for draft_name, q in ({"nearly the target": nearly(p, rng)} | drafts).items():
            # Tokens that can be refused: the most likely draft, a likely one and a rare one. Then
            # any token.
            fewer = np.where((p < q) | (p == q).all(), q, 0.0).astype(np.float64)
            rare = np.flatnonzero((p < q) & (q < 1e-4))
            first = [int(fewer.argmax()), int(rng.choice(SIZE, p=fewer / fewer.sum()))]
            first += [
                int(rng.choice(tokens)) for tokens in (rare, np.flatnonzero(q)) if tokens.size
            ]

            for index, token in enumerate(first):
                after = targets[rng.choice(list(targets))]
                if chain:
                    is_near = draft_name == "nearly the target"
                    second = nearly(after, rng) if is_near else drafts[rng.choice(list(drafts))]
                else:
                    # Sampled without replacement.
                    remaining = np.where(np.arange(SIZE) == token, 0.0, q).astype(np.float64)
                    second = (remaining / remaining.sum()).astype(np.float32)
                below = []
                if index % 2 == 0:
                    weights = second / second.sum(dtype=np.float64)
                    below = [int(rng.choice(SIZE, p=weights))]

                name = f"{target_name}, drafted by {draft_name}"
                yield name, np.stack([p, after, p]), np.stack([q, q, second]), [token, *below]


def count_inside(inside: Callable[[np.ndarray], np.ndarray], guess: np.ndarray) -> np.ndarray:
    """Returns how many values of each uniform are inside, by bisection.

    It searches near a guess first, then everywhere.
    """
    guess = np.clip(np.round(guess * VALUES), 0, VALUES).astype(int)
    low = np.maximum(guess - NEAR, 0)
    high = np.minimum(guess + NEAR, VALUES)
    at = lambda values: inside(np.clip(values, 0, VALUES - 1))

    low = np.where((low == 0) | at(low - 1), low, 0)
    high = np.where((high == VALUES) | ~at(high), high, VALUES)
    while (low < high).any():
        middle = (low + high) // 2
        grows = at(middle) & (low < high)
        low = np.where(grows, middle + 1, low)
        high = np.where(grows, high, np.minimum(high, middle))

    return low


def compiled(name: str) -> Callable:
    """Compiles a rule anew, with an injected bug in it. It returns paths and next-token weights."""
    rule, _, parents = RULES[name]
    tree = jnp.array([parents], jnp.int32)

    def decide(tokens, valid, p, q, accept):
        def decide_one(accept):
            probs = None if rule is verify_points else q[None]
            draft = Draft(tokens=tokens, parents=tree, valid=valid, probs=probs)
            # The verdict holds weights for a token.
            with swapped(draw, lambda draw, p, choose: p), tiny.unchecked():
                verdict = rule(
                    draft, p[None], accept=accept[None], choose=jnp.zeros((1, 1)), max_depth=2
                )
            return verdict.path[0], verdict.next_token[0]

        return jax.vmap(decide_one)(accept)

    return jax.jit(decide, compiler_options=OPTIMISED)


def check_thresholds(name: str, num_cases: int | None = None) -> None:
    """Compares the decisions of a rule with its formula, in the first ``num_cases`` or in all."""
    rule, formula, _ = RULES[name]
    decide = compiled(name)
    for case, p, q, tokens in itertools.islice(cases(formula is block_rule), num_cases):
        nodes = np.arange(1, len(tokens) + 1)
        if rule is verify_points:
            q = np.zeros_like(q)
            q[nodes, tokens] = 1.0
        expected = formula(p.astype(np.float64), q.astype(np.float64), tokens)
        padded = jnp.array([[0, *tokens, 0][:3]], jnp.int32)
        inputs = padded, jnp.arange(3)[None] <= nodes[-1], jnp.asarray(p), jnp.asarray(q)

        def accepted(values, inputs=inputs, nodes=nodes):
            """Returns for each node whether it is accepted while the other is refused."""
            dice = np.full((2, 3), REFUSING, np.float32)
            dice[nodes - 1, nodes] = values / VALUES
            path = np.asarray(decide(*inputs, dice)[0])
            return (path[nodes - 1] == nodes[:, None]).any(axis=1)

        shares, reached = np.array(expected.accept).T
        is_certain = shares >= REFUSING
        if formula is token_rule and is_certain[0]:  # its sibling is never reached
            shares[1:] = 0.0
        # The last token of a chain accepts the whole chain.
        if formula is block_rule and is_certain[-1]:
            shares[:] = 1.0
        error = reached * np.abs(count_inside(accepted, shares) / VALUES - shares)
        assert error.max() < TOLERANCE, (
            f"{name}: {case}: thresholds {shares}, off by {error} of the output"
        )
        if is_certain.any() or not expected.next_token.any():
            continue
        weights = np.asarray(
            decide(*inputs, np.full((1, 3), REFUSING, np.float32))[1][0], np.float64
        )
        difference = weights / weights.sum() - expected.next_token / expected.next_token.sum()
        distance = expected.refused * np.abs(difference).sum() / 2
        assert distance < TOLERANCE, (
            f"{name}: {case}: the next token is off by {distance:.2g} of the output"
        )


@pytest.mark.parametrize("name", RULES)
def test_at_128256_tokens_every_threshold_is_that_of_the_formula_for(name: str) -> None:
    check_thresholds(name)
