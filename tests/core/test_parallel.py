"""Drafts from logits of one pass: what is drafted, by brute force over all prefixes, and the law of what is drawn."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.checks import per_row
from eagle3_jax.drafters.base import grow
from eagle3_jax.drafters.parallel import parallel_inputs
from eagle3_jax.sampling import row_keys
from eagle3_jax.topology import Chain, DynamicTree, Topology
from eagle3_jax.types import Draft, DraftSampling, SamplingParams

VOCAB, IDS = 13, np.array([1, 2, 4, 5, 6, 8, 9, 11, 12])


def drafted(
    topology: Topology, logits: np.ndarray, sampling: SamplingParams = SamplingParams(), drawn: bool = False
) -> Draft:
    rows = logits.shape[0]
    run = jax.jit(
        lambda logits, keys, sampling: grow(
            topology,
            DraftSampling.PROBABILISTIC if drawn else DraftSampling.GREEDY,
            parallel_inputs(
                root=jnp.full((rows,), 3, jnp.int32),
                logits=logits,
                draft_to_target=jnp.asarray(IDS[: logits.shape[-1]], jnp.int32),
                vocab_size=VOCAB,
                keys=keys,
                sampling=sampling,
            ),
        )[0]
    )
    return run(jnp.asarray(logits, jnp.float32), row_keys(7, rows), per_row(sampling, rows))


def paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The tokens from below the root to every node."""
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    found: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        found.append((*found[parents[node]], tokens[node]))
    return found[1:]


LOGITS = np.random.default_rng(0).normal(size=(2, 4, 9)) * 2


def ranked(row: int, level: int) -> np.ndarray:
    return IDS[np.argsort(-LOGITS[row, level], kind="stable")]


@pytest.mark.parametrize("depth", [1, 3, 4])
def test_a_chain_takes_the_likeliest_of_each_law(depth: int) -> None:
    draft = drafted(Chain(depth), LOGITS)
    assert draft.probs is None
    assert draft.parents.tolist() == [list(range(-1, depth))] * 2
    for row in range(2):
        assert draft.tokens[row].tolist() == [3, *(ranked(row, level)[0] for level in range(depth))]


def test_a_dynamic_tree_holds_the_likeliest_of_all_prefixes() -> None:
    """Exact where ``top_k`` is as large as the tree: no level can need more than its ``num_nodes - 1`` best."""
    draft = drafted(DynamicTree(num_nodes=10, max_depth=3, top_k=9), LOGITS)
    for row in range(2):
        logprobs = LOGITS[row] - np.log(np.exp(LOGITS[row]).sum(-1, keepdims=True))
        every = [prefix for depth in (1, 2, 3) for prefix in itertools.product(range(9), repeat=depth)]
        score = {prefix: sum(logprobs[level, token] for level, token in enumerate(prefix)) for prefix in every}
        best = sorted(every, key=lambda prefix: -score[prefix])[:9]
        assert max(map(len, best)) > 1
        assert sorted(paths(draft, row)) == sorted(tuple(int(IDS[token]) for token in prefix) for prefix in best)


def test_drawn_tokens_follow_their_laws_independently_of_each_other() -> None:
    """All 9 pairs among 40,000 rows: a pair that is 1.2 points off lies five standard deviations away."""
    logits = np.log(np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])) * 1.5
    rows = 40_000
    draft = drafted(Chain(2), np.broadcast_to(logits, (rows, 2, 3)), SamplingParams(temperature=1.5), drawn=True)
    law = np.exp(logits / 1.5)
    assert draft.probs is not None
    np.testing.assert_allclose(draft.probs[0, 1:][:, IDS[:3]], law, atol=1e-6)
    np.testing.assert_allclose(draft.probs[:, 1:].sum(-1), 1.0, atol=1e-5)
    tokens = np.searchsorted(IDS, np.asarray(draft.tokens[:, 1:]))
    seen = np.bincount(tokens[:, 0] * 3 + tokens[:, 1], minlength=9) / rows
    wanted = np.outer(*law).ravel()
    assert (np.abs(seen - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / rows)).all()


def test_no_deeper_than_there_are_laws() -> None:
    with pytest.raises(ValueError, match="a draft of 5 levels was asked for; there are logits for 4"):
        drafted(Chain(5), LOGITS)
