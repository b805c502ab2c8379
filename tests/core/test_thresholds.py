"""Level 1 at the vocabulary of Llama 3: the thresholds of every acceptance rule next to the formulas in float64.

Enumeration and frequencies (``test_exact_law``, ``test_long_distribution``) use
small vocabularies, where no probability is as
small as most are in practice. Here bisection finds through the library's own rules where each uniform changes the
decision, at 128,256 tokens: the uniform that accepts a node, and the uniforms that choose the next token, digit by
digit. A uniform has 2^24 values, so a threshold is a count. The float32 inputs are exact to the formulas.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_draw_law import OPTIMISED, VALUES

from eagle3_jax.acceptance import verify, verify_points
from eagle3_jax.sampling import num_digits
from eagle3_jax.types import Draft
from eagle3_jax.verifiers.block import verify_block

SIZE = 128_256
DIGITS = num_digits(SIZE)
NEAR = 64
SEARCHED = 3
TOP = 1 - 2.0**-24
# What a threshold may be off by, times the probability that the decision is asked for: a share of what is emitted.
TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True)
class Decisions:
    """What a rule should do with a draft of one node or two."""

    #: Below which uniform each node is accepted where the other is refused, and the mass that is at stake.
    accept: list[tuple[float, float]]
    left: np.ndarray  #: ``[V]``, weights of the next token where all are refused.
    refused: float  #: The mass that this happens with.


def token_rule(p: np.ndarray, q: np.ndarray, tokens: list[int]) -> Decisions:
    """One or two children of the root (Miao et al., 2023): Leviathan's rule, and again with what is left."""
    want = p[0]
    reached = 1.0
    accept = []
    for node, token in enumerate(tokens, 1):
        accept.append((min(1.0, want[token] / q[node][token]), reached))
        rest = np.maximum(want - q[node], 0.0)
        reached *= rest.sum()
        want = rest / rest.sum() if rest.any() else rest
    return Decisions(accept, want, reached)


def block_rule(p: np.ndarray, q: np.ndarray, tokens: list[int]) -> Decisions:
    """A chain of one or two (Sun et al., 2024)."""
    survival = min(1.0, p[0][tokens[0]] / q[1][tokens[0]])
    left = np.maximum(p[0] - q[1], 0.0)
    accept = [(survival, 1.0)]
    if len(tokens) == 2:
        wanted = np.maximum(survival * p[1] - q[2], 0.0).sum()
        asked = wanted + 1 - survival
        accept = [(wanted / asked, asked), (min(1.0, survival * p[1][tokens[1]] / q[2][tokens[1]]), 1.0)]
    return Decisions(accept, left, left.sum())


RULES: dict[str, tuple[Callable, Callable, tuple[int, ...]]] = {
    "the token rule": (verify, token_rule, (-1, 0, 0)),
    "the token rule on point masses": (verify_points, token_rule, (-1, 0, 0)),
    "the block rule": (verify_block, block_rule, (-1, 0, 1)),
}


def laws(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """``[V]`` float32, by shape."""
    softmax = np.exp(rng.normal(size=SIZE) * 2)
    zipf = rng.permutation(1 / np.arange(1, SIZE + 1))
    one = np.arange(SIZE) == rng.integers(SIZE)
    found = {
        "certain but for 5e-4": np.where(one, 0.9995 * softmax.sum() / 5e-4, softmax),
        "Zipf": zipf,
        "uniform": np.ones(SIZE),
        "softmax of normals": softmax,
        "peaked": np.where(one, 9 * zipf.sum(), zipf),
        "top-k 50": np.where(softmax >= np.sort(softmax)[-50], softmax, 0.0),
    }
    return {name: (weights / weights.sum()).astype(np.float32) for name, weights in found.items()}


def nearly(p: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """``p`` with 3e-4 of its mass twice and half of the rest 0.1 % up: a refusal leaves less than a thousandth."""
    order = rng.permutation(np.flatnonzero(p))
    light = order[p[order] < 3e-4]
    twice = light[np.cumsum(p[light]) <= 3e-4]
    q = p.astype(np.float64)
    q[order[::2]] *= 1.001
    q[twice] = 2 * p[twice]
    return (q / q.sum()).astype(np.float32)


def cases(chain: bool) -> Iterator[tuple[str, np.ndarray, np.ndarray, list[int]]]:
    """A name, ``p [3 V]`` and ``q [3 V]`` in float32, and the tokens of one node or two, siblings or a chain."""
    rng = np.random.default_rng(0)
    targets = laws(rng)
    drafts = laws(rng)
    for of, p in targets.items():
        for by, q in ({"nearly the target": nearly(p, rng)} | drafts).items():
            # Of the tokens that can be refused the most likely draft, a likely one and a rare one; and any.
            fewer = np.where((p < q) | (p == q).all(), q, 0.0).astype(np.float64)
            rare = np.flatnonzero((p < q) & (q < 1e-4))
            first = [int(fewer.argmax()), int(rng.choice(SIZE, p=fewer / fewer.sum()))]
            first += [int(rng.choice(some)) for some in (rare, np.flatnonzero(q)) if some.size]
            for index, token in enumerate(first):
                after = targets[rng.choice(list(targets))]
                if chain:
                    second = nearly(after, rng) if by == "nearly the target" else drafts[rng.choice(list(drafts))]
                else:  # drawn without replacement
                    rest = np.where(np.arange(SIZE) == token, 0.0, q).astype(np.float64)
                    second = (rest / rest.sum()).astype(np.float32)
                below = [int(rng.choice(SIZE, p=second / second.sum(dtype=np.float64)))] if index % 2 == 0 else []
                yield f"{of}, drafted by {by}", np.stack([p, after, p]), np.stack([q, q, second]), [token, *below]


def counted(inside: Callable[[np.ndarray], np.ndarray], guess: np.ndarray) -> np.ndarray:
    """How many values of a uniform lie inside, for many at once; looked for near a guess first, then everywhere."""
    guess = np.clip(np.round(guess * VALUES), 0, VALUES).astype(int)
    low = np.maximum(guess - NEAR, 0)
    high = np.minimum(guess + NEAR, VALUES)
    at = lambda values: inside(np.clip(values, 0, VALUES - 1))
    low = np.where((low == 0) | at(low - 1), low, 0)
    high = np.where((high == VALUES) | ~at(high), high, VALUES)
    while (low < high).any():
        middle = (low + high) // 2
        yes = at(middle) & (low < high)
        low = np.where(yes, middle + 1, low)
        high = np.where(yes, high, np.minimum(high, middle))
    return low


def boundaries(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the digits of a draw change: of the first digit, and of each next one behind its heaviest prefixes.

    Returns:
        Each boundary's uniforms, of which its own is the share below it and those before it lead to its prefix; which
        of them is its own; and its token with the digits after it cut off.
    """
    masses = np.zeros(64**DIGITS)
    masses[: weights.size] = weights
    uniforms = []
    places = []
    tokens = []
    prefixes = [((), 0)]
    for digit in range(DIGITS):
        longer = []
        for way, prefix in prefixes:
            size = 64 ** (DIGITS - digit - 1)
            own = masses[prefix * 64 * size : (prefix + 1) * 64 * size].reshape(64, size).sum(axis=1)
            ends = np.cumsum(own) / own.sum()
            for index in range(64):
                uniforms.append([*way, ends[index], *[0.5] * (DIGITS - digit - 1)])
                places.append(digit)
                tokens.append(prefix * 64 + index)
            for index in np.argsort(own)[::-1][:SEARCHED]:
                if own[index] > 1e-4 * own.sum():
                    longer.append(((*way, ends[index] - own[index] / own.sum() / 2), prefix * 64 + int(index)))
        prefixes = longer[:SEARCHED]
    return np.array(uniforms), np.array(places), np.array(tokens)


def check_thresholds(name: str, most: int | None = None) -> dict[str, float]:
    """The largest deviation of a threshold, as a share of what is emitted, and how many were looked at.

    Args:
        name: Of the rule.
        most: How many cases; all of them if none is said.
    """
    rule, formula, parents = RULES[name]
    points = rule is verify_points
    tree = jnp.array([parents], jnp.int32)

    # Compiled here and now: a program of an earlier call would not know what has changed since.
    def decided(tokens, valid, p, q, accept, choose):
        """Of many uniforms; whatever does not depend on them is computed once."""

        def one(accept, choose):
            draft = Draft(tokens=tokens, parents=tree, valid=valid, probs=None if points else q[None])
            verdict = rule(draft, p[None], accept=accept[None], choose=choose[None], max_depth=2)
            return verdict.path[0], verdict.next_token[0]

        return jax.vmap(one, (0 if accept.ndim > 1 else None, 0 if choose.ndim > 1 else None))(accept, choose)

    decided = jax.jit(decided, compiler_options=OPTIMISED)
    looked = 0
    accepting = 0.0
    choosing = 0.0
    for case, p, q, tokens in itertools.islice(cases(formula is block_rule), most):
        nodes = np.arange(1, len(tokens) + 1)
        if points:
            q = np.zeros_like(q)
            q[nodes, tokens] = 1.0
        wanted = formula(p.astype(np.float64), q.astype(np.float64), tokens)
        padded = jnp.array([[0, *tokens, 0][:3]], jnp.int32)
        inputs = padded, jnp.arange(3)[None] <= nodes[-1], jnp.asarray(p), jnp.asarray(q)

        def accepted(values, inputs=inputs, nodes=nodes):
            """Whether each node is, the other one refused."""
            dice = np.full((2, 3), TOP, np.float32)
            dice[nodes - 1, nodes] = values / VALUES
            path = np.asarray(decided(*inputs, dice, jnp.full(DIGITS, 0.5, jnp.float32))[0])
            return (path[nodes - 1] == nodes[:, None]).any(axis=1)

        shares, stakes = np.array(wanted.accept).T
        certain = shares >= TOP
        if formula is token_rule and certain[0]:  # no sibling is asked
            shares[1:] = 0.0
        if formula is block_rule and certain[-1]:  # the last of a chain, and so all of it
            shares[:] = 1.0
        off = stakes * np.abs(counted(accepted, shares) / VALUES - shares)
        assert off.max() < TOLERANCE, f"{name}: {case}: thresholds {shares}, off by {off} of what is emitted"
        looked = looked + len(off)
        accepting = max(accepting, off.max())
        if certain.any() or not wanted.left.any():
            continue

        uniforms, places, ids = boundaries(wanted.left)
        rows = np.arange(len(ids))
        missing = 64 * (1 + SEARCHED * (DIGITS - 1)) - len(ids)

        def below(values, inputs=inputs, uniforms=uniforms, places=places, ids=ids, rows=rows, missing=missing):
            tried = uniforms.copy()
            tried[rows, places] = values / VALUES
            tried = np.pad(tried, ((0, missing), (0, 0))).astype(np.float32)
            chosen = np.asarray(decided(*inputs, jnp.full(3, TOP, jnp.float32), tried)[1])[: len(ids)]
            return chosen // 64 ** (DIGITS - 1 - places) <= ids

        off = wanted.refused * np.abs(counted(below, uniforms[rows, places]) / VALUES - uniforms[rows, places])
        worst = int(off.argmax())
        assert off[worst] < TOLERANCE, (
            f"{name}: {case}: the share of digits up to {ids[worst]} should be {uniforms[worst, places[worst]]:.7f}; "
            f"off by {off[worst]:.2g} of what is emitted"
        )
        looked = looked + len(ids)
        choosing = max(choosing, off.max())
    return {"thresholds": looked, "accepting": accepting, "choosing": choosing}


@pytest.mark.parametrize("name", RULES)
def test_at_128256_tokens_every_threshold_is_that_of_the_formula_for(name: str) -> None:
    found = check_thresholds(name)
    assert found["thresholds"] > 40_000
