"""The engine gives each request the tokens that it has alone.

With fewer rows than requests, and without compiling.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import families
import jax
import numpy as np
import pytest
import random_targets
import tiny

import eagle3_jax as e3
from eagle3_jax import loop as loops
from eagle3_jax.engine import rows as rows_of_engine
from eagle3_jax.engine.engine import Engine, Event, ended
from eagle3_jax.prompts.request import Request
from eagle3_jax.types import SamplingMode

TEXTS = [
    "def add(a, b):\n",
    "import",
    "class Queue:\n",
    "x = [",
    '"""Reads a file line by line, and ',
    "for",
]


def requests_of(decoder: e3.SpeculativeDecoder) -> list[Request]:
    """Prompts of two padded lengths, each with another limit, temperature and seed."""
    return [
        Request(
            decoder.target.encode(text * (1 + number // 2)),
            max_new_tokens=1 + 6 * number,
            temperature=[0.0, 0.8][number % 2],
            top_k=20,
            top_p=[1.0, 0.9][number % 2],
            seed=number,
        )
        for number, text in enumerate(TEXTS)
    ]


def alone(decoder: e3.SpeculativeDecoder, request: Request) -> list[int]:
    result = decoder.generate(
        request.tokens,
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        seed=request.seed,
    )
    return result.tokens[0]


@pytest.mark.parametrize("way", ["plain", "chain"])
def test_each_request_has_the_tokens_that_it_has_alone(way: str, shipped: e3.LoadedTarget) -> None:
    options = (
        {}
        if way == "plain"
        else {"drafter": e3.load_drafter(target=shipped), "num_speculative_tokens": 3}
    )
    decoder = e3.SpeculativeDecoder(shipped, rounds_per_check=2, **options)

    requests = requests_of(decoder)
    engine = Engine(decoder, slots=3, capacity=128)

    programs = (loops.prefill, loops.step, rows_of_engine.insert, rows_of_engine.ended_copies)
    before = [program._cache_size() for program in programs]
    expected = [alone(decoder, request) for request in requests]
    assert engine.run(requests) == expected

    compiled = [program._cache_size() for program in programs]
    assert compiled[1] == before[1] + 1
    assert engine.run(requests[:5]) == expected[:5]
    assert [program._cache_size() for program in programs] == compiled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_new_tokens": 61},
            "prompt has 3 tokens and is given 61 more, and a row of the engine holds 63",
        ),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [13]}, "prompt token 13 is not a token id"),
        (
            {"top_k": 5},
            "sampling_mode is 'temperature', and these sampling parameters need 'truncated'",
        ),
    ],
)
def test_a_request_that_no_row_can_take_is_refused(options: dict[str, Any], message: str) -> None:
    decoder = e3.SpeculativeDecoder(tiny.target(13))
    engine = Engine(decoder, slots=2, capacity=64, sampling_mode=SamplingMode.TEMPERATURE)
    with pytest.raises(ValueError, match=message):
        engine.submit(
            Request(**({"prompt": [1, 2, 3], "max_new_tokens": 4, "temperature": 1.0} | options))
        )
    assert engine.idle


@pytest.fixture(scope="module")
def chain(shipped: e3.LoadedTarget) -> e3.SpeculativeDecoder:
    return e3.SpeculativeDecoder(shipped, e3.load_drafter(target=shipped), num_speculative_tokens=3)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_a_family_takes_prompts_in_chunks:
        # Windows, latent attention with experts, a recurrence; the others are slow.
        families.parametrize(metafunc, families.RECIPES, ("gemma3", "deepseek_v3", "qwen3_5_text"))


def test_a_family_takes_prompts_in_chunks(name: str) -> None:
    """In chunks of 7 tokens, across windows of 5, while another row is decoded."""
    target = random_targets.of_family(families.RECIPES[name])
    decoder = e3.SpeculativeDecoder(target, e3.drafters.NGram(2), stop_tokens=())
    prompts = tiny.random_prompts(3, target.vocab_size, seed=5)
    prompts = [(prompt * 8)[:size] for prompt, size in zip(prompts, (23, 7, 14), strict=True)]
    expected = decoder.generate(prompts, max_new_tokens=12).tokens
    engine = Engine(decoder, slots=2, capacity=64, sampling_mode=SamplingMode.GREEDY, chunk=7)
    assert engine.run([Request(prompt, 12) for prompt in prompts]) == expected


def test_chunks_leave_the_caches_of_one_piece(chain: e3.SpeculativeDecoder) -> None:
    """Of target and head, after chunks of 16 and of 7 of 50 tokens, in float32.

    The first sampled tokens are equal too.
    """
    sampling = e3.SamplingParams(temperature=1.0)
    loop, prompts, _ = chain.batch(["import os\n" * 12, "x = 1"], 8, sampling, [1, 2], None)
    expected = loops.prefill(loop, chain.params, prompts, capacity=128)

    for size in (16, 7):
        state = loops.empty(loop, chain.params, prompts, capacity=128)
        while int((prompts.length - state.cache.length).max()) > 0:
            state = loops.extend(loop, chain.params, state, prompts.length, size=size)

        for field in ("tokens", "length", "finish"):
            np.testing.assert_array_equal(getattr(state, field), getattr(expected, field))

        for row, length in enumerate(prompts.length.tolist()):
            for caches in ((state.cache, expected.cache), (state.drafter, expected.drafter)):
                ours, theirs = (leaves_of(cache, row, length - 1) for cache in caches)
                for actual, reference in zip(ours, theirs, strict=True):
                    np.testing.assert_allclose(actual, reference, atol=1e-4)


def leaves_of(cache: Any, row: int, length: int) -> list[np.ndarray]:
    """The first ``length`` slots of the keys and values of a row."""
    leaves = [np.asarray(leaf)[row] for leaf in jax.tree.leaves(cache)]
    return [leaf[:, :length] for leaf in leaves if leaf.ndim == 3 and leaf.shape[1] == 128]


def events_of(engine: Engine) -> list[Event]:
    events = []
    while not engine.idle:
        events += engine.tick()
    return events


def test_events_are_the_tokens_once_and_in_order(chain: e3.SpeculativeDecoder) -> None:
    decoder = chain
    engine = Engine(decoder, slots=2, capacity=128, logprobs=2)
    requests = requests_of(decoder)[:4]
    ids = [engine.submit(request) for request in requests]

    events = events_of(engine)
    for request_id, request in zip(ids, requests, strict=True):
        own_events = [event for event in events if event.request_id == request_id]
        tokens = [token for event in own_events for token in event.tokens]
        assert tokens == own_events[-1].output == alone(decoder, request)
        assert len(own_events[0].tokens) == 1
        is_running = [event.finish_reason is e3.FinishReason.RUNNING for event in own_events]
        assert is_running == [True] * (len(own_events) - 1) + [False]

        scored = [score for event in own_events for score in event.logprobs or ()]
        options = {
            "max_new_tokens": request.max_new_tokens,
            "sampling": request.sampling,
            "seed": request.seed,
        }
        expected = decoder.generate(request.tokens, **options, logprobs=2).rows[0].logprobs
        assert [score.logprob for score in scored] == pytest.approx(
            [score.logprob for score in expected], abs=1e-4
        )

        stats = own_events[-1].stats
        assert stats is not None and int(stats.num_accepted_tokens) <= len(tokens)

    assert engine.totals == e3.SpeculationStats.merge(
        event.stats for event in events if event.output is not None
    )


def test_a_cancelled_request_frees_its_slot_and_leaves_the_others_alone(
    chain: e3.SpeculativeDecoder,
) -> None:
    decoder = chain
    requests = requests_of(decoder)
    expected = [alone(decoder, request) for request in requests]

    engine = Engine(decoder, slots=2, capacity=128)
    ids = [engine.submit(request) for request in requests]

    # This request still waits.
    engine.cancel(ids[4])
    events = [event for _ in range(3) for event in engine.tick()]

    running = next(request_id for request_id in ids[1:] if request_id not in dict(ended(events)))
    assert any(event.request_id == running for event in events)

    engine.cancel(running)
    events += events_of(engine)

    outputs = dict(ended(events))
    remaining = [request_id for request_id in ids if request_id not in (ids[4], running)]
    assert [outputs[request_id] for request_id in remaining] == [
        expected[request_id] for request_id in remaining
    ]

    assert engine.free == 2
    completed = e3.SpeculationStats.merge(
        event.stats for event in events if event.output is not None
    )
    # The rounds of the cancelled request count.
    assert 0 < completed.num_drafts < engine.totals.num_drafts


def test_requests_begin_in_order(chain: e3.SpeculativeDecoder) -> None:
    engine = Engine(chain, slots=1, capacity=128)
    ids = [engine.submit(Request([5] * length, 2)) for length in (3, 40, 3, 40)]
    assert [request_id for request_id, _ in ended(events_of(engine))] == ids


def test_ignored_stop_tokens_do_not_end_a_request(shipped: e3.LoadedTarget) -> None:
    written = (
        e3.SpeculativeDecoder(shipped, stop_tokens=())
        .generate("import", max_new_tokens=12)
        .tokens[0]
    )

    decoder = e3.SpeculativeDecoder(shipped, stop_tokens=(written[4],))
    prompt = decoder.target.encode("import")
    requests = [Request(prompt, 12, ignore_stop=True), Request(prompt, 12)]

    assert Engine(decoder, slots=2, capacity=64).run(requests) == [
        written,
        written[: written.index(written[4]) + 1],
    ]


def test_a_request_has_the_same_bits_in_every_slot_and_company(
    chain: e3.SpeculativeDecoder,
) -> None:
    """Keys and values of the target after a request alone, and next to others, in another slot."""
    request = Request(chain.target.encode("def add(a, b):\n"), 20)

    def keys_of(engine: Engine, request_id: int) -> list[np.ndarray]:
        while all(
            slot.request_id != request_id or len(slot.output) < 12
            for slot in engine._slots.values()
        ):
            engine.tick()
        (index,) = (index for index, slot in engine._slots.items() if slot.request_id == request_id)
        assert engine._state is not None
        return leaves_of(engine._state.cache, index, len(request.tokens) + 11)

    lonely = Engine(chain, slots=4, capacity=128)
    expected = keys_of(lonely, lonely.submit(request))
    crowded = Engine(chain, slots=4, capacity=128)
    for neighbor in requests_of(chain)[3:]:
        crowded.submit(dataclasses.replace(neighbor, max_new_tokens=40))
    actual = keys_of(crowded, crowded.submit(request))
    for bits, expected_bits in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(bits, expected_bits)
