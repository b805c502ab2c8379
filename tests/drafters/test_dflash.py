"""Block drafters against a second implementation in numpy: networks, distributions and trees."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from block_heads import BlockHead, biased, chosen_ids, greedy_chain, run_block
from checkpoints import loaded_head, target_tables
from scipy.special import log_softmax, softmax

from eagle3_jax.checks import per_row
from eagle3_jax.drafters.dflash import DFlashDrafter
from eagle3_jax.sampling import row_keys
from eagle3_jax.topology import Chain, DynamicTree, StaticTree
from eagle3_jax.types import Draft, DraftSampling, Observation, SamplingParams

pytestmark = pytest.mark.core

HEADS = {
    "DFlash": BlockHead(),
    "DFlash of a reduced vocabulary": BlockHead(draft_vocab=40, bias=True, theta=500.0),
    "JetSpec": BlockHead(causal=True, layers=1),
    "DSpark": BlockHead(from_anchor=True, rank=6, confidence="markov", block=4),
    "DSpark behind masks": BlockHead(rank=6, confidence="hidden", draft_vocab=40, block=4),
    "DSpark, gated": BlockHead(from_anchor=True, rank=6, markov="gated", block=4),
    "DSpark, recurrent": BlockHead(from_anchor=True, rank=6, markov="rnn", block=4),
    "DFlash, causal in windows": BlockHead(windows=(True, False)),
    "DFlash, both ways in windows": BlockHead(windows=(False, True), is_causal=False),
    "JetSpec under windows": BlockHead(windows=(True, True), causal=True, is_causal=True),
    "Muse Glimmer's assistant": BlockHead(windows=(True, False), window=2),
}
DIALECTS = {"Muse Glimmer's assistant": "transformers"}
EMBEDDING, OUTPUT = target_tables()


@pytest.mark.parametrize("name", HEADS)
def test_a_block_is_that_of_its_independent_twin_after_every_rollback(name: str) -> None:
    """Three rounds on two rows that commit different numbers of tokens; the twin has no cache."""
    head = HEADS[name]
    dialect = DIALECTS.get(name, "vllm")
    drafter, params = loaded_head(functools.partial(head.write, dialect=dialect))
    assert drafter.max_depth == head.predicted
    random = np.random.default_rng(3)
    tokens = random.integers(0, 61, (2, 40))
    features = random.normal(size=(2, 40, len(head.ids), 32)).astype(np.float32)

    @jax.jit
    def step(state: Any, seen: Observation) -> Any:
        state = drafter.observe(params, state, seen)
        network = drafter.bind(params)
        hidden = drafter.read_block(params, network, state)
        draft = drafter.propose(
            params, state, jax.random.split(jax.random.key(0), 2), SamplingParams()
        )
        sure = network.survival(hidden, draft.tokens[:, :-1]) if head.confidence else None
        return state, hidden, drafter.logits(params, network, hidden), draft.tokens, sure

    state = drafter.init(params, 2, 40)
    for known, seen in tiny.ragged_rounds(tokens, features, ((9, 4), (1, 5), (3, 0))):
        state, hidden, logits, drafted, sure = step(state, seen)
        for row in range(2):
            root = int(tokens[row, known[row]])
            truth = run_block(
                head, EMBEDDING, OUTPUT, features[row, : known[row]], root, head.predicted, dialect
            )
            np.testing.assert_allclose(hidden[row], truth.hidden, atol=1e-5)
            np.testing.assert_allclose(logits[row], truth.logits, atol=1e-4)
            chain = greedy_chain(head, truth, root)
            assert drafted[row].tolist() == [root, *chain]
            if head.confidence:
                expected = biased(head, truth, root, chain)[1]
                np.testing.assert_allclose(jax.nn.sigmoid(sure[row]), expected, atol=1e-5)


def drafted(
    head: BlockHead, drafter: DFlashDrafter, params: Any, temperature: float = 0.0
) -> tuple[Draft, jax.Array, list[Any], np.ndarray]:
    """Returns a draft of two rows, its block's logits, and the twin's block and root of each."""
    random = np.random.default_rng(5)
    features = random.normal(size=(2, 7, len(head.ids), 32)).astype(np.float32)
    length = np.array([7, 3])
    roots = np.array([11, 4])
    sampling = per_row(SamplingParams(temperature=temperature), 2)
    keys = row_keys(3, 2)

    @jax.jit
    def run(params: Any, seen: Observation) -> tuple[Draft, jax.Array]:
        state = drafter.observe(params, drafter.init(params, 2, 16), seen)
        network = drafter.bind(params)
        logits = drafter.logits(params, network, drafter.read_block(params, network, state))
        return drafter.propose(params, state, keys, sampling), logits

    seen = tiny.seen_of(np.zeros((2, 7)), features, length, roots)
    count = drafter.max_depth
    blocks = [
        run_block(head, EMBEDDING, OUTPUT, features[row, : length[row]], roots[row], count)
        for row in range(2)
    ]
    return *run(params, seen), blocks, roots


def log_probability(head: BlockHead, block: Any, root: int, path: tuple[int, ...]) -> float:
    """Returns the log-probability of a path of draft ids below the root."""
    logits, _ = biased(head, block, root, [*chosen_ids(head)[list(path)], 0, 0][:3])
    return float(sum(log_softmax(logits[level], -1)[token] for level, token in enumerate(path)))


TREES = {
    "DFlash": BlockHead(draft_vocab=6, block=4, layers=1, seed=2),
    "DSpark": BlockHead(draft_vocab=6, block=3, layers=1, rank=4, from_anchor=True, seed=2),
    "DSpark, recurrent": BlockHead(
        draft_vocab=6, block=3, layers=1, rank=4, markov="rnn", from_anchor=True, seed=2
    ),
    "DFlash under windows": BlockHead(draft_vocab=6, block=4, windows=(True, False), seed=2),
}


@pytest.mark.parametrize("name", TREES)
def test_a_dynamic_tree_holds_the_likeliest_of_all_prefixes(name: str) -> None:
    """The whole tree of 258 prefixes, each scored by the twin."""
    head = TREES[name]
    drafter, params = loaded_head(head.write, DynamicTree(num_nodes=7, max_depth=3, top_k=6))
    draft, _, blocks, roots = drafted(head, drafter, params)
    ids = chosen_ids(head)
    every = [path for depth in (1, 2, 3) for path in itertools.product(range(6), repeat=depth)]
    for row in range(2):
        score = functools.partial(log_probability, head, blocks[row], roots[row])
        best = sorted(every, key=score, reverse=True)[:6]
        assert paths(draft, row) == {tuple(ids[list(path)]) for path in best}


@pytest.mark.parametrize("name", TREES)
def test_a_static_tree_takes_tokens_by_rank_after_their_parents(name: str) -> None:
    head = TREES[name]
    tree = StaticTree(((0,), (2,), (0, 1), (2, 0), (2, 0, 3)))
    drafter, params = loaded_head(head.write, tree)
    draft, _, blocks, roots = drafted(head, drafter, params)

    for row in range(2):
        expected = set()
        for path in tree.paths:
            tokens: list[int] = []
            for level, rank in enumerate(path):
                logits, _ = biased(head, blocks[row], roots[row], [*tokens, 0, 0, 0][:3])
                tokens.append(int(chosen_ids(head)[np.argsort(-logits[level])[rank]]))
            expected.add(tuple(tokens))
        assert paths(draft, row) == expected


def paths(draft: Draft, row: int) -> set[tuple[int, ...]]:
    """Returns the tokens from below the root to every node."""
    node_paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(
        draft.tokens[row, 1:].tolist(), draft.parents[row, 1:].tolist(), strict=True
    ):
        node_paths.append((*node_paths[parent], token))
    return set(node_paths[1:])


@pytest.mark.parametrize("name", TREES)
def test_a_sampled_chain_declares_the_distribution_that_it_is_sampled_from(name: str) -> None:
    head = TREES[name]
    drafter, params = loaded_head(head.write, draft_sampling=DraftSampling.PROBABILISTIC)
    draft, _, blocks, roots = drafted(head, drafter, params, temperature=1.7)
    for row in range(2):
        tokens = draft.tokens[row, 1:].tolist()
        logits, _ = biased(head, blocks[row], roots[row], tokens)
        expected = np.zeros((3, 61))
        expected[:, chosen_ids(head)] = softmax(logits / 1.7, -1)
        np.testing.assert_allclose(draft.probs[row, 1:], expected, atol=2e-5)
        assert all(expected[step, token] > 0 for step, token in enumerate(tokens))


def test_a_causal_block_drafts_the_same_tokens_at_any_length_and_another_one_does_not() -> None:
    def same(causal: bool) -> bool:
        head = BlockHead(causal=causal, block=6, layers=1)
        drafter, params = loaded_head(head.write)
        short, long = (
            drafted(head, drafter.with_topology(Chain(count), None), params)[1] for count in (2, 5)
        )
        return np.allclose(short, long[:, :2], atol=1e-4)

    assert same(True)
    assert not same(False)
