"""A drafter can ask for the target's most likely tokens at verified nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import Draft, Fallback, LoadedDrafter, Observation
from eagle3_jax import loop as loops
from eagle3_jax.drafters import NGram
from eagle3_jax.testing.scripted import FixedTree

TARGET = tiny.target(13)
PARENTS = (-1, 0, 0, 1, 2)


@dataclasses.dataclass(frozen=True)
class Watching(FixedTree):
    """Drafts the tokens 1, 2, ..., of which the last is invalid, and keeps the last observation."""

    parents: tuple[int, ...] = PARENTS
    num_likeliest: int = 3

    def init(self, params: Any, batch: int, capacity: int) -> Any:
        shown = jnp.zeros((batch, 5), jnp.int32), jnp.zeros((batch, 5, 3), jnp.int32)
        return FixedTree.init(self, params, batch, capacity), shown

    def observe(self, params: Any, state: Any, seen: Observation) -> Any:
        shown = state[1] if seen.drafted is None else (seen.drafted, seen.likeliest)
        return FixedTree.observe(self, params, state[0], seen), shown

    def propose(self, params: Any, state: Any, keys: Any, sampling: Any) -> Draft:
        draft = self.draft(state[0], jnp.broadcast_to(jnp.arange(5), (len(state[0].root), 5)))
        return draft.replace(valid=draft.valid.at[:, -1].set(False))


@pytest.mark.parametrize("in_a_fallback", [False, True])
def test_every_verified_node_has_the_targets_most_likely_tokens(in_a_fallback: bool) -> None:
    """Compares with a forward pass over the text that ends at each node, refused nodes included."""
    drafter = Fallback(Watching(), NGram(4)) if in_a_fallback else Watching()
    texts = [[5, 6, 7], [3, 3], [9, 1, 4]]
    limits = [8, 8, 1]  # the last row has finished after the prefill

    loop, params = tiny.bind(TARGET, LoadedDrafter(drafter, None))
    state = loops.prefill(loop, params, tiny.prompts(texts, limit=limits), capacity=32)

    roots = np.asarray(state.tokens)[np.arange(3), np.asarray(state.length) - 1]
    after = loops.step(loop, params, state).state.drafter
    drafted, likeliest = jax.device_get((after[0] if in_a_fallback else after)[1])
    assert (drafted[2] == -1).all()
    assert (drafted[:, 4] == -1).all()

    paths = ([], [1], [2], [1, 3])
    for row, text in enumerate(texts[:2]):
        for node, path in enumerate(paths):
            context = [*text, int(roots[row]), *path]
            logits = np.asarray(
                tiny.forward(TARGET.model, TARGET.params, jnp.asarray([context]))[0]
            )[0, -1]
            assert drafted[row, node] == context[-1]
            assert likeliest[row, node].tolist() == np.argsort(-logits)[:3].tolist()


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match="num_likeliest"):
        tiny.bind(TARGET, LoadedDrafter(Watching(num_likeliest=-1), None))
