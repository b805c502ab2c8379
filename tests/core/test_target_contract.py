"""What the loop relies on, asked of every target: a new family is one more recipe in ``families.py``.

The checks are the library's own, which authors run on theirs; here they are also shown to catch what they are for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import bad_targets
import every_family
import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_targets
import recurrent
import tables
import tiny

from eagle3_jax import (
    Chain,
    LoadedDrafter,
    LoadedTarget,
    SpeculationSchedule,
    SpeculativeDecoder,
    StaticTree,
    check_target,
)
from eagle3_jax.drafters import NGram, Plain
from eagle3_jax.models.layers import BFLOAT16
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.testing import TARGET_CHECKS, check_drafter
from eagle3_jax.testing.report import Skipped
from eagle3_jax.testing.target import TargetSubject

ALL_TARGETS: dict[str, Callable[[], LoadedTarget]] = {
    **{name: functools.partial(random_targets.of_family, recipe) for name, recipe in families.RECIPES.items()},
    "llama, bfloat16": lambda: tiny.target(13, precision=BFLOAT16, layers=tiny.layers(1)),
    "a window, and no rotation": lambda: tiny.target(
        13, layers=tiny.layers(1, window=3) + tiny.layers(1, rope=None, qk_norm=True)
    ),
    "a table": lambda: tables.target(np.random.default_rng(0).normal(0, 1.5, (13**2, 13)), 2),
    "attention and a recurrence": recurrent.target,
}
# What a target need not offer.
OPTIONAL = {("a table", "lends its tables")}


@functools.cache
def subject(name: str) -> TargetSubject:
    return TargetSubject(ALL_TARGETS[name]())


def of(name: str) -> str | None:
    """The family of a target, for the support matrix; none of those that are no recipe's."""
    return families.RECIPES[name].model_type if name in families.RECIPES else None


def shapes(check: str) -> tuple[str, ...]:
    """The drafts that a check is about."""
    if "path" in check:
        return ("tree",)
    return ("chain",) if "block" in check else ("plain", "chain", "tree")


# Beside what is no family: experts, latent attention, a recurrence. The others with --every-family.
FEW = {"qwen3_moe", "deepseek_v3", "qwen3_5_text", *(ALL_TARGETS.keys() - families.RECIPES.keys())}


# Of these in every precision.
FEW_ROUNDED = ("gpt_oss", "qwen3_next")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_every_target_keeps_the_contract:
        every_family.parametrize(metafunc, ALL_TARGETS, FEW)
    if metafunc.function is test_a_family_keeps_the_contract_in:
        every_family.parametrize(metafunc, families.RECIPES, FEW_ROUNDED)


@pytest.mark.covers(what="contract", family=of, draft=shapes)
@pytest.mark.parametrize("check", TARGET_CHECKS)
def test_every_target_keeps_the_contract(name: str, check: str) -> None:
    if (name, check) in OPTIONAL:
        with pytest.raises(Skipped):
            TARGET_CHECKS[check](subject(name))
    else:
        TARGET_CHECKS[check](subject(name))


@pytest.mark.covers(what="contract", family=of, draft=("plain", "chain", "tree"), precision=lambda precision: precision)
@pytest.mark.parametrize("precision", ["bfloat16", "mixed", "fp8"])
def test_a_family_keeps_the_contract_in(precision: str, name: str) -> None:
    report = check_target(random_targets.in_precision(families.RECIPES[name], precision))
    assert report.ok, report


def test_a_report_says_what_was_compared_and_what_it_was_off() -> None:
    report = check_target(ALL_TARGETS["a table"]())
    assert report.ok
    assert str(report).startswith("TableTarget, target\n  passed   keeps the protocol: a vocabulary of 13\n")
    assert "skipped  lends its tables: it has no `tables`" in str(report)
    assert re.search(r"tree equals its own path: 17 tokens, logits off by 0e\+00 of the largest one", str(report))
    assert str(report).endswith(f"{len(TARGET_CHECKS) - 1} passed, 0 failed, 0 not run, 1 skipped")


@pytest.mark.parametrize("name", bad_targets.BROKEN)
def test_a_target_is_found_out_for(name: str) -> None:
    target, check, message = bad_targets.BROKEN[name]
    with tiny.unchecked():
        report = check_target(target, checks=["keeps the protocol", check])
    (failure,) = report.failures
    assert failure.name == check
    assert re.search(message, failure.detail), failure.detail
    assert not report.ok


def test_every_check_has_been_seen_to_fail() -> None:
    found = {check for _, check, _ in bad_targets.BROKEN.values()}
    assert found == set(TARGET_CHECKS) - {"a token depends on those before it"}


def test_a_target_that_reads_one_token_alone_shows_nothing() -> None:
    """Whatever slots, masks and states such a target mixes up, its output is the same; that is no pass."""
    model = recurrent.target().model
    params = {**model.init(0), "o": jnp.zeros((8, 8)), "ro": jnp.zeros((8, 8))}
    report = check_target(LoadedTarget(model, params, 13, 512), checks=["a token depends on those before it"])
    assert report.findings[0].verdict == "not run" and not report.ok


def test_features_may_be_refused() -> None:
    def refuse(given: dict) -> tuple[int, ...]:
        if given["aux_layers"]:
            raise ValueError("it has no features")
        return ()

    target = bad_targets.asked(aux_layers=refuse)
    report = check_target(target, checks=["features are those of the layers asked for", "lends its tables"])
    assert report.ok
    assert report.findings[0].verdict == "skipped" and "refused: it has no features" in report.findings[0].detail
    assert "the embedding not compared" in report.findings[1].detail


def test_a_cap_and_factors_are_no_fault_of_the_tables() -> None:
    capped = bad_targets.replaced(unembed=lambda *given: 3 * jnp.tanh(bad_targets.LOGITS(*given) / 3))
    assert check_target(capped, checks=["lends its tables"]).ok
    scaled = bad_targets.replaced(unembed=lambda *given: bad_targets.LOGITS(*given) / 4)
    (finding,) = check_target(scaled, checks=["lends its tables"]).findings
    assert "logits are 0.25 times the product" in finding.detail


TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))
RECURRENT = recurrent.target(5, seed=3)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4], [0, 1, 0, 1, 0], [2, 2], [3, 0, 3, 0]]
LIMITS = [30, 11, 24, 5, 17]
DRAFTS = {
    "a chain": {"drafter": NGram(3)},
    "a schedule": {"drafter": NGram(), "schedule": SpeculationSchedule(((1, 2, 5), (3, 4, 2), (5, 6, 0)))},
    "a table's chain": {"drafter": "table", "num_speculative_tokens": 3},
    "a table's tree": {"drafter": "table", "tree": TREE},
    "blocks that are padded": {"drafter": Plain(4)},
}


def of(name: str) -> SpeculativeDecoder:
    options = dict(DRAFTS[name])
    if options["drafter"] == "table":
        options["drafter"] = tables.drafter(np.random.default_rng(1).normal(0, 1.5, (25, 5)), 2, Chain(3))
    return SpeculativeDecoder(RECURRENT, stop_tokens=(), **options)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_recurrence_writes_its_own_text_with(name: str) -> None:
    """States that cannot be rolled back: ragged prompts, ragged limits, rows that leave, drafts refused half-way."""
    result = of(name).generate(PROMPTS, max_new_tokens=LIMITS)
    assert result.tokens == SpeculativeDecoder(RECURRENT).generate(PROMPTS, max_new_tokens=LIMITS).tokens
    if name != "blocks that are padded":
        assert result.stats.num_accepted_tokens > 0
    if name.startswith("a table"):
        assert result.stats.num_accepted_tokens < result.stats.num_draft_tokens


@pytest.mark.parametrize("name", ["a table's chain", "a table's tree"])
def test_rounds_by_hand_leave_the_state_of_the_text(name: str) -> None:
    """After every round the recurrent state is, to rounding, that of a fresh prefill of the text without its root."""
    positions = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (3, 24))
    model = RECURRENT.model
    fresh = jax.jit(lambda text, n: model(RECURRENT.params, text, positions, causal_mask(24), length=n).written[1])
    for one in of(name).rounds(PROMPTS[:3], max_new_tokens=8):
        state = one.state
        assert np.allclose(state.cache.layers[1].state, fresh(state.tokens[:, :24], state.length - 1), atol=1e-5)


def test_sampled_texts_of_a_recurrence_have_its_law() -> None:
    drafter = tiny.Sampled((-1, 0, 0, 1))
    table = jnp.asarray(np.random.default_rng(0).dirichlet(np.ones(5), 5), jnp.float32)
    law = "sampled output has the target's law"
    report = check_drafter(LoadedDrafter(drafter, table), RECURRENT, checks=[law], samples=4096)
    assert report.ok, str(report)
