"""Two drafters as one: which drafter each row's draft comes from, and when the second runs."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from lookups import looked_up

from eagle3_jax import Draft, Fallback, LoadedDrafter, SpeculativeDecoder
from eagle3_jax import loop as loops
from eagle3_jax.drafters import NGram, Silent, Suffix
from eagle3_jax.testing.drafter import draft_after_prompt, sample_observation
from eagle3_jax.testing.subject import Subject
from eagle3_jax.topology import Chain, DynamicTree, Topology
from eagle3_jax.types import DraftSampling

TARGET = tiny.target(13)
TREE = DynamicTree(num_nodes=9, max_depth=3, top_k=3)
FIRST = NGram(2, min_ngram=2)
PROBABILISTIC = DraftSampling.PROBABILISTIC


@pytest.mark.parametrize(
    ("shape", "draft_sampling"), [(Chain(3), "greedy"), (Chain(1), PROBABILISTIC), (TREE, "greedy")]
)
def test_every_row_gets_the_first_draft_that_there_is(
    shape: Topology, draft_sampling: DraftSampling
) -> None:
    """The longer draft decides the size; drafts of the first declare point masses."""
    head = tiny.eagle3(TARGET, shape, draft_sampling=draft_sampling)
    both = Fallback.of(FIRST, head)
    subject = Subject(both.drafter, both.params, TARGET)
    observation = sample_observation(subject)

    draft = draft_after_prompt(subject)
    head_draft = draft_after_prompt(Subject(head.drafter, head.params, TARGET))

    num_matches = 0
    lengths = observation.length.tolist()
    for row, length in enumerate(lengths):
        text = observation.tokens[row, :length].tolist()
        expected = looked_up([*text, int(observation.next_token[row])], FIRST)
        num_matches += bool(expected)

        valid = draft.valid[row]
        if expected:
            assert draft.tokens[row, valid].tolist()[1:] == expected
            if draft_sampling is PROBABILISTIC:
                assert np.array_equal(draft.probs[row, 1:][valid[1:]], np.eye(13)[expected])
            continue

        size = head_draft.tokens.shape[1]
        assert not valid[size:].any()
        for ours, theirs in zip(draft, head_draft, strict=True):
            assert ours is theirs is None or np.array_equal(ours[row, 1:size], theirs[row, 1:])

    assert 0 < num_matches < len(lengths), "rows that all choose the same would show nothing"


@dataclasses.dataclass(frozen=True)
class Counted(NGram):
    """Counts its proposals in its state."""

    def init(self, params, batch, capacity):
        return NGram.init(self, params, batch, capacity), jnp.zeros((batch,), jnp.int32)

    def observe(self, params, state, seen):
        return NGram.observe(self, params, state[0], seen), state[1]

    def propose(self, params, state, keys, sampling) -> Draft:
        draft = NGram.propose(self, params, state[0], keys, sampling)
        return dataclasses.replace(draft, state=(state[0], state[1] + 1))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_second_runs_only_if_a_row_has_no_draft_of_the_first(batch: int) -> None:
    loop, params = tiny.bind(TARGET, LoadedDrafter(Fallback(FIRST, Counted(2))))
    prompts = [[1, 2, 3], [4], [5, 6]][:batch]
    state = loops.prefill(loop, params, tiny.prompts(prompts, limit=40), capacity=64)

    num_asked = 0

    num_skipped = 0
    while bool(state.running.all()):
        texts = [
            row[:length].tolist() for row, length in zip(state.tokens, state.length, strict=True)
        ]

        is_needed = not all(looked_up(text, FIRST) for text in texts)
        num_asked = num_asked + is_needed
        num_skipped = num_skipped + (not is_needed)

        state = loops.step(loop, params, state).state
        assert state.drafter[1][1].tolist() == [num_asked] * batch

    assert num_asked
    assert num_skipped


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_schedule_that_drafts_nothing_never_runs_the_second(is_silent: bool) -> None:
    head = tiny.eagle3(TARGET)
    both = Fallback(FIRST, head.drafter)
    loop, params = tiny.bind(
        TARGET, LoadedDrafter(Silent(both) if is_silent else both, head.params)
    )
    state = loops.prefill(loop, params, tiny.prompts([[1, 2, 3]], limit=8), capacity=24)
    with tiny.unchecked():
        program = loops.step.lower(loop, params, state).compile().as_text()
    assert ("while(" in program) != is_silent


def test_it_takes_the_options_of_its_second_drafter() -> None:
    head = tiny.eagle3(TARGET, Chain(3))
    decoder = SpeculativeDecoder(TARGET, Fallback.of(NGram(3), head), tree=TREE)
    ours = decoder.loop.drafter
    assert ours.num_nodes == 9
    assert ours.first.num_nodes == 4
    assert decoder.loop.is_chain is False

    options = {"num_speculative_tokens": 2, "draft_sampling": "probabilistic"}
    decoder = SpeculativeDecoder(TARGET, Fallback.of(Suffix(3), head), **options)
    assert decoder.method == "Suffix, else Eagle3Drafter, chain K=2, probabilistic draft sampling"
    assert decoder.loop.drafter.config is head.drafter.config
    assert decoder.loop.drafter.num_nodes == 3
    assert decoder.loop.is_chain
