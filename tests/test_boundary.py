"""The drafter's boundary: whatever is proposed, the output is the target's own, or one line says what is wrong."""

from __future__ import annotations

import bad_drafters
import pytest
import test_greedy
import tiny

from eagle3_jax import loop as loops


@pytest.mark.parametrize("name", bad_drafters.SPOILT)
def test_greedy_output_is_the_targets_own_with(name: str) -> None:
    drafter = bad_drafters.SPOILT[name].drafter(test_greedy.scripted(0).params)
    loop, params = tiny.bind(test_greedy.TARGET, drafter)
    batch = tiny.prompts(test_greedy.PROMPTS, limit=test_greedy.LIMITS)
    outcome = loops.generate(loop, params, batch, capacity=48 + loop.drafter.num_nodes)
    assert tiny.outputs(outcome, batch) == test_greedy.expected()
