"""A head that is trained between steps of its target learns the answers; nothing else changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import SamplingParams, SpeculationStats, SpeculativeDecoder
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import Fallback, NGram
from eagle3_jax.results import Generation
from eagle3_jax.topology import Chain
from eagle3_jax.training.refresh import HeadRefresh, RefreshConfig

TARGET = tiny.target(13)
CONFIG = RefreshConfig(rows=8, length=24, depth=2, learning_rate=1e-2)


def decoder_of(drafter: LoadedDrafter | NGram) -> SpeculativeDecoder:
    return SpeculativeDecoder(TARGET, drafter)


def answers(decoder: SpeculativeDecoder, seed: int) -> list[Generation]:
    sampling = SamplingParams(temperature=0.5)
    prompts = [[number] for number in range(8)]
    return decoder.generate(prompts, max_new_tokens=20, sampling=sampling, seed=seed).rows


def accepted(decoder: SpeculativeDecoder) -> float:
    return SpeculationStats.merge(
        row.stats for seed in (100, 101) for row in answers(decoder, seed)
    ).draft_acceptance_rate


@jax.numpy_dtype_promotion("standard")  # optax's own arithmetic mixes types
@pytest.mark.parametrize("first", [None, NGram(2, min_ngram=2)])
def test_steps_on_a_targets_answers_raise_the_acceptance_of_its_others(first) -> None:
    head = tiny.eagle3(TARGET, Chain(2))
    start = decoder_of(head if first is None else Fallback.of(first, head))
    refresh = HeadRefresh(start, CONFIG)
    decoder = start
    for seed in range(60):
        decoder = refresh.step(decoder, answers(start, seed % 8))
    assert accepted(decoder) > accepted(start) + 0.1

    # The target, and what the head borrows, are what they were.
    assert decoder.params.target is start.params.target
    assert decoder.params.drafter["embedding"] is start.params.drafter["embedding"]


@jax.numpy_dtype_promotion("standard")
def test_small_steps_add_up_in_a_head_of_bfloat16() -> None:
    """An update below the spacing of bfloat16 would be lost, time after time."""
    head = tiny.eagle3(TARGET, Chain(2))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), head.params["head"])
    before = decoder_of(head)
    before.params.drafter["head"] = rounded
    refresh = HeadRefresh(before, RefreshConfig(rows=4, length=24, depth=1, learning_rate=1e-5))
    decoder = before
    texts = answers(decoder_of(head), 0)
    for _ in range(30):
        decoder = refresh.step(decoder, texts)
    after = decoder.params.drafter["head"]
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(after))
    floats = jax.tree.leaves(refresh.state.params)
    moved = [
        np.max(np.abs(new - old))
        for new, old in zip(floats, map(to_float, jax.tree.leaves(rounded)), strict=True)
    ]
    assert max(moved) > 1e-4


def to_float(leaf: jax.Array) -> np.ndarray:
    return np.asarray(leaf, np.float32)


def test_what_has_no_parameters_is_refused() -> None:
    with pytest.raises(
        ValueError, match="the drafter is NGram, which has no parameters to refresh"
    ):
        HeadRefresh(decoder_of(NGram(3)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every is 0; expected at least 1"),
        ({"length": 2}, "length is 2; expected at least 3 tokens"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RefreshConfig(**options)
