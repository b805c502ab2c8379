"""Wrong numbers, requests and combinations of parts raise an error of one line.

Drafters and targets that break their contract are in ``test_boundary``, logits processors in
``test_processors``, files in ``tests/conversion`` and words of the command line in ``tests/cli``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AbstractMesh

import eagle3_jax as e3
from eagle3_jax.devices.sharding import (
    MESH_AXES,
    check_rows,
    make_mesh,
    param_shardings,
    parse_mesh,
)
from eagle3_jax.drafters import Fallback, NGram, Suffix
from eagle3_jax.engine.engine import Engine
from eagle3_jax.load import named_drafter
from eagle3_jax.models.config import Eagle3Config, GroupedQuery, RopeConfig
from eagle3_jax.processors.logits import LogitBias, with_processors
from eagle3_jax.sampling import draw, row_keys
from eagle3_jax.topology import PUBLISHED_TREES, Chain, DynamicTree, StaticTree
from eagle3_jax.types import SamplingMode

pytestmark = pytest.mark.core

TARGET = tiny.target(13)
HEAD = tiny.eagle3(TARGET)
TREE = DynamicTree(num_nodes=5, max_depth=2, top_k=2)
SCHEDULE = e3.SpeculationSchedule(((1, 2, 4), (3, 4, 2)))
PLAIN = e3.SpeculativeDecoder(TARGET)
THREE = [[1], [2], [3]]
Refusals = list[tuple[Callable[[], Any], str]]  # a call, and a part of its message


def with_rule(rule: Any, **options: Any) -> e3.SpeculativeDecoder:
    return e3.SpeculativeDecoder(TARGET, HEAD, verifier=rule, **options)


TOPOLOGIES: Refusals = [
    (lambda: Chain(0), "at least 1"),
    (lambda: DynamicTree(num_nodes=4, max_depth=0, top_k=1), "max_depth is 0"),
    (lambda: DynamicTree(num_nodes=8, max_depth=2, top_k=2), "give at most 7 nodes"),
    (lambda: DynamicTree(num_nodes=4, max_depth=4, top_k=2), "at least 5"),
    (lambda: StaticTree(()), "at least one path"),
    (lambda: StaticTree(((0,), (1, 0))), "no parent"),
    (lambda: StaticTree(((0,), (0,))), "twice"),
]
METHODS: Refusals = [
    (lambda: NGram(3, 1, 2), "min <= max"),
    (lambda: NGram(2).with_topology(None, "probabilistic"), "NGram has no distribution"),
    (lambda: NGram(2).with_topology(None, "nonsense"), "expected 'greedy' or 'probabilistic'"),
    (lambda: Suffix(max_suffix=0), "expected at least 1"),
    (lambda: Suffix(min_probability=2.0), r"min_probability is 2.0; expected 0 to 1"),
    (lambda: Fallback(HEAD.drafter, NGram(3)), "first is Eagle3Drafter, which has parameters"),
    (lambda: Fallback(NGram(3), HEAD), "LoadedDrafter is not a drafter"),
    (lambda: tiny.dflash(TARGET, Chain(5)), "a block of 5 predicts 4 tokens"),
    (lambda: tiny.dflash(TARGET, Chain(6), from_anchor=True), "a block of 5 predicts 5 tokens"),
    (
        lambda: tiny.dflash(TARGET, DynamicTree(num_nodes=9, max_depth=5, top_k=2), causal=True),
        "at most 4",
    ),
    (
        lambda: tiny.dflash(
            TARGET, DynamicTree(num_nodes=9, max_depth=2, top_k=7), draft_vocab_size=6
        ),
        "7 children from a draft vocab",
    ),
    (
        lambda: tiny.medusa(TARGET, PUBLISHED_TREES["medusa-63"], draft_vocab_size=7),
        "draws 10 children from a draft vocabulary of 7",
    ),
    (
        lambda: named_drafter("layer-skip=half", TARGET),
        "expected layer-skip=E, such as layer-skip=4",
    ),
    (lambda: named_drafter("ngram=3", TARGET), "drafter 'ngram=3': expected ngram$"),
]
RULES: Refusals = [
    (lambda: e3.SimulatedAcceptance.of_length(0.5, 3), "allow 1 to 4"),
    (lambda: e3.SimulatedAcceptance.of_conditional_rate(1.2, 3), "expected 0 to 1"),
    (lambda: e3.SimulatedAcceptance((0.5, 0.6)), "none above"),
    (lambda: e3.SimulatedAcceptance(()), "one for each depth"),
    (lambda: with_rule(e3.SimulatedAcceptance((0.5,))).generate([1]), "depth 3"),
    (
        lambda: with_rule(e3.SimulatedAcceptance((0.5, 0.2, 0.1))).generate([1], logprobs=1),
        "logprobs were asked of SimulatedAcceptance",
    ),
    (lambda: e3.TypicalAcceptance(epsilon=float("nan")), "epsilon is nan; expected a probability"),
    (lambda: e3.TypicalAcceptance(delta=-0.1), "delta is -0.1; expected a finite"),
    (lambda: with_rule(e3.BlockVerification(), tree=TREE), "is defined for chains.*drafts a tree"),
]
SCHEDULES: Refusals = [
    (lambda: e3.SpeculationSchedule.from_lists([[1, 4, 5], [4, 8, 3]]), "out of place"),
    (lambda: e3.SpeculationSchedule.from_lists([[1, 4, -1]]), "drafts -1 tokens"),
    (lambda: e3.SpeculationSchedule.from_lists([[1, 4, 0]]), "never drafts"),
    (lambda: e3.SpeculationSchedule.from_lists([[1, 4, 2.5]]), "three whole numbers"),
]
DECODERS: Refusals = [
    (
        lambda arguments=arguments, options=options: e3.SpeculativeDecoder(*arguments, **options),
        message,
    )
    for arguments, options, message in (
        (("llama",), {}, r"target is 'llama'; expected .* load_target\('llama'\)"),
        ((TARGET, "head"), {}, r"drafter is 'head'; .* load_drafter\('head', target=target\)"),
        ((TARGET,), {"tree": Chain(2)}, "tree .* without a drafter"),
        ((TARGET,), {"schedule": SCHEDULE}, "schedule was given without a drafter"),
        ((TARGET,), {"rounds_per_check": 0}, "rounds_per_check is 0; expected at least 1"),
        ((TARGET, HEAD), {"schedule": SCHEDULE, "num_speculative_tokens": 3}, "more than one"),
        ((TARGET, NGram(3)), {"tree": tiny.STATIC_TREE}, "NGram cannot draft a tree"),
        ((TARGET, NGram(3)), {"draft_sampling": "probabilistic"}, "NGram has no distribution"),
        (
            (TARGET, NGram(3)),
            {"draft_sampling": "nonsense"},
            "expected 'greedy' or 'probabilistic'",
        ),
        ((TARGET, tiny.eagle3(TARGET, TREE)), {"draft_sampling": "probabilistic"}, "draft a chain"),
        (
            (TARGET, tiny.medusa(TARGET)),
            {"num_speculative_tokens": 5},
            "5 tokens needs as many Medusa heads",
        ),
    )
]
REQUESTS: Refusals = [
    (lambda prompts=prompts, options=options: PLAIN.generate(prompts, **options), message)
    for prompts, options, message in (
        ([], {}, "no prompts"),
        ([[]], {}, "empty"),
        ([13], {}, "not a token id"),
        ([True], {}, "not a token id"),
        (np.ones((1, 2)), {}, "prompt token 1.0 is not a token id"),
        (np.zeros((1, 2, 3), int), {}, r"shape \(1, 2, 3\); expected \[T\]"),
        (5, {}, "prompts is 5; expected a text"),
        ("text", {}, "no tokenizer"),
        ([1] * 600, {}, "512 positions"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1], [2]], {"max_new_tokens": [1]}, "give one each"),
        (THREE, {"max_new_tokens": [3, "4", 5]}, "expected a whole number of at least 1"),
        (THREE, {"max_new_tokens": float("nan")}, "expected a whole number of at least 1"),
        ([1], {"sampling": 0.8}, "expected SamplingParams"),
        (THREE, {"seed": [1, 2]}, "2 seeds for 3 prompts; give one each"),
        ([1], {"logprobs": 14}, "logprobs is 14; expected a whole number from 0 to 13, or None"),
        ([1], {"stop": "end"}, "has no tokenizer; use stop_tokens"),
        (THREE, {"stop": [["end"], ["\\n"]]}, "2 lists of stop texts for 3 prompts; give one each"),
        ([1], {"stop": [""]}, "stop contains ''; expected texts of at least one character"),
        *(
            (THREE, {"sampling": e3.SamplingParams(**sampling)}, message)
            for sampling, message in (
                (
                    {"temperature": np.array([0.5, 0.5], np.float32)},
                    r"temperature has shape \(2,\) for 3 rows",
                ),
                ({"temperature": float("inf")}, "temperature is inf; expected 0 .* finite"),
                ({"top_p": float("nan")}, "top_p is nan"),
                ({"top_k": -(10**12)}, "top_k is -1"),
            )
        ),
    )
]
REQUESTS += [
    (
        lambda: PLAIN.target.encode(np.array([[1, 2, 3], [4, 5, 6]])),
        r"shape \(2, 3\); expected \[T\]",
    ),
    (
        lambda: PLAIN.step(PLAIN.prefill([1], max_new_tokens=3).replace(sampling={})),
        "sampling is {}; expected SamplingParams",
    ),
    (
        lambda: PLAIN.step(
            PLAIN.prefill([1], max_new_tokens=3).replace(
                sampling=e3.SamplingParams(temperature=-1.0)
            )
        ),
        "temperature is -1",
    ),
    (lambda: draw(jnp.ones(65), jnp.zeros(1)), r"1 uniforms for a draw from 65 tokens; expected 2"),
    (lambda: row_keys(2**32, 2), r"seed is .*; expected a whole number from 0 to 4294967295"),
    (lambda: row_keys([1, -1], 2), r"seed is .*; expected a whole number from 0 to 4294967295"),
    (lambda: Engine(PLAIN, slots=0, capacity=64), "slots is 0"),
    (
        lambda: PLAIN.prefill([1, 2, 3], max_new_tokens=20, capacity=20),
        "capacity is 20; expected at least 24",
    ),
    (
        lambda: PLAIN.prefill(
            [1], sampling=e3.SamplingParams(temperature=1.0), sampling_mode=SamplingMode.GREEDY
        ),
        "sampling_mode is 'greedy'",
    ),
]


def query_heads(**options: Any) -> GroupedQuery:
    return GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=8, **options)


def eagle3_with_norms_after() -> Eagle3Config:
    layers = tuple(dataclasses.replace(layer, norms="after") for layer in tiny.layers(1))
    sizes = {"vocab_size": 9, "width": 8, "draft_vocab_size": 9, "target_width": 8}
    return Eagle3Config(**sizes, aux_layers=(1,), layers=layers)


@dataclasses.dataclass(frozen=True)
class FloatState(LogitBias):
    def init(self, batch: int, vocab_size: int) -> jax.Array:
        return jnp.zeros((batch,))


PARTS: Refusals = [
    (lambda: RopeConfig(partial=1.5), "partial is 1.5"),
    (
        lambda: RopeConfig(type="longrope", original_max_positions=1),
        "needs original_max_positions above 1",
    ),
    (lambda: query_heads(window=3, chunk=4), "exclude each other"),
    (lambda: query_heads(qk_norm=True, qk_l2_norm=True), "normalised once"),
    (lambda: query_heads(qk_norm_kind="whole"), "set qk_norm"),
    (lambda: query_heads(softcap=0.0), "softcap is 0"),
    (eagle3_with_norms_after, "first layer has norms 'after'"),
    (lambda: tiny.dflash(TARGET, layers=tiny.layers(1) + tiny.layers(1, rope=None)), "more than"),
    (lambda: tiny.dflash(TARGET, layers=tiny.layers(2, chunk=4)), "windows, no chunks"),
    (lambda: tiny.dflash(TARGET, causal_windows=True), "set causal alone"),
    (
        lambda: with_processors(TARGET, FloatState({})),
        "has a state of float32; expected bool, uint8 or int32",
    ),
    (lambda: with_processors(TARGET, NGram(3)), "NGram.* is not a logits processor"),
]
MESHES: Refusals = [
    (lambda: parse_mesh("model=4,pipe=2"), "'pipe' is not an axis; the axes are data and model"),
    (
        lambda: parse_mesh("model=four"),
        "the size of model is 'four'; expected a number from 1, as in model=4,data=2",
    ),
    (lambda: parse_mesh("model=2,model=2"), "names model twice"),
    (
        lambda: make_mesh("model=4,data=2", devices=jax.devices()[:1]),
        r"model=4,data=2 needs 8 devices and there is 1 \(CPU\)",
    ),
    (
        lambda: param_shardings(AbstractMesh((1, 4), MESH_AXES), HEAD.drafter, HEAD.params),
        r"model=4,data=1 does not divide 2 key/value heads: model can be 1, 2$",
    ),
    (
        lambda: check_rows(AbstractMesh((4, 1), MESH_AXES), 6),
        r"divides rows over 4 and the batch has 6; give a multiple of 4 prompts",
    ),
]
ALL = [*TOPOLOGIES, *METHODS, *RULES, *SCHEDULES, *DECODERS, *REQUESTS, *PARTS, *MESHES]


@pytest.mark.parametrize(("call", "message"), ALL, ids=[message for _, message in ALL])
def test_the_error_is_one_line(call: Callable[[], Any], message: str) -> None:
    with tiny.unchecked(), pytest.raises(ValueError, match=message) as refusal:
        call()
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 300
