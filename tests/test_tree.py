"""Trees as integers, and their growth against the published algorithm written out again in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_verify import random_trees

from eagle3_jax.drafters._grow import Level, grow
from eagle3_jax.tree import Chain, DynamicTree, StaticTree, ancestor_mask, depths

BATCH, DRAFT_VOCABULARY = 2, 9


def test_every_node_sees_itself_and_its_ancestors() -> None:
    draft, _ = random_trees(32, 10, 5, seed=0)
    mask = np.asarray(ancestor_mask(draft.parents, 9))
    for row, parents in enumerate(draft.parents.tolist()):
        for node in range(10):
            assert set(np.flatnonzero(mask[row, node])) == {0, *oracle.path_to(parents, node)}
    levels = np.asarray(depths(jnp.array(mask)))
    assert levels.tolist() == [[len(oracle.path_to(row, node)) for node in range(10)] for row in draft.parents.tolist()]


def test_the_documented_example_of_a_mask_holds() -> None:
    mask = ancestor_mask(jnp.array([[-1, 0, 0, 1]], jnp.int32), 2)
    assert mask[0].astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]


def test_a_static_tree_is_numbered_by_level_then_parent_then_rank() -> None:
    tree = StaticTree(((0, 0, 0), (1,), (0,), (1, 0), (0, 1), (0, 0)))
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert tree.parents == (-1, 0, 0, 1, 1, 2, 3)
    assert (tree.num_nodes, tree.max_depth) == (7, 3)
    assert tree == StaticTree(tuple(reversed(tree.paths))) and hash(tree) == hash(StaticTree(tree.paths))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Chain(0), "at least 1"),
        (lambda: DynamicTree(num_nodes=1, max_depth=1, top_k=1), "num_nodes is 1"),
        (lambda: DynamicTree(num_nodes=4, max_depth=0, top_k=1), "max_depth is 0"),
        (lambda: DynamicTree(num_nodes=4, max_depth=2, top_k=0), "top_k is 0"),
        (lambda: DynamicTree(num_nodes=8, max_depth=2, top_k=2), "give at most 7 nodes"),
        (lambda: DynamicTree(num_nodes=4, max_depth=4, top_k=2), "at least 5"),
        (lambda: StaticTree(()), "at least one path"),
        (lambda: StaticTree(((0,), (1, 0))), "no parent"),
        (lambda: StaticTree(((0,), (-1,))), "no parent"),
        (lambda: StaticTree(((0,), (0,))), "twice"),
    ],
)
def test_a_tree_that_cannot_be_says_why(build, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


class Network:
    """A draft network without weights: logits follow from the path of draft ids that leads to a node."""

    def __init__(self, seed: int):
        self.mixing = np.random.default_rng(seed).normal(size=(6, DRAFT_VOCABULARY)).astype(np.float32)
        self.embedding = np.random.default_rng(seed + 1).normal(size=(64, 6)).astype(np.float32)

    def start(self, batch: int) -> np.ndarray:
        return np.stack([self.embedding[row] for row in range(batch)])

    def step(self, carry, tokens, where=np):
        """The next carry; rounded, so that both sides do the same float32 arithmetic."""
        return where.round((carry * np.float32(0.5) + where.asarray(self.embedding)[tokens]) * 64) / np.float32(64)

    def logits(self, carry, where=np):
        return where.round((carry @ where.asarray(self.mixing)) * 64) / np.float32(64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def top(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]


def grown_by_the_paper(network: Network, row: int, tree: DynamicTree, ids: np.ndarray) -> tuple[list[int], list[int]]:
    """EAGLE-2: expand the best ``k`` of each level by cumulative log-probability, then keep the best of them all."""
    pool: list[tuple[float, int, int]] = []  # score, token, index of the parent in the pool (-1 the root)
    carry = network.start(BATCH)[row]
    scores = log_softmax(network.logits(carry))
    frontier = [(len(pool) + rank, draft_id, carry) for rank, draft_id in enumerate(top(scores.tolist(), tree.top_k))]
    pool += [(scores[draft_id], int(ids[draft_id]), -1) for _, draft_id, _ in frontier]
    frontier = [(index, pool[index][1], carry) for index, _, carry in frontier]
    for _ in range(tree.max_depth - 1):
        level = []
        for index, token, carry in frontier:
            after = network.step(carry, token)
            scores = log_softmax(network.logits(after))
            for draft_id in top(scores.tolist(), tree.top_k):
                level.append((pool[index][0] + scores[draft_id], int(ids[draft_id]), index, after))
        base = len(pool)
        pool += [candidate[:3] for candidate in level]
        best = top([candidate[0] for candidate in level], tree.top_k)
        frontier = [(base + slot, level[slot][1], level[slot][3]) for slot in best]
    chosen = sorted(top([candidate[0] for candidate in pool], tree.num_nodes - 1))
    parents = [0 if pool[index][2] < 0 else 1 + chosen.index(pool[index][2]) for index in chosen]
    return [pool[index][1] for index in chosen], parents


def check_dynamic_growth(seed: int) -> None:
    rng = np.random.default_rng(seed)
    width, depth = int(rng.integers(1, 5)), int(rng.integers(1, 5))
    most = 1 + width + (depth - 1) * width**2
    tree = DynamicTree(num_nodes=int(rng.integers(depth + 1, most + 1)), max_depth=depth, top_k=width)
    network = Network(100 + seed)
    ids = np.sort(rng.permutation(64)[:DRAFT_VOCABULARY]).astype(np.int32)

    def run(tokens, carry, level, mask, memory):
        assert mask.shape == (BATCH, width, (level + 1) * width)
        assert np.array_equal(mask.sum(-1), np.full((BATCH, width), level + 1)), "a node sees one node of each level"
        after = network.step(carry, tokens, jnp)
        return Level(logits=network.logits(after, jnp), carry=after, memory=memory)

    start = jnp.array(network.start(BATCH))[:, None]
    root = jnp.array([3, 5], jnp.int32)
    draft = grow(
        tree, root=root, first=Level(network.logits(start, jnp), start, ()), run=run, draft_to_target=jnp.array(ids)
    )
    assert draft.tokens[:, 0].tolist() == [3, 5] and bool(draft.valid.all()) and draft.probs is None
    for row in range(BATCH):
        tokens, parents = grown_by_the_paper(network, row, tree, ids)
        assert draft.tokens[row, 1:].tolist() == tokens
        assert draft.parents[row].tolist() == [-1, *parents]


@pytest.mark.parametrize("block", range(5))
def test_a_dynamic_tree_grows_as_eagle_2_describes(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        check_dynamic_growth(seed)


def test_a_static_tree_takes_the_token_of_each_rank_under_its_parent() -> None:
    tree, network = StaticTree(((0,), (2,), (0, 1), (2, 0), (2, 0, 3))), Network(7)
    ids = np.arange(DRAFT_VOCABULARY, dtype=np.int32) * 3

    def run(tokens, carry, level, mask, memory):
        after = network.step(carry, tokens, jnp)
        return Level(logits=network.logits(after, jnp), carry=after, memory=memory)

    start = jnp.array(network.start(BATCH))[:, None]
    first = Level(network.logits(start, jnp), start, ())
    draft = grow(tree, root=jnp.zeros((BATCH,), jnp.int32), first=first, run=run, draft_to_target=jnp.array(ids))
    for row in range(BATCH):
        for node, path in enumerate(tree.paths, 1):
            carry, token = network.start(BATCH)[row], 0
            for depth, rank in enumerate(path):
                carry = network.step(carry, token) if depth else carry
                token = int(ids[top(network.logits(carry).tolist(), rank + 1)[rank]])
            assert int(draft.tokens[row, node]) == token
    assert draft.parents[0].tolist() == list(tree.parents)
