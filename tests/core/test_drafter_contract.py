"""What the loop relies on, asked of every drafter: a new method is one more row of ``ALL_DRAFTERS``.

The checks are the library's own, which authors run on theirs; here they are also shown to catch what they are for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import bad_drafters
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import check_drafter
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import Fallback, Markov, NGram, Plain, Suffix, layer_skip
from eagle3_jax.testing import DRAFTER_CHECKS
from eagle3_jax.testing.drafter import Subject
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.types import DraftSampling

TARGET = tiny.target(13)
PROBABILISTIC = DraftSampling.PROBABILISTIC
TREE = DynamicTree(num_nodes=9, max_depth=3, top_k=3)
RARE = NGram(2, min_ngram=2)  # some rows of a batch match, others do not
ALL_DRAFTERS: dict[str, Callable[[], LoadedDrafter]] = {
    "plain": lambda: LoadedDrafter(Plain()),
    "plain, padded": lambda: LoadedDrafter(Plain(4)),
    "n-grams": lambda: LoadedDrafter(NGram(3)),
    "suffixes": lambda: LoadedDrafter(Suffix(3)),
    "EAGLE-3 chain": lambda: tiny.eagle3(TARGET, Chain(3), draft_vocab_size=7),
    "EAGLE-3 sampled chain": lambda: tiny.eagle3(TARGET, Chain(3), draft_vocab_size=7, draft_sampling=PROBABILISTIC),
    "EAGLE-3 dynamic tree": lambda: tiny.eagle3(TARGET, TREE),
    "EAGLE-3 static tree": lambda: tiny.eagle3(TARGET, tiny.STATIC_TREE),
    "draft model chain": lambda: tiny.draft_model(TARGET, Chain(3)),
    "draft model sampled chain": lambda: tiny.draft_model(TARGET, Chain(3), draft_sampling=PROBABILISTIC),
    "draft model dynamic tree": lambda: tiny.draft_model(TARGET, TREE),
    "layer skip": lambda: layer_skip(TARGET, 1),
    "EAGLE-2 dynamic tree": lambda: tiny.eagle1(TARGET, TREE),
    "EAGLE-1 drawn tree": lambda: tiny.eagle1(TARGET, tiny.STATIC_TREE, num_layers=2, draft_sampling=PROBABILISTIC),
    "MTP chain": lambda: tiny.mtp(TARGET, Chain(3), own_output=True),
    "DFlash chain": lambda: tiny.dflash(TARGET, Chain(3), draft_vocab_size=7),
    "DSpark sampled chain": lambda: tiny.dflash(
        TARGET, draft_sampling=PROBABILISTIC, block_size=3, from_anchor=True, markov=Markov(rank=4)
    ),
    "DSpark dynamic tree": lambda: tiny.dflash(TARGET, TREE, markov=Markov(rank=4)),
    "EAGLE-3.1 chain": lambda: tiny.eagle3(TARGET, Chain(2), norm_output=True, fc_norm=True, num_layers=2),
    "Medusa chain": lambda: tiny.medusa(TARGET, Chain(3), shared_output=True, draft_vocab_size=7),
    "Medusa sampled chain": lambda: tiny.medusa(TARGET, Chain(3), draft_sampling=PROBABILISTIC),
    "Medusa dynamic tree": lambda: tiny.medusa(TARGET, TREE),
    "Medusa static tree": lambda: tiny.medusa(TARGET, tiny.STATIC_TREE),
    "EAGLE-3 under a window": lambda: tiny.eagle3(TARGET, tiny.STATIC_TREE, layers=tiny.layers(1, window=3)),
    "P-EAGLE chain": lambda: tiny.p_eagle(TARGET, Chain(3), draft_vocab_size=7),
    "P-EAGLE sampled chain": lambda: tiny.p_eagle(TARGET, Chain(3), draft_sampling=PROBABILISTIC),
    "P-EAGLE dynamic tree": lambda: tiny.p_eagle(TARGET, TREE),
    "n-grams, else an EAGLE-3 chain": lambda: Fallback.of(RARE, tiny.eagle3(TARGET, Chain(3), draft_vocab_size=7)),
    "n-grams, else a sampled EAGLE-3 chain": lambda: Fallback.of(
        RARE, tiny.eagle3(TARGET, Chain(3), draft_vocab_size=7, draft_sampling=PROBABILISTIC)
    ),
    "n-grams, else an EAGLE-3 dynamic tree": lambda: Fallback.of(RARE, tiny.eagle3(TARGET, TREE)),
}
LAW = "sampled output has the target's law"
ENOUGH = {"draws from what it declares": 32768}  # samples that show every fault of bad_drafters
COSTLY = {"greedy output is the target's", LAW}  # test_greedy and test_long_law ask every method
SAMPLED_TREE = LoadedDrafter(
    tiny.Sampled((-1, 0, 0, 1)), jnp.array(np.random.default_rng(0).dirichlet(np.ones(13), 13), jnp.float32)
)


@functools.cache
def drafter_of(name: str) -> LoadedDrafter:
    """One of :data:`ALL_DRAFTERS`."""
    return ALL_DRAFTERS[name]()


@functools.cache
def subject(name: str) -> Subject:
    return Subject(drafter_of(name), TARGET, samples=4096)


@pytest.mark.parametrize("check", [name for name in DRAFTER_CHECKS if name not in COSTLY])
@pytest.mark.parametrize("name", ALL_DRAFTERS)
def test_every_drafter_keeps_the_contract(name: str, check: str) -> None:
    DRAFTER_CHECKS[check](subject(name))


@pytest.mark.parametrize("name", [name for name in ALL_DRAFTERS if "plain" not in name])
def test_what_is_asked_is_a_draft_and_not_its_absence(name: str) -> None:
    assert subject(name).draft.valid[:, 1:].any()


@pytest.mark.parametrize("name", ["EAGLE-3 chain", "EAGLE-3 dynamic tree"])
def test_an_observation_of_no_tokens_leaves_every_bit_of_a_row_as_it_is(name: str) -> None:
    one = subject(name)
    before = one.after_prompt
    after = one.observe(before, one.shown((0, 2, 0, 1), seed=1))
    for row in (0, 2):
        assert tiny.same_bits(
            *([leaf[row] for leaf in jax.tree.leaves(tiny.known(state))] for state in (before, after))
        )


def test_a_greedy_row_of_a_sampling_drafter_declares_point_masses() -> None:
    draft = subject("EAGLE-3 sampled chain").draft
    assert draft.probs[0, 1:].max(-1).tolist() == [1.0] * (draft.tokens.shape[1] - 1)


@pytest.mark.parametrize("drafter", [LoadedDrafter(NGram(3)), SAMPLED_TREE], ids=["n-grams", "a sampled tree"])
def test_a_drafter_that_is_right_passes_every_check(drafter: LoadedDrafter) -> None:
    report = check_drafter(drafter, TARGET, samples=4096)
    assert report.ok, str(report)
    report.raise_if_failed()
    assert str(report).endswith(f"{len(DRAFTER_CHECKS)} passed, 0 failed, 0 not run")
    assert re.search(
        r"law: 4096 sequences, \d+ draft tokens accepted; a deviation of 2\d.\d% .* nine times", str(report)
    )


@pytest.mark.parametrize("name", bad_drafters.BROKEN)
def test_a_drafter_is_found_out_for(name: str) -> None:
    drafter, check, message = bad_drafters.BROKEN[name]
    with tiny.unchecked():
        report = check_drafter(drafter, TARGET, checks=["keeps the protocol", check], samples=ENOUGH.get(check, 8192))
    (failure,) = report.failures
    assert failure.name == check
    assert re.search(message, failure.detail), failure.detail
    assert not report.ok
    with pytest.raises(ValueError, match=f"failed +{check}.*\n.*1 failed"):
        report.raise_if_failed()


def test_a_right_law_under_which_nothing_was_accepted_is_not_a_pass() -> None:
    report = check_drafter(Plain(), TARGET, checks=[LAW], samples=1024)
    (finding,) = report.findings
    assert finding.verdict == "not run" and "refusals alone" in finding.detail
    assert not report.ok and not report.failures
    with pytest.raises(ValueError, match="no check 'speed'"):
        check_drafter(Plain(), TARGET, checks=["speed"])


def beyond(draft, rest):
    """Node 1 is spoilt; node 2, its sibling, is a point mass that the target may want."""
    parents = draft.parents.at[:, 2].set(0)
    return bad_drafters.with_field(parents=lambda _: parents, **rest)(draft)


POINT = jax.nn.one_hot
UNSAFE = {
    "ids past the vocabulary": {"tokens": lambda d: d.tokens.at[:, 1].set(10**6)},
    "negative ids": {"tokens": lambda d: d.tokens.at[:, 1].set(-1)},
    "probabilities of NaN": {"probs": lambda d: POINT(d.tokens, 13).at[:, 1].set(jnp.nan)},
    "infinite probabilities": {"probs": lambda d: POINT(d.tokens, 13).at[:, 1].set(jnp.inf)},
    "one probability of NaN": {"probs": lambda d: POINT(d.tokens, 13).at[:, 1, 5].set(jnp.nan)},
}


@pytest.mark.parametrize("name", UNSAFE)
def test_sampled_output_has_the_targets_law_with(name: str) -> None:
    drafter = bad_drafters.proposing(functools.partial(beyond, rest=UNSAFE[name]))
    report = check_drafter(drafter, TARGET, checks=[LAW], samples=4096)
    assert report.ok, str(report)
