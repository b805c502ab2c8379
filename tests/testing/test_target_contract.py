"""The contract of targets: every family keeps it, and each check finds a broken target.

A new family is one more recipe in ``families.py``.
"""

from __future__ import annotations

import datetime
import functools
import itertools
from collections.abc import Callable
from typing import Any

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_targets
import recurrent
import tables
import tiny
from faults import Fault
from flax import struct
from jaxtyping import Array
from recurrent import Recurrent, RecurrentTarget
from target_table import ALL_TARGETS, FEW

from eagle3_jax import Chain, LoadedTarget, SpeculationSchedule, SpeculativeDecoder, check_target
from eagle3_jax.cache import Cache, KeyValue
from eagle3_jax.drafters import NGram, Plain
from eagle3_jax.models.config import Experts
from eagle3_jax.testing import TARGET_CHECKS
from eagle3_jax.testing import target as checks
from eagle3_jax.testing.report import Skipped
from eagle3_jax.testing.subject import Subject
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import EmbeddingTables

# Checks of optional features that a target lacks.
OPTIONAL = {("a table", "lends its tables")}


@functools.cache
def subject(name: str) -> Subject:
    target = ALL_TARGETS[name]()
    return Subject(target.model, target=target)


LONG = "a long text equals its tokens one by one"
# Families that are checked in every precision; the others in one, which changes from day to day.
FEW_ROUNDED = ("gpt_oss", "qwen3_next")
PRECISIONS = ("bfloat16", "mixed", "fp8", "int8")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_every_target_keeps_the_contract:
        families.parametrize(metafunc, ALL_TARGETS, FEW)
    if metafunc.function is test_a_family_keeps_the_contract_in:
        cases = [
            f"{name}-{precision}"
            for index, name in enumerate(families.RECIPES, datetime.date.today().toordinal())
            for precision in PRECISIONS
            if name in FEW_ROUNDED or precision == PRECISIONS[index % len(PRECISIONS)]
        ]
        few = [case for case in cases if case.rpartition("-")[0] in FEW_ROUNDED]
        families.parametrize(metafunc, cases, few)


@pytest.mark.parametrize("check", TARGET_CHECKS)
def test_every_target_keeps_the_contract(name: str, check: str) -> None:
    if (name, check) in OPTIONAL:
        with pytest.raises(Skipped):
            TARGET_CHECKS[check](subject(name))
    else:
        TARGET_CHECKS[check](subject(name))


def test_a_family_keeps_the_contract_in(name: str) -> None:
    name, _, precision = name.rpartition("-")
    target = random_targets.in_precision(families.RECIPES[name], precision)
    # Where two experts are nearly tied, rounding decides which of them answers: logits of qwen3_moe
    # in bfloat16 differ by up to 0.2 of the largest, and by 0.006 if every token has all experts.
    # In float32 all texts are compared above.
    routed = name not in FEW_ROUNDED and any(
        isinstance(layer.mlp, Experts) for layer in target.model.config.layers
    )
    report = check_target(target, checks=TARGET_CHECKS.keys() - ({LONG} if routed else set()))
    assert report.ok, str(report)


def test_a_report_has_the_largest_deviations() -> None:
    report = check_target(ALL_TARGETS["a table"]())
    assert report.ok
    assert str(report).startswith(
        "TableTarget, target\n  passed   keeps the protocol: a vocabulary of 13\n"
    )
    assert "skipped  lends its tables: it has no `tables`" in str(report)
    assert "tree equals its own path: logits off by 0e+00 of the largest one" in str(report)
    assert str(report).endswith(f"{len(TARGET_CHECKS) - 1} passed, 0 failed, 0 not run, 1 skipped")


def replaced(**members: Any) -> LoadedTarget:
    """A recurrent target with some members replaced; functions become methods."""
    model = type("Replaced", (RecurrentTarget,), members)()
    return LoadedTarget(model, model.init(0), model.vocab_size, 512)


def answering(
    change: Callable[[Array], Array] = lambda final: final, **changes: Callable[[dict], Any]
) -> LoadedTarget:
    """Returns a recurrent target that runs with changed arguments or returns changed states."""

    def call(self, params, tokens, positions, mask, cache=None, aux_layers=(), length=None):
        arguments = {"tokens": tokens, "positions": positions, "mask": mask, "cache": cache}
        arguments |= {"aux_layers": aux_layers, "length": length}
        arguments |= {name: new(arguments) for name, new in changes.items()}
        output = RecurrentTarget.__call__(self, params, **arguments)
        return output.replace(final=change(output.final))

    return replaced(__call__=call)


class Halved(Recurrent):
    def commit(self, written, length, count, nodes):
        layer = Recurrent.commit(self, written, length, count, nodes)
        return layer.replace(state=layer.state.astype(jnp.bfloat16))


class InOrder(Recurrent):
    def commit(self, written, length, count, nodes):
        return Recurrent.commit(self, written, length, count, None)


class Restless(Recurrent):
    """Takes in the root when no node is committed."""

    def commit(self, written, length, count, nodes):
        return Recurrent.commit(self, written, length, jnp.maximum(count, 1), nodes)


def keeping(layer: type[Recurrent]) -> LoadedTarget:
    layer = struct.dataclass(layer, kw_only=True)
    return replaced(empty=lambda self, batch: layer(state=RecurrentTarget.empty(self, batch).state))


def states_of_the_node_before(self, params, x, mask, start):
    return RecurrentTarget.states(
        self, params, x, jnp.broadcast_to(causal_mask(x.shape[1]), mask.shape), start
    )


CALLS = itertools.count()
LOGITS = RecurrentTarget.unembed
BROKEN: dict[str, Fault] = {
    "an unstable hash": Fault(replaced(__hash__=lambda self: next(CALLS)), "keeps the protocol", "its hash changes"),
    "logits in half precision": Fault(
        replaced(unembed=lambda *arguments: LOGITS(*arguments).astype(jnp.float16)), "keeps shapes and types",
        r"float16\[3, 6, 13\] for \[3, 6, 8\]; expected float32",
    ),
    "a state that loses half its bits": Fault(
        keeping(Halved), "keeps shapes and types", r"float32\[3, 8, 8\] and committing a path made it bfloat16"
    ),
    "a prompt that attends to later tokens": Fault(
        answering(mask=lambda call: call["mask"] | (call["cache"] is None)), "a text equals its tokens one by one",
        "of a prompt is not its text's: logits off by",
    ),
    "padding in the state": Fault(
        answering(length=lambda call: None), "a text equals its tokens one by one", "of a chain is not the end of its"
    ),
    "a commit of nothing that advances": Fault(
        keeping(Restless), "a text equals its tokens one by one", "after a commit of a chain is not its text's"
    ),
    "a state of the node before": Fault(
        replaced(states=states_of_the_node_before), "a node of a tree equals its own path", "is not the end of its path"
    ),
    "a state committed in the block's order": Fault(
        keeping(InOrder), "a node of a tree equals its own path", "after a commit of a tree is not its text's"
    ),
    "rows that are mixed": Fault(
        answering(lambda x: x + 0.01 * jnp.mean(x, axis=0, keepdims=True)), "rows are independent of their neighbours",
        "is another when its neighbours hold other tokens",
    ),
    "positions of a prompt that are off from 24 on": Fault(
        answering(positions=lambda call: call["positions"] + call["positions"] // 24 * int(call["cache"] is None)),
        LONG, "of a prompt is not its text's",
    ),
    "a block that is wrong after eight tokens": Fault(
        answering(lambda x: jnp.concatenate([x[:, :8], -x[:, 8:]], axis=1) if x.shape[1] == 16 else x),
        LONG, "of a tree of 16 is not the end of its path",
    ),
    "features in ascending order": Fault(
        answering(aux_layers=lambda call: tuple(sorted(call["aux_layers"]))),
        "features are those of the layers asked for", "features of layer . differ when",
    ),
    "an unembedding of other ids": Fault(
        replaced(tables=lambda self, params: EmbeddingTables(
            params["embedding"], jnp.roll(params["embedding"].T, 1, axis=1)
        )), "lends its tables", "from the final state times its unembedding",
    ),
    "blocks of four with other logits": Fault(
        answering(lambda x: -x if x.shape[1] == 4 else x), "greedy output is its own", "a chain drafted, row . writes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_target_is_found_out_for(name: str) -> None:
    fault = BROKEN[name]
    with tiny.unchecked():
        report = check_target(fault.part, checks=fault.checks)
    fault.require_found(report)


def test_a_cache_is_filled_by_its_own_class() -> None:
    """In jax 0.10.2 `jit` takes one class for the other in 19 of 1,305 pairs; here are 780."""
    for index in range(40):
        layer = type(f"Layer{index}", (Recurrent,), {})
        model = keeping(layer).model
        cache = model.init_cache(1, 4)
        written = (KeyValue(cache.layers[0].keys, cache.layers[0].values), cache.layers[1].state)
        filled = checks._update(model, Cache.fill, cache, written, jnp.ones(1, jnp.int32))
        assert type(filled.layers[1]).__name__ == layer.__name__


def test_a_target_that_reads_one_token_only_is_not_a_pass() -> None:
    """Its output is the same for any slots, masks and states, so no check could detect a fault."""
    model = recurrent.target().model
    params = {**model.init(0), "o": jnp.zeros((8, 8)), "ro": jnp.zeros((8, 8))}
    report = check_target(
        LoadedTarget(model, params, 13, 512), checks=["a token depends on those before it"]
    )
    assert report.findings[0].verdict == "not run" and not report.ok


def test_features_may_be_refused() -> None:
    def refuse(arguments: dict) -> tuple[int, ...]:
        if arguments["aux_layers"]:
            raise ValueError("it has no features")
        return ()

    checks = ["features are those of the layers asked for", "lends its tables"]
    report = check_target(answering(aux_layers=refuse), checks=checks)
    assert report.ok
    features, tables = report.findings
    assert features.verdict == "skipped"
    assert "refused: it has no features" in features.detail
    assert "the embedding is not compared" in tables.detail


def test_a_cap_and_factors_are_no_fault_of_the_tables() -> None:
    capped = replaced(unembed=lambda *arguments: 3 * jnp.tanh(LOGITS(*arguments) / 3))
    assert check_target(capped, checks=["lends its tables"]).ok
    scaled = replaced(unembed=lambda *arguments: LOGITS(*arguments) / 4)
    (finding,) = check_target(scaled, checks=["lends its tables"]).findings
    assert "logits are 0.25 times the product" in finding.detail


RECURRENT = recurrent.target(5, seed=3)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4], [0, 1, 0, 1, 0], [2, 2], [3, 0, 3, 0]]
LIMITS = [30, 11, 24, 5, 17]
DRAFTS = {
    "a chain": {"drafter": NGram(3)},
    "a schedule": {
        "drafter": NGram(),
        "schedule": SpeculationSchedule(((1, 2, 5), (3, 4, 2), (5, 6, 0))),
    },
    "a table's chain": {"drafter": "table", "num_speculative_tokens": 3},
    "a table's tree": {"drafter": "table", "tree": tiny.STATIC_TREE},
    "blocks that are padded": {"drafter": Plain(4)},
}


def recurrent_decoder(name: str) -> SpeculativeDecoder:
    options = dict(DRAFTS[name])
    if options["drafter"] == "table":
        options["drafter"] = tables.drafter(
            np.random.default_rng(1).normal(0, 1.5, (25, 5)), 2, Chain(3)
        )
    return SpeculativeDecoder(RECURRENT, stop_tokens=(), **options)


@pytest.mark.parametrize("name", DRAFTS)
def test_a_recurrence_writes_its_own_text_with(name: str) -> None:
    """States that cannot be rolled back: ragged prompts and limits, drafts refused half-way."""
    result = recurrent_decoder(name).generate(PROMPTS, max_new_tokens=LIMITS)
    assert (
        result.tokens
        == SpeculativeDecoder(RECURRENT).generate(PROMPTS, max_new_tokens=LIMITS).tokens
    )
    if name != "blocks that are padded":
        assert result.stats.num_accepted_tokens > 0
    if name.startswith("a table"):
        assert result.stats.num_accepted_tokens < result.stats.num_draft_tokens


@pytest.mark.parametrize("name", ["a table's chain", "a table's tree"])
def test_rounds_by_hand_leave_the_state_of_the_text(name: str) -> None:
    """After each round the state is, to rounding, that of a prefill of the text so far.

    The text is that without its root.
    """
    positions = jnp.broadcast_to(jnp.arange(24, dtype=jnp.int32), (3, 24))
    model = RECURRENT.model

    @jax.jit
    def fresh(text: Array, length: Array) -> Array:
        output = model(RECURRENT.params, text, positions, causal_mask(24), length=length)
        return output.written[1]

    for decoded in recurrent_decoder(name).rounds(PROMPTS[:3], max_new_tokens=8):
        state = decoded.state
        expected = fresh(state.tokens[:, :24], state.length - 1)
        assert np.allclose(state.cache.layers[1].state, expected, atol=1e-5)
