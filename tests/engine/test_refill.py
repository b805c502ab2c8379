"""A list of prompts gives each prompt the result that it has alone, in fewer rows than prompts."""

from __future__ import annotations

import numpy as np
import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax.engine.refill import complete
from eagle3_jax.prompts.request import Request


def test_stop_texts_log_probabilities_and_counters_are_those_of_the_prompt_alone(
    shipped: e3.LoadedTarget,
) -> None:
    decoder = e3.SpeculativeDecoder(
        shipped, e3.load_drafter(target=shipped), num_speculative_tokens=3
    )

    texts = ["def add(a, b):\n", "import", "class Queue:\n", "x = [", "for"]
    stops = [("return",), (), ("self", "\n\n"), ("1",), ()]
    temperatures = [0.0, 0.9, 0.0, 0.9, 0.0]
    limits = [8 + 4 * number for number in range(len(texts))]
    sampling = e3.SamplingParams(temperature=np.array(temperatures))
    seeds = list(range(len(texts)))
    options = {
        "max_new_tokens": limits,
        "sampling": sampling,
        "seed": seeds,
        "logprobs": 1,
        "stop": stops,
    }

    expected = decoder.generate(texts, **options).rows
    requests = [
        Request(text, limit, temperature=temperatures[number], seed=number, stops=stops[number])
        for number, (text, limit) in enumerate(zip(texts, limits, strict=True))
    ]

    results = dict(complete(decoder, requests, slots=2, logprobs=1))
    assert len(results) == len(texts)
    assert {row.finish_reason for row in expected} == {e3.FinishReason.STOP, e3.FinishReason.LENGTH}

    for number, row in enumerate(expected):
        result = results[number]
        assert (result.tokens, result.text) == (row.tokens, row.text)
        assert result.prompt_tokens == row.prompt_tokens
        assert result.finish_reason == row.finish_reason
        assert result.stats.to_json() == row.stats.to_json()
        assert result.logprobs is not None and row.logprobs is not None
        ours = [score.logprob for score in result.logprobs]
        assert ours == pytest.approx([score.logprob for score in row.logprobs], abs=1e-4)


def test_a_limit_beyond_the_last_position_ends_there() -> None:
    decoder = e3.SpeculativeDecoder(tiny.target(13), e3.drafters.NGram(3), stop_tokens=())
    most = decoder.target.max_positions
    prompt = [1, 2, 3]

    requests = [Request(prompt, most), Request(prompt, 5), Request(prompt, most - len(prompt))]
    results = dict(complete(decoder, requests, slots=2))

    reasons = [results[number].finish_reason.name for number in range(3)]
    assert reasons == ["CAPACITY", "LENGTH", "LENGTH"]
    assert (
        results[0].tokens
        == decoder.generate(prompt, max_new_tokens=most).tokens[0]
        == results[2].tokens
    )
