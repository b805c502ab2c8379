"""The decoder's arguments, its defaults, and how results and states are printed and compared."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax.loaded import LoadedDrafter
from eagle3_jax.measure.trace import record
from eagle3_jax.results import GenerationResult
from eagle3_jax.types import Draft, DraftSampling, SamplingMode, SamplingParams

TARGET = tiny.target(13)
HEAD = tiny.eagle3(TARGET)
PROMPTS = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture(scope="module")
def decoder() -> e3.SpeculativeDecoder:
    return e3.SpeculativeDecoder(TARGET, HEAD)


@pytest.mark.parametrize("array", [np.array, jnp.array], ids=["numpy", "JAX"])
def test_rows_of_an_array_are_prompts(decoder: e3.SpeculativeDecoder, array: Any) -> None:
    expected = decoder.generate(PROMPTS, max_new_tokens=4)
    assert decoder.generate(array(PROMPTS), max_new_tokens=4).tokens == expected.tokens
    assert (
        decoder.generate([array(row) for row in PROMPTS], max_new_tokens=4).tokens
        == expected.tokens
    )
    single = decoder.generate(array(PROMPTS[1]), max_new_tokens=4)
    assert single.tokens == [expected.tokens[1]]
    assert single.rows[0].prompt_tokens == PROMPTS[1]
    assert type(single.rows[0].prompt_tokens[0]) is int


@pytest.mark.parametrize(
    "head", [HEAD, tiny.draft_model(TARGET)], ids=["a network", "a draft model"]
)
def test_draft_sampling_is_an_enum_or_its_word(head: LoadedDrafter) -> None:
    drafter: Any = head.drafter
    with tiny.unchecked():
        assert e3.drafters.NGram(2).with_topology(None, "greedy") == e3.drafters.NGram(2)

        for sampling in DraftSampling:
            for option in (sampling, sampling.value):
                decoder = e3.SpeculativeDecoder(TARGET, head, draft_sampling=option)
                assert decoder.loop.drafter == drafter.with_topology(None, option)
                assert decoder.loop.drafter.draft_sampling is sampling
                assert decoder.method.endswith(f"{sampling.value} draft sampling")

        for wrong in ("nonsense", 1, True, ""):
            message = f"draft_sampling is {wrong!r}; expected 'greedy' or 'probabilistic'"
            with pytest.raises(ValueError, match=message):
                drafter.with_topology(None, wrong)


def test_generate_and_a_trace_give_the_same_result() -> None:
    """``generate`` and a trace build the same result; its field ``lossless`` has no default."""
    assert (
        inspect.signature(GenerationResult).parameters["lossless"].default
        is inspect.Parameter.empty
    )

    for rule in (None, e3.TypicalAcceptance()):
        decoder = e3.SpeculativeDecoder(TARGET, HEAD, verifier=rule)
        options = {"max_new_tokens": [4, 6], "sampling": SamplingParams(temperature=1.0), "seed": 3}
        generated = decoder.generate(PROMPTS, **options)
        traced = record(decoder, PROMPTS, **options).result
        assert generated.lossless is traced.lossless is (rule is None)
        assert generated.rows == traced.rows

        another_seed = decoder.generate(PROMPTS, **{**options, "seed": 4})
        assert another_seed.rows != generated.rows
        assert generated.rows[0] != generated.rows[1]


@pytest.mark.parametrize("sampling_mode", SamplingMode)
def test_the_rule_takes_one_sampling_for_all_rows(sampling_mode: SamplingMode) -> None:
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 2, 13)), jnp.float32)
    draft = Draft(
        tokens=jnp.asarray(rng.integers(0, 13, (3, 2)), jnp.int32),
        parents=jnp.broadcast_to(jnp.array([-1, 0], jnp.int32), (3, 2)),
        valid=jnp.ones((3, 2), bool),
    )

    keys = jax.random.split(jax.random.key(0), 3)
    scalars = SamplingParams(temperature=0.9, top_k=5, top_p=0.8)
    per_row = SamplingParams(
        temperature=np.full(3, 0.9, np.float32),
        top_k=np.full(3, 5, np.int32),
        top_p=np.full(3, 0.8, np.float32),
    )

    for rule in (e3.Exact(), e3.BlockVerification(), e3.TypicalAcceptance()):
        expected = rule(draft, logits, scalars, keys, sampling_mode=sampling_mode, max_depth=1)
        assert tiny.same_bits(
            expected, rule(draft, logits, per_row, keys, sampling_mode=sampling_mode, max_depth=1)
        )


def test_a_state_is_printed_in_a_line(decoder: e3.SpeculativeDecoder) -> None:
    state = decoder.prefill([[1, 2, 3], [4]], max_new_tokens=[1, 6])
    assert repr(state) == "GenerationState(2 rows, 1 running, 2 to 4 of 128 tokens known)"
    latest = decoder.step(state)
    assert repr(state) == "GenerationState(2 rows, consumed by a step)"
    shown = []
    jax.eval_shape(lambda state: shown.append(repr(state)) or state.length, latest.state)
    with tiny.unchecked():
        shapes = jax.eval_shape(lambda state: state, latest.state)
    assert shown == [repr(shapes)] == ["GenerationState(2 rows, capacity of 128 tokens)"]
    assert len(repr(latest)) < 4000
