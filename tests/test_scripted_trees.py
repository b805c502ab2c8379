"""Trees with deep acceptance: one branch of every draft is the target's text, the others are wrong.

Random heads rarely have a deep node accepted. Here each round accepts as deep as the tree is, on
another branch each time, so masks, depths, commits and the last slots of a cache all matter.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import greedy_texts
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tables
import tiny
from jaxtyping import Array

from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter, SpeculativeDecoder
from eagle3_jax.testing.scripted import FixedTree, RootState
from eagle3_jax.types import Draft, SamplingParams

pytestmark = pytest.mark.core

VOCABULARY = 13


@dataclasses.dataclass(frozen=True)
class ScriptedTree(FixedTree):
    """Proposes a fixed tree in which the path to one of the deepest nodes is the script.

    It is another node in every round. The parameters ``[B S]`` say what comes at each place. Every
    other node is off by its own number, never right.
    """

    @property
    def deepest(self) -> list[list[int]]:
        """Paths of full depth, the last one first."""
        paths = [oracle.path_to(self.parents, node) for node in range(len(self.parents))]
        return [path for path in reversed(paths) if len(path) == self.max_depth]

    def propose(
        self, params: Any, state: RootState, keys: Array, sampling: SamplingParams
    ) -> Draft:
        right = np.zeros((len(self.deepest), self.num_nodes), bool)
        for index, path in enumerate(self.deepest):
            right[index, path] = True
        # Off by the number of the node, which is below V: never right, and siblings differ.
        off = jnp.arange(self.num_nodes, dtype=jnp.int32)[None]
        chosen = jnp.asarray(right)[state.length % len(self.deepest)]
        script = self.scripted(params, state)
        return self.draft(state, jnp.where(chosen, script, (script + off) % VOCABULARY))


TREES = {
    "one wrong sibling in front, N = G + 2": (-1, 0, 0, 2, 3),
    "one wrong sibling behind, N = G + 2": (-1, 0, 0, 1, 3),
    "a wrong sibling of the last node, N = G + 2": (-1, 0, 1, 2, 2),
    "two whole branches": (-1, 0, 0, 1, 2, 3, 4),
    "a bushy one": (-1, 0, 0, 0, 1, 2, 2, 3, 5, 6, 7, 7),
}


def scripted(tree: str) -> LoadedDrafter:
    return LoadedDrafter(ScriptedTree(TREES[tree]), greedy_texts.scripted(0).params)


@pytest.mark.parametrize("tree", TREES)
def test_the_targets_own_branch_is_accepted_to_its_end_and_the_text_is_plain_with(
    tree: str,
) -> None:
    """The text is that of plain decoding and every round accepts the full depth, at the smallest capacity."""
    loop, params = tiny.bind(greedy_texts.TARGET, scripted(tree))
    batch = tiny.prompts(greedy_texts.PROMPTS, limit=greedy_texts.LIMITS)
    outcome = loops.generate(
        loop, params, batch, capacity=int(batch.limit.max()) + loop.drafter.num_nodes
    )
    assert tiny.outputs(outcome, batch) == greedy_texts.expected()
    accepted = np.asarray(outcome.stats.num_accepted_tokens)
    rounds = np.asarray(outcome.stats.num_drafts)
    assert np.array_equal(accepted, rounds * loop.drafter.max_depth)
    assert accepted.sum() > 20


def test_a_tree_loses_no_node_where_the_text_ends_with_its_bucket() -> None:
    """The deepest nodes of the last rounds are in the slots after a bucket.

    Texts end with their bucket. The target is a table: a random decoder hardly minds that a token
    does not see itself.
    """
    limit = 128
    target = tables.target(
        np.random.default_rng(0).normal(size=(VOCABULARY**3, VOCABULARY)), order=3
    )

    sizes = range(limit - 18, limit - 12)
    prompts = [[(7 * i + 3 * size) % VOCABULARY for i in range(size)] for size in sizes]
    longer = SpeculativeDecoder(target).generate(prompts, max_new_tokens=24).tokens
    texts = [[*prompt, *text] for prompt, text in zip(prompts, longer, strict=True)]
    script = jnp.array([[*text, *[0] * (limit + 24 - len(text))] for text in texts], jnp.int32)

    drafter = LoadedDrafter(ScriptedTree(TREES["a bushy one"]), script)
    result = SpeculativeDecoder(target, drafter).generate(
        prompts, max_new_tokens=[limit - size for size in sizes]
    )
    assert result.tokens == [text[size:limit] for text, size in zip(texts, sizes, strict=True)]

    depth = drafter.drafter.max_depth
    for size, row in zip(sizes, result.rows, strict=True):
        assert int(row.stats.num_accepted_tokens) == -(-(limit - size - 1) // (depth + 1)) * depth
