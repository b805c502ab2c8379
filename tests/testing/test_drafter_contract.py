"""The contract of drafters: every method keeps it, and each check finds a broken drafter.

A new method is one more row of ``ALL_DRAFTERS`` in ``drafter_table.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from drafter_table import ALL_DRAFTERS, SAMPLED_TREE, TARGET, drafter_of
from faults import Fault
from ordinary import VOCABULARY, Ordinary, observing, proposing, replaced, with_field

from eagle3_jax import check_drafter
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import NGram, Plain
from eagle3_jax.testing import DRAFTER_CHECKS
from eagle3_jax.testing.drafter import (
    draft_after_prompt,
    observe,
    sample_observation,
    state_after_prompt,
    subject_of,
)
from eagle3_jax.testing.scripted import FixedTree, RootState
from eagle3_jax.testing.subject import Subject, repeat_row
from eagle3_jax.types import Draft, SamplingParams

DISTRIBUTION = "sampled output has the target's distribution"
# Samples with which every fault of BROKEN is detected.
ENOUGH = {"draws from what it declares": 32768}
# test_greedy and test_long_distribution cover every method.
COSTLY = {"greedy output is the target's", DISTRIBUTION}


@functools.cache
def subject(name: str) -> Subject:
    return subject_of(drafter_of(name), TARGET, samples=4096)


@pytest.mark.parametrize("check", [name for name in DRAFTER_CHECKS if name not in COSTLY])
@pytest.mark.parametrize("name", ALL_DRAFTERS)
def test_every_drafter_keeps_the_contract(name: str, check: str) -> None:
    DRAFTER_CHECKS[check](subject(name))


@pytest.mark.parametrize("name", [name for name in ALL_DRAFTERS if "plain" not in name])
def test_checks_compare_drafts_that_are_not_empty(name: str) -> None:
    assert subject(name).once(draft_after_prompt).valid[:, 1:].any()


@pytest.mark.parametrize("name", ["EAGLE-3 chain", "EAGLE-3 dynamic tree"])
def test_an_observation_of_no_tokens_leaves_every_bit_of_a_row_as_it_is(name: str) -> None:
    before = subject(name).once(state_after_prompt)
    observation = sample_observation(subject(name), (0, 2, 0, 1), stream=1)
    after = observe(subject(name), observation, state=before)
    for row in (0, 2):
        assert tiny.same_bits(
            repeat_row(tiny.known(before), row), repeat_row(tiny.known(after), row)
        )


def test_a_greedy_row_of_a_sampling_drafter_declares_point_masses() -> None:
    draft = subject("EAGLE-3 sampled chain").once(draft_after_prompt)
    assert draft.probs[0, 1:].max(-1).tolist() == [1.0] * (draft.tokens.shape[1] - 1)


@pytest.mark.parametrize(
    "drafter", [LoadedDrafter(NGram(3)), SAMPLED_TREE], ids=["n-grams", "a sampled tree"]
)
def test_a_drafter_that_is_right_passes_every_check(drafter: LoadedDrafter) -> None:
    report = check_drafter(drafter, TARGET, samples=4096)
    assert report.ok, str(report)
    report.raise_if_failed()
    assert str(report).endswith(f"{len(DRAFTER_CHECKS)} passed, 0 failed, 0 not run")
    assert re.search(
        r"distribution: 4096 sequences, \d+ draft tokens accepted; a deviation of 2\d.\d% .* with"
        r" 90 % power",
        str(report),
    )


class Remembering(Ordinary):
    """Counts its drafts in an attribute, and drafts by that number."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, *arguments: Any) -> Draft:
        self.calls += 1
        draft = Ordinary.propose(self, *arguments)
        return dataclasses.replace(
            draft, tokens=draft.tokens.at[:, 1:].add(self.calls) % VOCABULARY
        )


class Hasty(Ordinary):
    """Changes its hash every few calls."""

    def __init__(self, every: int):
        self.every = every
        self.calls = 0

    def __hash__(self) -> int:
        self.calls += 1
        return self.calls // self.every


@dataclasses.dataclass(frozen=True, eq=False)
class Sampling(FixedTree):
    """Samples each node below the root from a fixed distribution, and declares one."""

    #: The sampled distributions, by the number of observed tokens, ``[B]``.
    distribution: Callable[[Any], Any]
    declared: Any  #: The declared distributions.

    # Its arrays have no hash.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def propose(self, params: Any, state: RootState, keys: Any, sampling: SamplingParams) -> Draft:
        shape = (state.root.shape[0], self.num_nodes - 1, VOCABULARY)
        distribution = jnp.broadcast_to(self.distribution(state.length), shape)
        sampled = jax.vmap(jax.random.categorical, (0, 0, None))(keys, jnp.log(distribution), -1)
        probs = jnp.pad(jnp.broadcast_to(self.declared, shape), ((0, 0), (1, 0), (0, 0)))
        return self.draft(state, jnp.pad(sampled.astype(jnp.int32), ((0, 0), (1, 0))), probs)


def siblings(distribution: Any, declared: Any) -> Sampling:
    return Sampling((-1, 0, 0), lambda length: distribution, declared)


def deep(distribution: Callable[[Any], Any], declared: Any) -> Sampling:
    return Sampling((-1, 0, 1, 2, 3), distribution, declared)


class Peeking(FixedTree):
    """Samples uniformly, and declares a distribution that depends on the sampled token."""

    def propose(self, params: Any, state: RootState, keys: Any, sampling: SamplingParams) -> Draft:
        tokens = jax.vmap(lambda key: jax.random.randint(key, (self.num_nodes,), 0, VOCABULARY))(
            keys
        )
        return self.draft(state, tokens, jnp.where((tokens % 2 == 0)[:, :, None], UNIFORM, SKEWED))


UNIFORM = jnp.full((VOCABULARY,), 1 / VOCABULARY, jnp.float32)
SKEWED = jnp.array(np.r_[np.full(6, 1.4), np.full(7, 0.6)] / (6 * 1.4 + 7 * 0.6), jnp.float32)


PROBS = jax.nn.softmax(
    jnp.asarray(np.random.default_rng(0).normal(0, 1.5, (4, VOCABULARY)), jnp.float32), axis=-1
)
NEAR = jax.nn.softmax(
    jnp.asarray(np.random.default_rng(11).normal(0, 1.5, VOCABULARY), jnp.float32)
)
COOLER = jax.nn.softmax(jnp.log(PROBS) / jnp.array([[1.0], [1.0], [1.0], [0.97]]), axis=-1)


def mean_of_rows(draft: Draft) -> Any:
    shared = jnp.sum(draft.tokens[:, 0]) % VOCABULARY
    return draft.tokens.at[:, 1].set(shared)


BROKEN: dict[str, Fault] = {
    "an unstable hash": Fault(Hasty(1), "keeps the protocol", "its hash changes"),
    "a state that grows": Fault(
        observing(lambda old, new, seen: {**new, "root": jnp.stack([new["root"]] * 2, 1)}), "keeps shapes and types",
        r"returned int32\[4, 2\]; expected the same",
    ),
    "a guess that it remembers": Fault(
        Remembering(), "proposes from its state alone", "drafts something else when `propose` is traced anew"
    ),
    "a guess that it commits": Fault(
        proposing(lambda d: dataclasses.replace(d, state={"root": d.tokens[:, 2], "length": d.tokens[:, 0]})),
        "commits nothing by proposing", "after the state that the draft before returned",
    ),
    "another root": Fault(
        proposing(with_field(tokens=lambda d: d.tokens.at[:, 0].add(1) % VOCABULARY)), "drafts a tree below the root",
        "node 0 of rows 0, 1, 2, 3 is",
    ),
    "a child before its parent": Fault(
        proposing(with_field(parents=lambda d: d.parents.at[:, 1].set(2))), "drafts a tree below the root",
        "node 1 of row 0 has parent 2; expected 0 to 0",
    ),
    "a tree deeper than it says": Fault(replaced(max_depth=1), "drafts a tree below the root", "drafts 2 levels and says 1"),
    "an id outside the vocabulary": Fault(
        proposing(with_field(tokens=lambda d: d.tokens.at[:, 2].set(VOCABULARY))), "drafts a tree below the root",
        "node 2 of row 0 is id 13; expected 0 to 12",
    ),
    "siblings that are the same": Fault(
        proposing(lambda d: dataclasses.replace(
            d, parents=d.parents.at[:, 2].set(0), tokens=d.tokens.at[:, 2].set(d.tokens[:, 1])
        )), "drafts a tree below the root", "siblings of row 0 repeat a token",
    ),
    "a draft that depends on the other rows": Fault(
        proposing(with_field(tokens=mean_of_rows)), "rows are independent of their neighbours", "when its neighbours"
    ),
    "a root that an empty observation moves": Fault(
        observing(lambda old, new, seen: {**new, "root": seen.next_token}), "an empty observation changes nothing",
        "after an observation of length 0",
    ),
    "a state that reads padding": Fault(
        observing(lambda old, new, seen: {**new, "root": (new["root"] + jnp.sum(seen.tokens, axis=1)) % VOCABULARY}),
        "padding behind an observation does not matter", "past the observed length",
    ),
    "a state that counts observations": Fault(
        observing(lambda old, new, seen: {**new, "root": (old["root"] + new["root"]) % VOCABULARY}),
        "observing in pieces is observing at once", "6 tokens come in pieces of 4, 2",
    ),
    "negative probabilities": Fault(
        siblings(UNIFORM, UNIFORM.at[0].add(-1).at[1].add(1)), "declares distributions", "negative or not finite"
    ),
    "a token that it says it cannot draft": Fault(
        siblings(jnp.eye(VOCABULARY)[3], jnp.eye(VOCABULARY)[4]), "declares distributions", "declares probability 0"
    ),
    "probabilities that are rounded to bfloat16": Fault(
        deep(lambda length: NEAR, NEAR.astype(jnp.bfloat16).astype(jnp.float32)), "declares distributions",
        "add up to .* expected 1 within 2e-05",
    ),
    "another distribution after 24 tokens": Fault(
        deep(lambda length: jnp.where(length[:, None, None] >= 24, PROBS[:, ::-1], PROBS), PROBS),
        "draws from what it declares", "after a long text node . samples likely tokens too seldom",
    ),
    "a last token that is sampled three percent cooler": Fault(
        deep(lambda length: COOLER, PROBS), "draws from what it declares", "node 4 samples likely tokens too often"
    ),
    "a state that ends after 24 tokens": Fault(
        observing(lambda old, new, seen: {
            **new, "root": jnp.where((old["length"] >= 24) & (seen.length > 0), old["root"], new["root"])
        }), "observing in pieces is observing at once", "drafts something else when 72 tokens",
    ),
    "a distribution that depends on its sampled token": Fault(
        Peeking((-1, 0, 1)), "knows before it draws", "of one state that share every token before it"
    ),
    "probabilities for one token and others drafted": Fault(
        siblings(jnp.eye(VOCABULARY)[3] + 1e-9, UNIFORM), "sampled output has the target's distribution",
        "does not follow the target",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_drafter_is_found_out_for(name: str) -> None:
    fault = BROKEN[name]
    samples = ENOUGH.get(fault.check, 8192)
    with tiny.unchecked():
        report = check_drafter(fault.part, TARGET, checks=fault.checks, samples=samples)
    fault.require_found(report)
    with pytest.raises(ValueError, match=f"failed +{fault.check}.*\n.*1 failed"):
        report.raise_if_failed()


def test_a_right_distribution_without_accepted_drafts_is_not_a_pass() -> None:
    report = check_drafter(Plain(), TARGET, checks=[DISTRIBUTION], samples=1024)
    (finding,) = report.findings
    assert finding.verdict == "not run" and "refusals alone" in finding.detail
    assert not report.ok and not report.failures
    with pytest.raises(ValueError, match="no check 'speed'"):
        check_drafter(Plain(), TARGET, checks=["speed"])


def with_unsafe_node(draft, fields):
    """Returns a draft with an unsafe node 1, whose sibling, a point mass, may be accepted."""
    parents = draft.parents.at[:, 2].set(0)
    return with_field(parents=lambda _: parents, **fields)(draft)


POINT = jax.nn.one_hot
UNSAFE = {
    "ids past the vocabulary": {"tokens": lambda d: d.tokens.at[:, 1].set(10**6)},
    "infinite probabilities": {"probs": lambda d: POINT(d.tokens, 13).at[:, 1].set(jnp.inf)},
    "one probability of NaN": {"probs": lambda d: POINT(d.tokens, 13).at[:, 1, 5].set(jnp.nan)},
}


@pytest.mark.parametrize("name", UNSAFE)
def test_sampled_output_has_the_targets_distribution_with(name: str) -> None:
    drafter = proposing(functools.partial(with_unsafe_node, fields=UNSAFE[name]))
    report = check_drafter(drafter, TARGET, checks=[DISTRIBUTION], samples=4096)
    assert report.ok, str(report)
