"""Typical acceptance compared with the rule of the paper, path by path."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy.special import softmax

from eagle3_jax import Draft, Exact, SamplingParams, StaticTree, TypicalAcceptance
from eagle3_jax.types import SamplingMode

pytestmark = pytest.mark.core

VOCAB = 7
TREES = {
    "a chain": StaticTree(((0,), (0, 0), (0, 0, 0))),
    "a tree": StaticTree(
        ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (1, 1), (0, 0, 0), (1, 0, 0), (1, 0, 1))
    ),
}


def path_by_path(
    tree: StaticTree, tokens, valid, logits, temperature, epsilon, delta
) -> tuple[list[int], int]:
    """Applies section 2.3.1: the longest accepted prefix of all paths, then the likeliest."""
    node_of = {path: node for node, path in enumerate(tree.paths, 1)} | {(): 0}
    best: tuple[int, float, list[int]] = (0, 0.0, [])

    for path in tree.paths:
        accepted = []
        likelihood = 0.0

        for depth in range(len(path)):
            parent = node_of[path[:depth]]
            node = node_of[path[: depth + 1]]
            p = softmax(logits[parent].astype(np.float64) / temperature)
            entropy = -sum(x * np.log(x) for x in p if x > 0)
            if not valid[node] or not p[tokens[node]] > min(epsilon, delta * np.exp(-entropy)):
                break
            accepted.append(node)
            likelihood += np.log(p[tokens[node]])

        if (len(accepted), likelihood) > best[:2]:
            best = (len(accepted), likelihood, accepted)

    nodes = best[2]
    return nodes, int(np.argmax(logits[nodes[-1] if nodes else 0]))


def drafts(tree: StaticTree, rows: int, seed: int) -> tuple[Draft, np.ndarray]:
    """Returns trees with distinct siblings, some padding, and logits of unlike entropies."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((rows, tree.num_nodes), np.int32)

    for parent in set(tree.parents[1:]):
        nodes = np.flatnonzero(np.array(tree.parents) == parent)
        vocabulary = np.tile(np.arange(VOCAB), (rows, 1))
        shuffled = rng.permuted(vocabulary, axis=1)
        tokens[:, nodes] = shuffled[:, : len(nodes)]

    logits = rng.normal(size=(rows, tree.num_nodes, VOCAB)) * rng.choice(
        [0.3, 1.0, 3.0, 8.0], (rows, tree.num_nodes, 1)
    )

    valid = rng.random((rows, tree.num_nodes)) > 0.1
    valid[:, 0] = True

    draft = tiny.draft_of(tokens, tree.parents, valid)
    return draft, logits.astype(np.float32)


@pytest.mark.parametrize("name", TREES)
def test_it_keeps_the_path_that_the_paper_keeps(name: str) -> None:
    tree = TREES[name]
    rows = 400
    rule = TypicalAcceptance(epsilon=0.2, delta=0.5)

    draft, logits = drafts(tree, rows, seed=3)
    temperature = np.tile(np.array([0.5, 1.0, 1.7, 0.0], np.float32), rows // 4)
    sampling = tiny.sampling_of([(row_temperature, 0, 1.0) for row_temperature in temperature])
    keys = jax.random.split(jax.random.key(0), rows)

    verdict = jax.jit(
        lambda draft, logits: rule(
            draft,
            logits,
            sampling,
            keys,
            sampling_mode=SamplingMode.TEMPERATURE,
            max_depth=tree.max_depth,
        )
    )(draft, jnp.array(logits))

    lengths = set()

    for row in range(rows):
        # A row of temperature 0 is a point mass, which 1e-6 stands for.
        inputs = tree, np.array(draft.tokens[row]), np.array(draft.valid[row]), logits[row]
        path, after = path_by_path(*inputs, temperature[row] or 1e-6, 0.2, 0.5)
        assert verdict.path[row].tolist() == path + [-1] * (tree.max_depth - len(path)), row
        assert int(verdict.num_accepted[row]) == len(path), row
        assert int(verdict.next_token[row]) == after, row
        lengths.add(len(path))

    # Every length was met.
    assert lengths == set(range(tree.max_depth + 1))


def test_a_greedy_batch_is_decided_as_the_exact_rule_decides_it() -> None:
    tree = TREES["a tree"]
    draft, logits = drafts(tree, 100, seed=4)
    keys = jax.random.split(jax.random.key(0), 100)

    decide = jax.jit(
        lambda draft, logits: [
            rule(
                draft,
                logits,
                SamplingParams(),
                keys,
                sampling_mode=SamplingMode.GREEDY,
                max_depth=3,
            )
            for rule in (TypicalAcceptance(), Exact())
        ]
    )

    greedy, exact = decide(draft, jnp.array(logits))
    assert tiny.same_bits(greedy, exact)
    assert 10 < int((greedy.num_accepted > 0).sum()) < 90
