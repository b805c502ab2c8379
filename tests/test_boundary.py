"""Wrong drafts: the output is still the target's own, or an error of one line names the mistake."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import greedy_texts
import jax
import jax.numpy as jnp
import pytest
import tiny
from ordinary import VOCABULARY, Ordinary, observing, proposing, replaced, with_field

from eagle3_jax.decode import LoadedDrafter, SpeculativeDecoder
from eagle3_jax.drafters import NGram
from eagle3_jax.types import Draft, SamplingMode

pytestmark = pytest.mark.core

TARGET = tiny.target(13)


@dataclasses.dataclass(frozen=True)
class Spoilt(tiny.Scripted):
    """Drafts the target's own tokens with a change.

    A draft that is never accepted would show nothing.
    """

    parents: tuple[int, ...] = (-1, 0, 0, 2, 3, 3)
    change: Callable[[Draft], Draft] = lambda draft: draft
    says: int | None = None  # its max_depth
    is_chain: bool = False

    @property
    def max_depth(self) -> int:
        return super().max_depth if self.says is None else self.says

    def propose(self, *arguments: Any) -> Draft:
        draft = super().propose(*arguments)
        # A wrong sibling comes before the right path.
        return self.change(
            draft.replace(tokens=draft.tokens.at[:, 1].add(int(not self.is_chain)) % VOCABULARY)
        )


def with_parents(parents: dict[int, int]) -> Callable[[Draft], Draft]:
    """Changes the parents of some nodes."""
    return with_field(
        parents=lambda d: d.parents.at[:, jnp.array([*parents])].set(jnp.array([*parents.values()]))
    )


SPOILT = {
    "siblings, and a depth that would let them be a chain": Spoilt((-1, 0, 0, 0, 0, 0), says=5),
    "a tree that is deeper than it says": Spoilt((-1, 0, 0, 2, 3, 4), says=2),
    "another root than the last token": Spoilt(
        change=with_field(tokens=lambda d: (d.tokens.at[:, 0].add(1)) % VOCABULARY)
    ),
    "a root that has a parent and is padding": Spoilt(
        change=with_field(
            parents=lambda d: d.parents.at[:, 0].set(2), valid=lambda d: d.valid.at[:, 0].set(False)
        )
    ),
    "ids outside the vocabulary": Spoilt(
        change=with_field(tokens=lambda d: d.tokens.at[:, 1].set(VOCABULARY + 7).at[:, 4].set(-3))
    ),
    "a parent behind its child": Spoilt(change=with_parents({2: 3})),
    "a circle of parents, and one past the last node": Spoilt(
        change=with_parents({3: 4, 4: 3, 5: 2**31 - 1})
    ),
    "a tree that says it is a chain": Spoilt((-1, 0, 1, 1, 3, 4), says=5, is_chain=True),
}


@pytest.mark.parametrize("name", SPOILT)
def test_greedy_output_is_the_targets_own_with(name: str) -> None:
    greedy_texts.check_greedy_text(LoadedDrafter(SPOILT[name], greedy_texts.scripted(0).params))


class Unhashable(Ordinary):
    __hash__ = None  # type: ignore[assignment]


class Bare:
    num_nodes = 3


NOT_DRAFTERS = {
    "a class instead of an instance": (
        NGram,
        r"the class NGram; give an instance, NGram\(\.\.\.\)",
    ),
    "something else": (
        Bare(),
        "Bare is not a drafter: it has no max_depth, aux_layers, init, observe, propose",
    ),
    "no hash": (Unhashable(), "Unhashable has no hash.*frozen dataclass.*arrays in params"),
    "no nodes": (replaced(num_nodes=0), r"num_nodes is 0; expected a whole number"),
    "layers in a list": (replaced(aux_layers=[1, 2]), r"aux_layers is \[1, 2\]; expected a tuple"),
    "a chain longer than it is deep": (
        replaced(is_chain=True, num_nodes=4),
        "chain of 4 nodes.*max_depth is 2",
    ),
}


@pytest.mark.parametrize("name", NOT_DRAFTERS)
def test_a_decoder_refuses_as_a_drafter(name: str) -> None:
    drafter, message = NOT_DRAFTERS[name]
    with tiny.unchecked(), pytest.raises(ValueError, match=message):
        SpeculativeDecoder(TARGET, drafter)


def starting(change: Callable[[dict], Any]) -> Any:
    return replaced(init=lambda self, *arguments: change(Ordinary.init(self, *arguments)))


NOT_DRAFTS = {
    "a draft and a state": (
        proposing(lambda d: (d, {})), "propose returned tuple; expected an eagle3_jax.Draft"
    ),
    "more nodes than it said": (
        replaced(num_nodes=2), r"propose gave tokens as int32\[2, 3\]; expected int32\[2, 2\]"
    ),
    "a distribution over too few ids": (
        proposing(with_field(probs=lambda _: jnp.ones((2, 3, 12)))),
        r"probs as float32\[2, 3, 12\].*\[2, 3, 13\]"
    ),
    "a distribution in half precision": (
        proposing(with_field(probs=lambda _: jnp.ones((2, 3, 13), jnp.bfloat16))),
        "probs as bfloat16.*expected float32"
    ),
    "a state of no rows": (
        starting(lambda s: {**s, "n": jnp.zeros(())}), r"init gave state\['n'\] as float32\[\]"
    ),
    "a state that grows": (
        observing(lambda old, s, seen: {**s, "root": jnp.stack([s["root"]] * 2, 1)}),
        r"observe was given state\['root'\] as int32\[2\] and returned int32\[2, 2\]",
    ),
    "a state of another structure": (
        observing(lambda old, s, seen: (s["root"], s["length"])), "expected the same structure"
    ),
    "a layer too high": (replaced(aux_layers=(1, 4)), r"aux_layers is \(1, 4\); expected 0 to 2"),
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
        ValueError,
        match="Ordinary cannot draft a chain of another size: it has no method `with_topology`",
    ):
        SpeculativeDecoder(TARGET, Ordinary(), num_speculative_tokens=4)


def test_a_drafter_that_is_false_is_still_the_drafter() -> None:
    empty = replaced(__len__=lambda self: 0)
    assert SpeculativeDecoder(TARGET, empty).loop.drafter is empty
