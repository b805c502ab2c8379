"""Trees as integers, and their growth against a second implementation of the paper in numpy."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from random_drafts import random_trees
from scipy.special import log_softmax

from eagle3_jax.checks import per_row
from eagle3_jax.drafters.base import grow
from eagle3_jax.drafters.grow import DraftInputs, Level
from eagle3_jax.sampling import row_keys
from eagle3_jax.topology import DynamicTree, StaticTree
from eagle3_jax.tree import ancestor_mask, depths
from eagle3_jax.types import Draft, DraftSampling, SamplingParams

pytestmark = pytest.mark.core

BATCH = 2
DRAFT_VOCABULARY = 9


def test_every_node_sees_itself_and_its_ancestors() -> None:
    draft, _ = random_trees(32, 10, 5, seed=0)
    mask = np.asarray(ancestor_mask(draft.parents, 9))
    for row, parents in enumerate(draft.parents.tolist()):
        for node in range(10):
            assert set(np.flatnonzero(mask[row, node])) == {0, *oracle.path_to(parents, node)}
    levels = np.asarray(depths(jnp.array(mask)))
    assert levels.tolist() == [
        [len(oracle.path_to(row, node)) for node in range(10)] for row in draft.parents.tolist()
    ]


def test_a_static_tree_is_numbered_by_level_then_parent_then_rank() -> None:
    tree = StaticTree(((0, 0, 0), (1,), (0,), (1, 0), (0, 1), (0, 0)))
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 3)
    assert tree.num_nodes == 7
    assert tree.max_depth == 3
    assert tree == StaticTree(tuple(reversed(tree.paths)))
    assert hash(tree) == hash(StaticTree(tree.paths))


@dataclasses.dataclass
class Network:
    """A draft network of a few numbers, whose logits depend on the tokens on the path to a node.

    Everything is a small multiple of a power of two, so that numpy and XLA agree to the last bit.
    """

    mixing: np.ndarray
    embedding: np.ndarray

    @classmethod
    def random(cls, seed: int) -> Network:
        rng = np.random.default_rng(seed)
        draw = lambda *shape: (rng.integers(-64, 65, shape) / 64).astype(np.float32)
        return cls(mixing=draw(6, DRAFT_VOCABULARY), embedding=draw(64, 6))

    def step(self, carry, tokens):
        return carry * 0.5 + self.embedding[tokens]

    def logits(self, carry):
        return carry @ self.mixing

    def grow(self, tree: DynamicTree | StaticTree, ids: np.ndarray) -> Draft:
        return _compiled(tree, self.mixing, self.embedding, jnp.array(ids))


def _grown(tree, mixing, embedding, ids) -> Draft:
    network = Network(mixing, embedding)

    def run(tokens, carry, level, mask, memory):
        after = network.step(carry, tokens)
        return Level(logits=network.logits(after), carry=after, memory=memory)

    start = embedding[:BATCH, None]
    root = jnp.arange(3, 3 + BATCH, dtype=jnp.int32)
    first = Level(network.logits(start), start, ())
    inputs = DraftInputs(
        root,
        first,
        run,
        ids,
        3 * DRAFT_VOCABULARY,
        row_keys(0, BATCH),
        per_row(SamplingParams(), BATCH),
    )
    return grow(tree, DraftSampling.GREEDY, inputs)[0]


_compiled = jax.jit(_grown, static_argnums=0)


def top(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def grown_by_the_paper(
    network: Network, row: int, tree: DynamicTree, ids: np.ndarray
) -> tuple[list[int], list[int]]:
    """Grows a tree as EAGLE-2 does.

    Expands the best ``k`` nodes of each level, then keeps the best of all.
    """
    #: Score, token, index of the parent in the pool (-1 the root).
    pool: list[tuple[float, int, int]] = []
    carry = network.embedding[row]
    scores = log_softmax(network.logits(carry).astype(np.float64))
    pool += [
        (scores[draft_id], int(ids[draft_id]), -1) for draft_id in top(scores.tolist(), tree.top_k)
    ]
    frontier = [(index, token, carry) for index, (_, token, _) in enumerate(pool)]

    for _ in range(tree.max_depth - 1):
        level = []
        for index, token, carry in frontier:
            after = network.step(carry, token)
            scores = log_softmax(network.logits(after).astype(np.float64))
            for draft_id in top(scores.tolist(), tree.top_k):
                level.append((pool[index][0] + scores[draft_id], int(ids[draft_id]), index, after))

        base = len(pool)
        pool += [candidate[:3] for candidate in level]
        best = top([candidate[0] for candidate in level], tree.top_k)
        frontier = [(base + slot, level[slot][1], level[slot][3]) for slot in best]

    chosen = sorted(top([candidate[0] for candidate in pool], tree.num_nodes - 1))
    parents = [0 if pool[index][2] < 0 else 1 + chosen.index(pool[index][2]) for index in chosen]
    return [pool[index][1] for index in chosen], parents


def preferring(*tokens: int) -> Network:
    """Returns a network whose scores tie exactly, in float32 as in float64.

    Some tokens, or all, share the mass.


    If one token has all of it, its log-probability is 0, so a child ties with its parent.
    """
    mixing = np.zeros((6, DRAFT_VOCABULARY), np.float32)
    mixing[:, list(tokens)] = 200.0
    return Network(mixing, np.full((64, 6), 1 / 6, np.float32))


TIED = (preferring(), preferring(4), preferring(2, 5))
TREES = [(5, 3, 2), (4, 3, 1), (3, 1, 4), (13, 3, 3), (21, 2, 4)]


@pytest.mark.parametrize(("num_nodes", "max_depth", "top_k"), TREES)
def test_a_dynamic_tree_grows_as_eagle_2_describes(
    num_nodes: int, max_depth: int, top_k: int
) -> None:
    """Of equal scores the candidate with the lower index is taken."""
    tree = DynamicTree(num_nodes=num_nodes, max_depth=max_depth, top_k=top_k)
    rng = np.random.default_rng(0)

    for network in [*map(Network.random, range(10)), *TIED]:
        ids = np.sort(rng.permutation(64)[:DRAFT_VOCABULARY]).astype(np.int32)
        draft = network.grow(tree, ids)
        assert draft.tokens[:, 0].tolist() == [3, 4]
        assert bool(draft.valid.all())
        assert draft.probs is None

        for row in range(BATCH):
            tokens, parents = grown_by_the_paper(network, row, tree, ids)
            assert draft.tokens[row, 1:].tolist() == tokens
            assert draft.parents[row].tolist() == [-1, *parents]
