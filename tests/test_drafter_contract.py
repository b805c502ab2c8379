"""What the loop relies on, asked of every drafter: a new method is one more row of ``ALL_DRAFTERS``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import NGram, Plain
from eagle3_jax.sampling import DraftSampling
from eagle3_jax.tree import Chain, DynamicTree
from eagle3_jax.types import Draft, Drafter, Observation, SamplingParams

TARGET = tiny.target(13)
BATCH, FED, CAPACITY = 3, 6, 32
ALL_DRAFTERS = {
    "plain": LoadedDrafter(Plain()),
    "plain, padded": LoadedDrafter(Plain(4)),
    "n-grams": LoadedDrafter(NGram(3)),
    "EAGLE-3 chain": tiny.eagle3(TARGET, Chain(3), draft_vocab_size=7),
    "EAGLE-3 sampled chain": tiny.eagle3(
        TARGET, Chain(3), draft_vocab_size=7, draft_sampling=DraftSampling.PROBABILISTIC
    ),
    "EAGLE-3 dynamic tree": tiny.eagle3(TARGET, DynamicTree(num_nodes=9, max_depth=3, top_k=3)),
    "EAGLE-3 static tree": tiny.eagle3(TARGET, tiny.STATIC_TREE),
    "EAGLE-3.1 chain": tiny.eagle3(TARGET, Chain(2), norm_output=True, fc_norm=True, num_layers=2),
}
SAMPLING = SamplingParams(
    temperature=jnp.array([0.0, 0.7, 1.5]), top_k=jnp.array([0, 3, 0], jnp.int32), top_p=jnp.array([1.0, 1.0, 0.9])
)
KEYS = jax.random.split(jax.random.key(0), BATCH)


@pytest.fixture(params=ALL_DRAFTERS)
def pair(request: pytest.FixtureRequest) -> LoadedDrafter:
    return ALL_DRAFTERS[request.param]


def observation(drafter: Drafter, length: list[int], fed: int = FED, seed: int = 0) -> Observation:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(BATCH, fed, len(drafter.aux_layers), 16))
    return Observation(
        tokens=jnp.array(rng.integers(0, 13, (BATCH, fed)), jnp.int32),
        features=jnp.array(features, jnp.float32),
        length=jnp.array(length, jnp.int32),
        next_token=jnp.array(rng.integers(0, 13, BATCH), jnp.int32),
    )


def after_prompt(pair: LoadedDrafter):
    drafter = pair.drafter
    state = drafter.init(pair.params, BATCH, CAPACITY)
    return drafter.observe(pair.params, state, observation(drafter, [6, 3, 1]))


def close(a: Draft, b: Draft) -> None:
    """Equal tokens and topology; probabilities as far as another order of sums lets them."""
    assert tiny.same_bits(a.replace(probs=None), b.replace(probs=None))
    if a.probs is not None:
        np.testing.assert_allclose(a.probs, b.probs, atol=1e-6)


def test_it_keeps_the_protocol(pair: LoadedDrafter) -> None:
    drafter = pair.drafter
    assert isinstance(drafter, Drafter)
    assert hash(drafter) == hash(drafter) and drafter.num_nodes >= 1 and drafter.max_depth >= 1


def test_every_leaf_of_its_state_leads_with_the_batch(pair: LoadedDrafter) -> None:
    for leaf in jax.tree.leaves(after_prompt(pair)):
        assert leaf.shape[0] == BATCH


def test_observing_keeps_shapes_and_types(pair: LoadedDrafter) -> None:
    first = pair.drafter.init(pair.params, BATCH, CAPACITY)
    second = after_prompt(pair)
    third = pair.drafter.observe(pair.params, second, observation(pair.drafter, [2, 1, 2], fed=2, seed=1))
    leaves = [[(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)] for state in (first, second, third)]
    assert leaves[0] == leaves[1] == leaves[2]


def test_proposing_returns_a_draft_and_no_state(pair: LoadedDrafter) -> None:
    state = after_prompt(pair)
    draft = pair.drafter.propose(pair.params, state, KEYS, SAMPLING)
    assert isinstance(draft, Draft)
    shape = (BATCH, pair.drafter.num_nodes)
    assert draft.tokens.shape == draft.parents.shape == draft.valid.shape == shape
    assert (draft.tokens.dtype, draft.parents.dtype, draft.valid.dtype) == (jnp.int32, jnp.int32, jnp.bool_)
    assert tiny.same_bits(draft, pair.drafter.propose(pair.params, state, KEYS, SAMPLING)), (
        "the state was not read only"
    )


def test_its_tree_is_topological_and_no_deeper_than_it_says(pair: LoadedDrafter) -> None:
    draft = pair.drafter.propose(pair.params, after_prompt(pair), KEYS, SAMPLING)
    root = observation(pair.drafter, [6, 3, 1]).next_token
    assert np.array_equal(draft.tokens[:, 0], root)
    assert bool(draft.valid[:, 0].all())
    for parents, tokens, valid in zip(draft.parents.tolist(), draft.tokens.tolist(), draft.valid.tolist(), strict=True):
        assert parents[0] == -1
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node)
        depth = [0]
        for node in range(1, len(parents)):
            depth.append(depth[parents[node]] + 1)
        assert max(depth) <= pair.drafter.max_depth
        assert all(0 <= token < 13 for token in tokens)
        family = [(parents[node], tokens[node]) for node in range(1, len(parents)) if valid[node]]
        assert len(set(family)) == len(family), "siblings repeat a token"


def test_what_it_declares_is_a_distribution_that_can_have_given_its_tokens(pair: LoadedDrafter) -> None:
    draft = pair.drafter.propose(pair.params, after_prompt(pair), KEYS, SAMPLING)
    if draft.probs is None:  # point masses
        return
    assert draft.probs.shape == (BATCH, pair.drafter.num_nodes, 13) and draft.probs.dtype == jnp.float32
    assert float(draft.probs.min()) >= 0
    np.testing.assert_allclose(draft.probs[:, 1:].sum(-1), 1.0, atol=1e-6)
    assert float(jnp.take_along_axis(draft.probs, draft.tokens[:, :, None], axis=2)[:, 1:].min()) > 0
    assert draft.probs[0, 1:].max(-1).tolist() == [1.0] * (pair.drafter.num_nodes - 1), "a greedy row is no point mass"


def test_a_row_drafts_the_same_whoever_its_neighbours_are(pair: LoadedDrafter) -> None:
    together = pair.drafter.propose(pair.params, after_prompt(pair), KEYS, SAMPLING)
    only = lambda tree: jax.tree.map(lambda leaf: leaf[1:2], tree)
    alone = pair.drafter.propose(pair.params, only(after_prompt(pair)), only(KEYS), only(SAMPLING))
    close(only(together), alone)


def test_an_observation_of_no_tokens_leaves_a_row_as_it_is(pair: LoadedDrafter) -> None:
    before = after_prompt(pair)
    after = pair.drafter.observe(pair.params, before, observation(pair.drafter, [0, 2, 0], fed=2, seed=1))
    before, after = tiny.known(before), tiny.known(after)
    for row in (0, 2):
        assert tiny.same_bits(
            [leaf[row] for leaf in jax.tree.leaves(before)], [leaf[row] for leaf in jax.tree.leaves(after)]
        )


def test_what_lies_past_the_observed_length_does_not_matter(pair: LoadedDrafter) -> None:
    seen = observation(pair.drafter, [6, 3, 1])
    padding = jnp.arange(FED)[None] >= seen.length[:, None]
    dirty = seen.replace(
        tokens=jnp.where(padding, 12 - seen.tokens, seen.tokens),
        features=jnp.where(padding[:, :, None, None], 1e3, seen.features),
    )
    states = [
        pair.drafter.observe(pair.params, pair.drafter.init(pair.params, BATCH, CAPACITY), one) for one in (seen, dirty)
    ]
    drafts = [pair.drafter.propose(pair.params, state, KEYS, SAMPLING) for state in states]
    close(*drafts)


def test_observing_in_pieces_is_observing_at_once(pair: LoadedDrafter) -> None:
    """A prefill is a long observation: nothing may depend on how truth was cut."""
    whole = observation(pair.drafter, [FED] * BATCH)
    cut = 4
    first = whole.replace(
        tokens=whole.tokens[:, :cut], features=whole.features[:, :cut], length=jnp.full(BATCH, cut, jnp.int32),
        next_token=whole.tokens[:, cut],
    )  # fmt: skip
    second = whole.replace(
        tokens=whole.tokens[:, cut:], features=whole.features[:, cut:], length=jnp.full(BATCH, FED - cut, jnp.int32)
    )
    drafter, params = pair.drafter, pair.params
    start = drafter.init(params, BATCH, CAPACITY)
    pieces = drafter.observe(params, drafter.observe(params, start, first), second)
    drafts = [
        drafter.propose(params, state, KEYS, SAMPLING) for state in (drafter.observe(params, start, whole), pieces)
    ]
    close(*drafts)


def test_a_second_call_does_not_recompile(pair: LoadedDrafter) -> None:
    drafter = pair.drafter
    observe = jax.jit(lambda params, state, seen: drafter.observe(params, state, seen))
    propose = jax.jit(lambda params, state, keys: drafter.propose(params, state, keys, SAMPLING))
    state = drafter.init(pair.params, BATCH, CAPACITY)
    for seed in range(3):
        state = observe(pair.params, state, observation(drafter, [seed + 1] * BATCH, seed=seed))
        propose(pair.params, state, jax.random.split(jax.random.key(seed), BATCH))
    assert observe._cache_size() == propose._cache_size() == 1
