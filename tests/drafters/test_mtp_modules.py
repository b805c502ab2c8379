"""Several MTP modules: every draft equals one that is computed from the text alone."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jaxtyping import Array

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.models.context import BlockContext, spans_of
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import DraftSampling

pytestmark = pytest.mark.core

TARGET = tiny.target(13)
WIDTH = TARGET.model.config.width
MODULES = 3
DEPTH = 5
SIZE = 32  # rows of a pass, those after a text included
# Of each row of a batch: the first prompt is shorter than there are modules, the last one longer
# than the window, and a row may have nothing new.
FED = ((1, 2, 9), (1, 0, 3), (3, 6, 1), (1, 1, 2), (0, 2, 6))


@functools.cache
def modules(*, sampled: bool, zero_first: bool = False) -> LoadedDrafter:
    layers = (*tiny.layers(1), *tiny.layers(1, window=4), *tiny.layers(1, qk_norm=True))
    way = DraftSampling.PROBABILISTIC if sampled else DraftSampling.GREEDY
    return tiny.mtp(TARGET, Chain(DEPTH), layers=layers, zero_first=zero_first, draft_sampling=way)


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(drafter: Any, number: int, params: Any, tokens: Array, stream: Array) -> Array:
    """Runs a module on ``SIZE`` rows of a text at once, without a cache."""
    network = drafter.bind(params)
    module = [network, *network.later][number]
    positions = jnp.arange(SIZE)[None]
    (span,) = spans_of(drafter.config.layers[number : number + 1])
    context = BlockContext(mask=span.limit(causal_mask(SIZE), positions, positions))
    embedded = drafter.embed(params, tokens[None], positions)
    return module(embedded, stream[None], positions, [context])[0][0]


def from_scratch(
    loaded: LoadedDrafter, text: list[int], states: np.ndarray, drafted: list[int]
) -> np.ndarray:
    """Returns the logits ``[DEPTH V]`` of every step of a draft after ``text``.

    ``states`` are the target's at all tokens but the last.
    """
    known = np.zeros(2 * SIZE + DEPTH, np.int32)
    known[: len(text) + DEPTH] = [*text, *drafted]
    last = len(text) - 2
    stream = np.zeros((SIZE, WIDTH), np.float32)
    stream[: last + 1] = states

    outputs = []
    every_row = stream
    for step in range(DEPTH):
        number = min(step, MODULES - 1)
        beyond = step - number
        if beyond:
            # One more row of the last module, with its own output for a state.
            stream[last + beyond] = outputs[-1]
        elif step:
            stream = np.array(every_row)
        tokens = known[1 + number : 1 + number + SIZE]
        every_row = run(loaded.drafter, number, loaded.params, tokens, stream)
        outputs.append(every_row[last + beyond])
    drafter: Any = loaded.drafter
    logits = drafter.target_logits(loaded.params, jnp.stack(outputs))
    return np.asarray(logits)


@pytest.mark.parametrize("sampled", [False, True])
def test_every_round_drafts_as_computed_from_the_text_alone(sampled: bool) -> None:
    loaded = modules(sampled=sampled, zero_first=sampled)
    random = np.random.default_rng(5)
    texts = random.integers(0, 13, (3, 24))
    features = random.normal(size=(3, 24, WIDTH)).astype(np.float32)
    temperature = 1.5 * sampled

    state = loaded.drafter.init(loaded.params, 3, 40)
    for known, seen in tiny.ragged_rounds(texts, features[:, :, None], FED):
        draft = tiny.next_draft(loaded.drafter, loaded.params, state, seen, temperature)
        state = draft.state
        for row, count in enumerate(known):
            tokens = draft.tokens[row, 1:].tolist()
            text = texts[row, : count + 1].tolist()
            logits = from_scratch(loaded, text, features[row, :count], tokens)
            if sampled:
                truth = jax.nn.softmax(logits / temperature)
                np.testing.assert_allclose(draft.probs[row, 1:], truth, atol=2e-5)
            else:
                assert tokens == logits.argmax(-1).tolist(), f"row {row} after {count} tokens"


def test_each_of_several_modules_drafts_one_token_unless_more_are_asked_for() -> None:
    loaded = tiny.mtp(TARGET, None, layers=tiny.layers(2))
    decoder = SpeculativeDecoder(TARGET, loaded)
    assert ", chain K=2, greedy" in decoder.method
    longer = SpeculativeDecoder(TARGET, loaded, num_speculative_tokens=5)
    assert ", chain K=5 (the last of 2 modules is fed back for 3), greedy" in longer.method
    shorter = SpeculativeDecoder(TARGET, loaded, num_speculative_tokens=1)
    assert ", chain K=1, greedy" in shorter.method

    with pytest.raises(ValueError, match="2 MTP modules draft a chain, a token each"):
        SpeculativeDecoder(TARGET, loaded, tree=DynamicTree(num_nodes=9, max_depth=3, top_k=3))
