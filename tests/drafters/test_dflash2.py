"""DFlash2 against a second implementation in PyTorch: networks, candidates, distributions and trees."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from checkpoints import loaded_head, target_tables
from convolved_heads import ConvolvedHead
from scipy.special import log_softmax, softmax

from eagle3_jax.checks import per_row
from eagle3_jax.drafters.dflash2 import DFlash2Drafter
from eagle3_jax.sampling import row_keys
from eagle3_jax.topology import DynamicTree, StaticTree
from eagle3_jax.types import Draft, DraftSampling, Observation, SamplingParams

pytestmark = [pytest.mark.core, pytest.mark.torch]

SCALES = (
    ("input_embedding_scale", 1.5),
    ("output_multiplier", 0.5),
    ("final_logit_softcapping", 3.0),
)
HEADS = {
    "two layers": ConvolvedHead(),
    "three taps, one channel in a group": ConvolvedHead(layers=1, taps=3, group=1, block=6),
    "no tap before its own": ConvolvedHead(layers=1, taps=1, group=32, candidates=1),
    "windows behind and ahead": ConvolvedHead(
        layers=3, sliding=(True, False, True), window=3, block=6
    ),
    "scales": ConvolvedHead(layers=1, scales=SCALES, candidates=61, own_output=True),
    "causal, biases, one key head": ConvolvedHead(
        layers=1, causal=True, bias=False, heads=6, kv_heads=1, head_dim=10, theta=500.0
    ),
}
TREE = ConvolvedHead(layers=1, block=4, candidates=4)


def twin_of(head: ConvolvedHead) -> Any:
    import torch
    from dflash2_torch import Twin

    tensors = {name: torch.tensor(value) for name, value in head.tensors().items()}
    return Twin(head.config(), tensors, tuple(map(torch.tensor, target_tables())))


def blocks_of(
    head: ConvolvedHead, features: np.ndarray, lengths: Any, roots: Any, count: int
) -> list[tuple[Any, Any]]:
    """Returns hidden states and logits of ``count`` masks after each row's features."""
    import torch

    run = twin_of(head).block
    return [
        run(torch.tensor(row[:length]).flatten(1), torch.tensor(root), count)
        for row, length, root in zip(features, lengths, roots, strict=True)
    ]


@pytest.mark.parametrize("name", HEADS)
def test_a_block_is_that_of_its_independent_twin_after_every_rollback(name: str) -> None:
    """Three rounds on two rows that commit different numbers of tokens; the twin has no cache."""
    head = HEADS[name]
    drafter, params = loaded_head(head.write)
    assert drafter.max_depth == head.predicted
    random = np.random.default_rng(3)
    tokens = random.integers(0, 61, (2, 40))
    features = random.normal(size=(2, 40, len(head.ids), 32)).astype(np.float32)

    @jax.jit
    def step(state: Any, seen: Observation) -> Any:
        state = drafter.observe(params, state, seen)
        network = drafter.bind(params)
        hidden = drafter.read_block(params, network, state)
        logits = drafter.logits(params, network, hidden)
        keys = jax.random.split(jax.random.key(0), 2)
        return state, hidden, logits, drafter.propose(params, state, keys, SamplingParams()).tokens

    state = drafter.init(params, 2, 40)
    twin = twin_of(head)
    for known, seen in tiny.ragged_rounds(tokens, features, ((9, 4), (1, 15), (3, 0))):
        state, *ours = step(state, seen)
        roots = tokens[[0, 1], known]
        blocks = blocks_of(head, features, known, roots, head.predicted)
        for row, (hidden, logits) in enumerate(blocks):
            np.testing.assert_allclose(ours[0][row], hidden, atol=3e-5)
            np.testing.assert_allclose(ours[1][row], logits, atol=1e-4)
            chain, _ = twin.chain(hidden, logits, int(roots[row]))
            assert ours[2][row].tolist() == [roots[row], *chain]


def drafted(
    drafter: DFlash2Drafter, params: Any, temperature: float = 0.0
) -> tuple[Draft, list[tuple[Any, Any]], np.ndarray]:
    """Returns a draft of two rows, and the twin's block and root of each."""
    random = np.random.default_rng(5)
    features = random.normal(size=(2, 7, len(TREE.ids), 32)).astype(np.float32)
    length = np.array([7, 3])
    roots = np.array([11, 4])
    sampling = per_row(SamplingParams(temperature=temperature), 2)

    @jax.jit
    def run(params: Any, seen: Observation) -> Draft:
        state = drafter.observe(params, drafter.init(params, 2, 16), seen)
        return drafter.propose(params, state, row_keys(3, 2), sampling)

    draft = run(params, tiny.seen_of(np.zeros((2, 7)), features, length, roots))
    return draft, blocks_of(TREE, features, length, roots, drafter.max_depth), roots


def scores_after(block: tuple[Any, Any], before: list[int]) -> np.ndarray:
    """Returns the twin's scores ``[k V]`` after the first ``k`` tokens of a path, root included."""
    import torch

    twin = twin_of(TREE)
    hidden, logits = block
    rows = [
        twin.scores(hidden[k], logits[k], torch.tensor(token)) for k, token in enumerate(before)
    ]
    return torch.stack(rows).numpy()


def paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """Returns the tokens from below the root to every node."""
    node_paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(
        draft.tokens[row, 1:].tolist(), draft.parents[row, 1:].tolist(), strict=True
    ):
        node_paths.append((*node_paths[parent], token))
    return node_paths[1:]


def test_a_dynamic_tree_holds_the_likeliest_of_all_prefixes() -> None:
    """The whole tree of 84 prefixes of candidates, each scored by the twin."""
    shape = DynamicTree(num_nodes=5, max_depth=3, top_k=4)
    draft, blocks, roots = drafted(*loaded_head(TREE.write, shape))
    for row, (block, root) in enumerate(zip(blocks, roots, strict=True)):
        candidates = [np.argsort(-logits)[:4].tolist() for logits in block[1].numpy()]
        score = {}
        for depth in (1, 2, 3):
            for path in itertools.product(*candidates[:depth]):
                steps = log_softmax(scores_after(block, [int(root), *path[:-1]]), -1)
                score[path] = sum(step[token] for step, token in zip(steps, path, strict=True))
        best = sorted(score, key=score.__getitem__, reverse=True)[:4]
        assert set(paths(draft, row)) == set(best)


def test_a_static_tree_takes_candidates_by_rank_after_their_parents() -> None:
    tree = StaticTree(((0,), (2,), (0, 1), (2, 0), (2, 0, 3)))
    draft, blocks, roots = drafted(*loaded_head(TREE.write, tree))
    for row, (block, root) in enumerate(zip(blocks, roots, strict=True)):
        expected = set()
        for ranks in tree.paths:
            tokens = [int(root)]
            for rank in ranks:
                tokens.append(int(np.argsort(-scores_after(block, tokens)[-1])[rank]))
            expected.add(tuple(tokens[1:]))
        assert set(paths(draft, row)) == expected


@pytest.mark.parametrize("shape", [None, StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)))])
def test_sampled_tokens_declare_their_distribution_after_the_token_before(
    shape: StaticTree | None,
) -> None:
    """Zero outside of the candidates; a younger sibling's distribution lacks its elders."""
    head = loaded_head(TREE.write, shape, DraftSampling.PROBABILISTIC)
    draft, blocks, roots = drafted(*head, temperature=1.7)
    for row, (block, root) in enumerate(zip(blocks, roots, strict=True)):
        elders: dict[tuple[int, ...], list[int]] = {}
        for node, path in enumerate(paths(draft, row), 1):
            scores = scores_after(block, [int(root), *path[:-1]])[-1]
            siblings = elders.setdefault(path[:-1], [])
            scores[siblings] = -np.inf
            siblings.append(path[-1])
            expected = softmax(scores / 1.7)
            assert np.count_nonzero(expected) == 5 - len(siblings)
            np.testing.assert_allclose(draft.probs[row, node], expected, atol=2e-5)
            assert expected[path[-1]] > 0


def test_a_row_of_temperature_zero_takes_point_masses() -> None:
    head = loaded_head(TREE.write, None, DraftSampling.PROBABILISTIC)
    draft, blocks, roots = drafted(*head)
    for row, (block, root) in enumerate(zip(blocks, roots, strict=True)):
        chain, _ = twin_of(TREE).chain(*block, int(root))
        assert draft.tokens[row, 1:].tolist() == chain
        assert draft.probs[row, [1, 2, 3], chain].tolist() == [1.0] * 3


def test_no_node_has_more_children_than_candidates() -> None:
    wide = DynamicTree(num_nodes=7, max_depth=3, top_k=5)
    with pytest.raises(ValueError, match="5 children of a node, and a DFlash2 row has 4 cand"):
        loaded_head(TREE.write, wide)
    with pytest.raises(ValueError, match="at most 4"):
        loaded_head(TREE.write, StaticTree(((0,), (4,))))
