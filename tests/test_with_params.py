"""A decoder with other arrays is the decoder of the new model, with nothing of the old one."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax import LoadedDrafter, LoadedTarget, SpeculativeDecoder, drafters
from eagle3_jax.drafters import NGram, layer_skip
from eagle3_jax.topology import Chain

pytestmark = pytest.mark.core

OLD = tiny.target(13)
NEW = tiny.target(13, seed=5)
SAMPLED = e3.SamplingParams(temperature=0.9)


def head(target: LoadedTarget) -> LoadedDrafter:
    """Returns a head that borrows the target's embedding."""
    return tiny.eagle3(target, Chain(3))


DRAFTERS = {
    "n-grams": lambda target: LoadedDrafter(NGram(3)),
    "a head": head,
    "the target's first layer": lambda target: layer_skip(target, 1),
    "n-grams, else a head": lambda target: drafters.Fallback.of(NGram(3), head(target)),
}


@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_and_counters_are_those_of_a_decoder_of_the_new_target(name: str) -> None:
    """What is accepted depends on every array that the drafter reads."""
    make = DRAFTERS[name]
    decoder = SpeculativeDecoder(OLD, make(OLD))
    decoder.generate([1, 2, 3], max_new_tokens=4)

    updated = decoder.with_params(NEW.params)

    fresh = SpeculativeDecoder(NEW, make(NEW))
    for options in ({}, {"sampling": SAMPLED, "seed": 3}):
        expected = fresh.generate([1, 2, 3], max_new_tokens=40, **options)
        result = updated.generate([1, 2, 3], max_new_tokens=40, **options)
        assert (result.tokens, result.stats) == (expected.tokens, expected.stats)


@pytest.mark.parametrize("name", DRAFTERS)
def test_no_array_of_the_old_target_is_left(name: str) -> None:
    decoder = SpeculativeDecoder(OLD, DRAFTERS[name](OLD))
    updated = decoder.with_params(NEW.params)
    held = (updated.params, updated.target.params, updated.drafter.params)
    old = {id(leaf) for leaf in jax.tree.leaves(OLD.params)}
    assert old.isdisjoint(id(leaf) for leaf in jax.tree.leaves(held))
    # The first decoder goes on as before.
    assert decoder.params.target is OLD.params


def test_a_new_head_is_taken_with_the_new_targets_embedding() -> None:
    decoder = SpeculativeDecoder(OLD, head(OLD))
    new_head = jax.tree.map(lambda leaf: leaf * 2, decoder.params.drafter["head"])
    params = {**decoder.params.drafter, "head": new_head}
    updated = decoder.with_params(NEW.params, params)
    assert updated.params.drafter["head"] is not decoder.params.drafter["head"]
    assert updated.params.drafter["embedding"] is NEW.params["embedding"]


def without_norm(params: Any) -> Any:
    return {name: value for name, value in params.items() if name != "norm"}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (without_norm(NEW.params), "target['norm']['scale'] is missing"),
        (
            {**NEW.params, "extra": jnp.zeros(2)},
            "target['extra'] was not there before; expected the parameters of one model",
        ),
        (
            {**NEW.params, "embedding": jnp.zeros((13, 15))},
            "target['embedding'] is float32[13, 15]; expected float32[13, 16], as before",
        ),
        (
            {**NEW.params, "embedding": NEW.params["embedding"].astype(jnp.bfloat16)},
            "target['embedding'] is bfloat16[13, 16]; expected float32[13, 16]",
        ),
    ],
)
def test_parameters_of_another_model_are_refused(params: Any, message: str) -> None:
    decoder = SpeculativeDecoder(OLD, NGram(3))
    with pytest.raises(ValueError, match=re.escape(message)):
        decoder.with_params(params)
