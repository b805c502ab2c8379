"""A pool gives each request the tokens that it has alone, with fewer rows than requests and without compiling."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax import loop as loops
from eagle3_jax.serving import pool as pools
from eagle3_jax.serving.pool import Pool, PoolRequest
from eagle3_jax.types import SamplingMode

TEXTS = ["def add(a, b):\n", "import", "class Queue:\n", "x = [", '"""Reads a file line by line, and ', "for"]


@functools.cache
def shipped() -> e3.LoadedTarget:
    return e3.load_target()


def requests_of(decoder: e3.SpeculativeDecoder) -> list[PoolRequest]:
    """Prompts of two padded lengths, each with another limit, temperature and seed."""
    return [
        PoolRequest(
            tokens=decoder.encode(text * (1 + number // 2)),
            max_new_tokens=1 + 6 * number,
            temperature=[0.0, 0.8][number % 2],
            top_k=20,
            top_p=[1.0, 0.9][number % 2],
            seed=number,
        )
        for number, text in enumerate(TEXTS)
    ]


def alone(decoder: e3.SpeculativeDecoder, request: PoolRequest) -> list[int]:
    sampling = e3.SamplingParams(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p)
    result = decoder.generate(
        request.tokens, max_new_tokens=request.max_new_tokens, sampling=sampling, seed=request.seed
    )
    return result.tokens[0]


def run(pool: Pool, requests: list[PoolRequest]) -> list[list[int]]:
    """Returns the tokens of all requests, in the order of the requests."""
    tickets = [pool.submit(request) for request in requests]
    results: dict[int, list[int]] = {}
    while not pool.idle:
        results.update(pool.tick())
    return [results[ticket] for ticket in tickets]


@pytest.mark.parametrize("way", ["plain", "chain"])
def test_each_request_has_the_tokens_that_it_has_alone(way: str) -> None:
    target = shipped()
    options = {} if way == "plain" else {"drafter": e3.load_drafter(target=target), "num_speculative_tokens": 3}
    decoder = e3.SpeculativeDecoder(target, rounds_per_check=2, **options)
    requests = requests_of(decoder)
    pool = Pool(decoder, slots=3, capacity=128)
    programs = (loops.prefill, loops.step, pools._insert, pools._ended_copies)
    before = [program._cache_size() for program in programs]
    expected = [alone(decoder, request) for request in requests]
    assert run(pool, requests) == expected
    compiled = [program._cache_size() for program in programs]
    assert compiled[1] == before[1] + 1
    assert run(pool, requests[:5]) == expected[:5]
    assert [program._cache_size() for program in programs] == compiled


def test_requests_may_depend_on_results() -> None:
    decoder = e3.SpeculativeDecoder(tiny.target(13), e3.drafters.NGram(3))
    pool = Pool(decoder, slots=2, capacity=64)
    prompt = [1, 2, 3]
    first = pool.submit(PoolRequest(prompt, 4))
    assert first == 0
    assert pool.free == 1
    results: dict[int, list[int]] = {}
    while not pool.idle:
        for ticket, tokens in pool.tick():
            results[ticket] = tokens
            if ticket == first:
                pool.submit(PoolRequest([*prompt, *tokens], 5))
    assert results[0] + results[1] == decoder.generate(prompt, max_new_tokens=9).tokens[0]
    assert pool.free == 2
    assert pool.tick() == []


def test_a_schedule_sees_the_rows_that_run() -> None:
    target = tiny.target(13)
    schedule = e3.SpeculationSchedule(((1, 1, 3), (2, 2, 1)))
    decoder = e3.SpeculativeDecoder(target, tiny.eagle3(target), schedule=schedule)
    requests = [PoolRequest([1 + number], 6 + number) for number in range(4)]
    plain = e3.SpeculativeDecoder(target)
    expected = [alone(plain, request) for request in requests]
    assert run(Pool(decoder, slots=2, capacity=64, sampling_mode=SamplingMode.GREEDY), requests) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 61}, "prompt has 3 tokens and is given 61 more, and a row of the pool holds 63"),
        ({"tokens": []}, "the prompt is empty"),
        ({"tokens": [13]}, "prompt token 13 is not a token id"),
        ({"top_k": 5}, "sampling_mode is 'temperature', and these sampling parameters need 'truncated'"),
    ],
)
def test_a_request_that_no_row_can_take_is_refused(options: dict[str, Any], message: str) -> None:
    decoder = e3.SpeculativeDecoder(tiny.target(13))
    pool = Pool(decoder, slots=2, capacity=64, sampling_mode=SamplingMode.TEMPERATURE)
    with pytest.raises(ValueError, match=message):
        pool.submit(PoolRequest(**({"tokens": [1, 2, 3], "max_new_tokens": 4, "temperature": 1.0} | options)))
    assert pool.idle


def test_a_pool_without_rows_and_a_prefill_without_room_are_refused() -> None:
    decoder = e3.SpeculativeDecoder(tiny.target(13))
    with pytest.raises(ValueError, match="slots is 0"):
        Pool(decoder, slots=0, capacity=64)
    with pytest.raises(ValueError, match="capacity is 20; expected at least 24"):
        decoder.prefill([1, 2, 3], max_new_tokens=20, capacity=20)
    with pytest.raises(ValueError, match="sampling_mode is 'greedy'"):
        decoder.prefill([1], sampling=e3.SamplingParams(temperature=1.0), sampling_mode=SamplingMode.GREEDY)
