"""Rounds that are read off a text are those of decoding it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import eagle3_jax as e3
from eagle3_jax.training.evaluation import Evaluation
from eagle3_jax.training.rounds import accepted_in_rounds
from eagle3_jax.training.texts import Text, Texts


def test_accepted_drafts_of_a_text_by_hand():
    # The answer is tokens 3 .. 9. Row t drafts tokens t + 2 and t + 3.
    hits = np.zeros((10, 2), bool)
    hits[2] = True, True  # root 3: tokens 4 and 5 are accepted, the target gives 6
    hits[5] = False, True  # root 6: nothing
    hits[6] = True, False  # root 7: token 8
    assert accepted_in_rounds(hits, 3, 10) == [2, 0, 1]
    assert accepted_in_rounds(hits, 3, 5) == [1]  # a draft past the end is not counted
    assert accepted_in_rounds(hits, 3, 4) == []


def test_one_pass_over_greedy_text_finds_the_rounds_of_decoding():
    target = e3.load_target(dtype="float32")
    head = e3.load_drafter(target=target)
    decoder = e3.SpeculativeDecoder(target, head, num_speculative_tokens=3)
    prompts = ["def fibonacci(n):", "import collections", "class Stack:"]
    result = decoder.generate(prompts, max_new_tokens=40)

    texts = Texts.of(
        Text(
            [*row.prompt_tokens, *row.tokens],
            [False] * len(row.prompt_tokens) + [True] * len(row.tokens),
            index,
        )
        for index, row in enumerate(result.rows)
    )

    frozen: Any = {"target_params": target.params, "embedding": head.params["embedding"]}
    frozen["draft_to_target"] = head.params["draft_to_target"]
    evaluation = Evaluation(target, head.drafter, frozen, texts, None, 3)
    measured = evaluation.in_one_pass(head.params["head"])
    assert measured is not None
    # Without drafts there would be 3 times 39.
    assert measured["rounds"] == int(np.sum(result.stats.num_drafts)) < 3 * 30
    # Decoding may accept drafts past the end of the text in the last round.
    assert measured["tau"] == pytest.approx(result.stats.mean_acceptance_length, rel=0.05)
    decoded = evaluation.by_decoding(head.params["head"], max_new_tokens=40)
    assert decoded == result.stats.mean_acceptance_length
