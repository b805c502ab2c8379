"""Rounds that are read off a text are those of decoding it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax.decode import SpeculativeDecoder
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.loaded import LoadedDrafter
from eagle3_jax.training.evaluation import Evaluation
from eagle3_jax.training.methods import initial_head, official_head
from eagle3_jax.training.rounds import accepted_in_rounds
from eagle3_jax.training.texts import Text, Texts


def test_accepted_drafts_of_a_text_by_hand():
    # The answer is tokens 3 .. 9. Row t drafts tokens t + 2 and t + 3.
    hits = np.zeros((10, 2), bool)
    hits[2] = True, True  # root 3: tokens 4 and 5 are accepted, the target gives 6
    hits[5] = False, True  # root 6: nothing
    hits[6] = True, False  # root 7: token 8
    assert accepted_in_rounds(hits, 3, 10) == [2, 0, 1]
    assert accepted_in_rounds(hits, 3, 5) == [1]  # a draft behind the end is not counted
    assert accepted_in_rounds(hits, 3, 4) == []


@pytest.mark.parametrize("draft_vocab", [None, 9])
def test_one_pass_over_greedy_text_finds_the_rounds_of_decoding(draft_vocab):
    target = tiny.target(13, layers=tiny.layers(8, head_dim=4), max_positions=64)
    ids = None if draft_vocab is None else jnp.arange(13, dtype=jnp.int32)[2 : 2 + draft_vocab]
    config = official_head(target.model.config, draft_vocab or 13)
    drafter = Eagle3Drafter(config)
    # Weights that are not trained, and so large that drafts depend on everything that a head reads.
    head = jax.tree.map(lambda leaf: 3 * leaf, initial_head(drafter, target, ids, jax.random.key(1)))
    prompts = tiny.random_prompts(6, 13, seed=4, low=3, high=6)
    params = drafter.assemble(head, target.model.tables(target.params), draft_to_target=ids)
    decoder = SpeculativeDecoder(target, LoadedDrafter(drafter, params), num_speculative_tokens=3, stop_tokens=())
    result = decoder.generate(prompts, max_new_tokens=30)
    texts = Texts.of(
        Text([*prompt, *answer], [False] * len(prompt) + [True] * len(answer), index)
        for index, (prompt, answer) in enumerate(zip(prompts, result.tokens, strict=True))
    )
    frozen: Any = {"target_params": target.params, "embedding": target.params["embedding"], "draft_to_target": ids}
    loaded = dataclasses.replace(target, stop_tokens=())
    evaluation = Evaluation(loaded, drafter, frozen, texts, None, 3)
    measured = evaluation.in_one_pass(head)
    assert measured is not None
    assert measured["tau"] > 1.2  # otherwise every rule finds the same
    assert measured["rounds"] == int(np.sum(result.stats.num_drafts))
    # Decoding may accept drafts behind the end of the text in the last round of each.
    assert measured["tau"] == pytest.approx(result.stats.mean_acceptance_length, rel=0.05)
    assert evaluation.by_decoding(head, most=6, max_new_tokens=30) == result.stats.mean_acceptance_length
