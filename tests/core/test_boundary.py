"""The drafter's boundary: whatever is proposed, the output is the target's own, or one line says what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import bad_drafters
import jax
import jax.numpy as jnp
import pytest
import test_greedy
import tiny
from bad_drafters import Ordinary, observing, proposing, replaced, with_field

from eagle3_jax import loop as loops
from eagle3_jax.decode import LoadedDrafter, SpeculativeDecoder
from eagle3_jax.drafters import NGram, Plain
from eagle3_jax.types import SamplingMode

TARGET = tiny.target(13)


@pytest.mark.parametrize("name", bad_drafters.SPOILT)
def test_greedy_output_is_the_targets_own_with(name: str) -> None:
    drafter = bad_drafters.SPOILT[name].drafter(test_greedy.scripted(0).params)
    loop, params = tiny.bind(test_greedy.TARGET, drafter)
    batch = tiny.prompts(test_greedy.PROMPTS, limit=test_greedy.LIMITS)
    outcome = loops.generate(loop, params, batch, capacity=48 + loop.drafter.num_nodes)
    assert tiny.outputs(outcome, batch) == test_greedy.expected()


class Unhashable(Ordinary):
    __hash__ = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class HoldsAnArray(Ordinary):
    table: Any


class Bare:
    num_nodes = 3


NOT_DRAFTERS = {
    "a class instead of an instance": (NGram, r"the class NGram; give an instance, NGram\(\.\.\.\)"),
    "something else": (Bare(), "Bare is no drafter: it has no max_depth, aux_layers, init, observe, propose"),
    "no hash": (Unhashable(), "Unhashable has no hash.*frozen dataclass"),
    "an array among its fields": (HoldsAnArray(jnp.zeros(3)), "HoldsAnArray has no hash.*arrays in params"),
    "no nodes": (replaced(num_nodes=0), r"num_nodes is 0; expected a whole number"),
    "layers in a list": (replaced(aux_layers=[1, 2]), r"aux_layers is \[1, 2\]; expected a tuple"),
    "a negative layer": (replaced(aux_layers=(-1,)), r"aux_layers is \(-1,\); expected a tuple"),
    "a chain longer than it is deep": (replaced(is_chain=True, num_nodes=4), "chain of 4 nodes.*max_depth is 2"),
}


@pytest.mark.parametrize("name", NOT_DRAFTERS)
def test_a_decoder_refuses_as_a_drafter(name: str) -> None:
    drafter, message = NOT_DRAFTERS[name]
    with tiny.unchecked(), pytest.raises(ValueError, match=message):
        SpeculativeDecoder(TARGET, drafter)


def starting(change: Callable[[dict], Any]) -> Any:
    return replaced(init=lambda self, *arguments: change(Ordinary.init(self, *arguments)))


NOT_DRAFTS = {
    "a draft and a state": (proposing(lambda d: (d, {})), "propose returned tuple; expected an eagle3_jax.Draft"),
    "more nodes than it said": (
        replaced(num_nodes=2), r"propose gave tokens as int32\[2, 3\]; expected int32\[2, 2\]"
    ),
    "fractions for ids": (proposing(with_field(tokens=lambda d: d.tokens.astype(jnp.float32))), "tokens as float32"),
    "a distribution over too few ids": (
        proposing(with_field(probs=lambda _: jnp.ones((2, 3, 12)))), r"probs as float32\[2, 3, 12\].*\[2, 3, 13\]"
    ),
    "a distribution in half precision": (
        proposing(with_field(probs=lambda _: jnp.ones((2, 3, 13), jnp.bfloat16))),
        "probs as bfloat16.*expected float32"
    ),
    "a state of no rows": (starting(lambda s: {**s, "n": jnp.zeros(())}), r"init gave state\['n'\] as float32\[\]"),
    "a number in its state": (starting(lambda s: {**s, "n": 3}), r"state\['n'\] as int; expected an array"),
    "a state that grows": (
        observing(lambda old, s, seen: {**s, "root": jnp.stack([s["root"]] * 2, 1)}),
        r"observe was given state\['root'\] as int32\[2\] and returned int32\[2, 2\]",
    ),
    "a state of another structure": (
        observing(lambda old, s, seen: (s["root"], s["length"])), "expected the same structure"
    ),
    "a layer too high": (replaced(aux_layers=(1, 4)), r"features of the layers \(1, 4\).*2 layers has 0 to 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_DRAFTS)
def test_tracing_refuses_from_a_drafter(name: str) -> None:
    drafter, message = NOT_DRAFTS[name]
    loop, params = tiny.bind(TARGET, LoadedDrafter(drafter), sampling_mode=SamplingMode.TEMPERATURE)
    batch = tiny.prompts([[1, 2], [3]], limit=3)
    with tiny.unchecked(), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda params, batch: loop.generate(params, batch, 16), params, batch)


def test_an_ordinary_class_that_keeps_the_contract_drafts() -> None:
    decoder = SpeculativeDecoder(TARGET, Ordinary())
    assert decoder.generate([[1, 2], [3]], max_new_tokens=9).tokens == (
        SpeculativeDecoder(TARGET).generate([[1, 2], [3]], max_new_tokens=9).tokens
    )
    with pytest.raises(
        ValueError, match="Ordinary cannot draft a chain of another size: it has no method `with_topology`"
    ):
        SpeculativeDecoder(TARGET, Ordinary(), num_speculative_tokens=4)
    with pytest.raises(ValueError, match="NGram cannot draft a tree"):
        SpeculativeDecoder(TARGET, NGram(3), tree=tiny.STATIC_TREE)
    with pytest.raises(ValueError, match="Plain cannot draft a chain"):
        SpeculativeDecoder(TARGET, Plain(), num_speculative_tokens=4)


def test_a_drafter_that_is_false_is_still_the_drafter() -> None:
    empty = replaced(__len__=lambda self: 0)
    assert SpeculativeDecoder(TARGET, empty).loop.drafter is empty


def test_a_loop_that_never_looks_is_refused() -> None:
    with pytest.raises(ValueError, match="rounds_per_check is 0; expected at least 1"):
        SpeculativeDecoder(TARGET, rounds_per_check=0)
