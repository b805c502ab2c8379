"""Options of a request other than sampling: log-probabilities, seeds, stop texts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax.stats import LogProbs
from eagle3_jax.topology import DynamicTree

TARGET = tiny.target(13)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5]]
SAMPLED = e3.SamplingParams(temperature=0.8, top_k=7)


HEAD = tiny.eagle3(TARGET)
DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"drafter": HEAD},
    "tree": {"drafter": HEAD, "tree": DynamicTree(num_nodes=9, max_depth=3, top_k=3)},
    "schedule": {"drafter": HEAD, "schedule": e3.SpeculationSchedule(((1, 2, 3), (3, 3, 1)))},
}


@pytest.mark.parametrize("sampling", [e3.SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_log_probabilities_are_those_of_a_forced_scoring(
    draft: str, sampling: e3.SamplingParams
) -> None:
    decoder = e3.SpeculativeDecoder(TARGET, **DRAFTS[draft])
    result = decoder.generate(PROMPTS, max_new_tokens=[20, 9, 14], sampling=sampling, logprobs=3)

    texts = tiny.padded([row.prompt_tokens + row.tokens for row in result.rows])
    logits, _ = tiny.forward(TARGET.model, TARGET.params, jnp.asarray(texts))

    for row, text_scores in zip(result.rows, np.asarray(jax.nn.log_softmax(logits)), strict=True):
        scores = text_scores[len(row.prompt_tokens) - 1 :][: len(row.tokens)]
        assert row.logprobs is not None
        assert len(row.logprobs) == len(row.tokens)

        for entry, token, score in zip(row.logprobs, row.tokens, scores, strict=True):
            assert entry.logprob == pytest.approx(score[token], abs=1e-4)
            ids, values = zip(*entry.top, strict=True)
            assert values == pytest.approx(np.sort(score)[::-1][:3], abs=1e-4)
            assert values == pytest.approx(score[list(ids)], abs=1e-4)

    unasked = decoder.generate(PROMPTS, max_new_tokens=[20, 9, 14], sampling=sampling)
    assert unasked.tokens == result.tokens
    assert unasked.rows[0].logprobs is None


def test_the_likeliest_tokens_are_ranked_by_logits() -> None:
    """The log-probabilities of the tokens 1 and 3 are equal in float32; their logits differ."""
    logits = np.full((1, 1, 100_000), 1.0, np.float32)
    logits[..., 3] = 1.0 + 2**-23
    logits[..., 1] = 1.0 + 2**-22
    scores = LogProbs.from_logits(jnp.asarray(logits), jnp.ones((1, 1), jnp.int32), 3)
    assert np.unique(scores.top).size == 1
    ranked = np.argsort(-logits[0, 0], kind="stable")
    assert ranked[:3].tolist() == [1, 3, 0]
    assert scores.top_ids.tolist() == [[[1, 3, 0]]]


def test_a_stream_gives_the_log_probabilities_of_generate() -> None:
    decoder = e3.SpeculativeDecoder(TARGET, tiny.eagle3(TARGET))
    chunks = list(decoder.stream([1, 2, 3], max_new_tokens=12, logprobs=2))
    row = decoder.generate([1, 2, 3], max_new_tokens=12, logprobs=2).rows[0]
    streamed = [entry for chunk in chunks for entry in chunk.logprobs or []]
    assert [entry.top[0][0] for entry in streamed] == row.tokens  # greedy
    for entry, expected in zip(streamed, row.logprobs or [], strict=True):
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-5)


def test_a_seed_of_its_own_gives_a_prompt_the_same_text_in_every_batch() -> None:
    decoder = e3.SpeculativeDecoder(TARGET, tiny.eagle3(TARGET))
    run = lambda prompts, seed: (
        decoder.generate(prompts, max_new_tokens=16, sampling=SAMPLED, seed=seed).tokens
    )
    together = run(PROMPTS, [7, 8, 9])
    assert run(PROMPTS[::-1], [9, 8, 7]) == together[::-1]
    assert [
        run([prompt], seed)[0] for prompt, seed in zip(PROMPTS, (7, 8, 9), strict=True)
    ] == together
    first, second = run([PROMPTS[0]] * 2, [1, 2])
    assert first != second


@pytest.mark.parametrize("drafter", [None, e3.drafters.NGram(4)], ids=["plain", "n-grams"])
def test_a_stop_text_ends_a_row_where_it_begins(shipped: e3.LoadedTarget, drafter: Any) -> None:
    decoder = e3.SpeculativeDecoder(shipped, drafter)
    prompts = ["def add(a, b):\n", "class Queue:\n"]
    uncut = decoder.generate(prompts, max_new_tokens=48)

    stop = [(uncut.texts[0] or "")[20:23], "\0never"]
    cut = decoder.generate(prompts, max_new_tokens=48, stop=stop)

    for row, full in zip(cut.rows, uncut.rows, strict=True):
        assert row.text is not None
        assert full.text is not None
        assert row.text == full.text.split(stop[0])[0]
        assert row.tokens == full.tokens[: len(row.tokens)]
        if stop[0] not in full.text:
            assert row.finish_reason is full.finish_reason
            assert row.tokens == full.tokens
            continue

        assert row.finish_reason is e3.FinishReason.STOP
        decoded = [decoder.target.tokenizer.decode(row.tokens[:end]) for end in (-1, None)]  # type: ignore[union-attr]
        assert stop[0] not in decoded[0]
        assert stop[0] in decoded[1]

    assert decoder.generate(prompts[:1], max_new_tokens=48, stop=stop[0]).texts == cut.texts[:1]
    listed = decoder.generate(prompts, max_new_tokens=48, stop=[[], stop])
    assert listed.texts == [uncut.texts[0], cut.texts[1]]
