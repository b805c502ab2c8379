"""Logits without a distribution end their row with a reason and do not affect other rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checkpoints import edited, write_llama

from eagle3_jax import BlockVerification, FinishReason, SamplingParams, SpeculativeDecoder
from eagle3_jax.testing.scripted import FixedTree, RootState, chain_parents
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.types import Draft, TargetOutput

CLEAN = tiny.target(13)
PROMPTS = tiny.random_prompts(4, 13, seed=5)
TEXTS = SpeculativeDecoder(CLEAN).generate(PROMPTS, max_new_tokens=24).tokens
LAST = 12


@dataclasses.dataclass(frozen=True)
class Poisoned:
    """The clean target, except that all logits after one token are ``value``."""

    inner: Any
    token: int
    value: float

    vocab_size = 13

    def init_cache(self, batch: int, capacity: int) -> Any:
        return self.inner.init_cache(batch, capacity)

    def __call__(self, params: Any, tokens: Any, *arguments: Any, **options: Any) -> TargetOutput:
        output = self.inner(params, tokens, *arguments, **options)
        return output.replace(
            final=jnp.where((tokens == self.token)[..., None], jnp.nan, output.final)
        )

    def unembed(self, params: Any, final: Any) -> Any:
        bad = jnp.isnan(final[..., :1])
        return jnp.where(bad, self.value, self.inner.unembed(params, jnp.where(bad, 0.0, final)))


class AlwaysLast(FixedTree):
    """Drafts the id that an argmax over NaN returns on CPUs."""

    def propose(self, params: Any, state: RootState, keys: Any, sampling: SamplingParams) -> Draft:
        return self.draft(state, jnp.full((state.root.shape[0], self.num_nodes), LAST, jnp.int32))


DRAFTERS = {
    "plain": (None, {}),
    "the last id": (AlwaysLast(chain_parents(2)), {}),
    "a sampled chain": (tiny.eagle3(CLEAN, Chain(3)), {"draft_sampling": "probabilistic"}),
    "a dynamic tree": (tiny.eagle3(CLEAN, DynamicTree(num_nodes=6, max_depth=3, top_k=2)), {}),
    "the block rule": (
        tiny.eagle3(CLEAN),
        {"verifier": BlockVerification(), "draft_sampling": "probabilistic"},
    ),
}


def poisoned(name: str, token: int, value: float) -> SpeculativeDecoder:
    drafter, options = DRAFTERS[name]
    return SpeculativeDecoder(
        dataclasses.replace(CLEAN, model=Poisoned(CLEAN.model, token, value)), drafter, **options
    )


def cut(text: list[int], token: int) -> list[int]:
    """Returns a text up to the first such token, which is the last that can be written."""
    return text[: text.index(token) + 1] if token in text else text


@pytest.mark.parametrize(
    ("name", "value"), [*((name, np.nan) for name in DRAFTERS), ("a dynamic tree", -np.inf)]
)
def test_a_greedy_row_ends_where_there_is_no_distribution(name: str, value: float) -> None:
    """A prompt without a distribution after it gets no token."""
    last_tokens = (PROMPTS[0][-1], PROMPTS[1][-1])
    token = next(token for token in TEXTS[0][4:] if token not in last_tokens)
    decoder = poisoned(name, token, value)
    prompts = [*PROMPTS, [token]]
    result = decoder.generate(prompts, max_new_tokens=24)

    for row, prompt, text in zip(result.rows, prompts, [*TEXTS, []], strict=True):
        expected = [] if prompt[-1] == token else cut(text, token)
        ended = FinishReason.NOT_FINITE if len(expected) < 24 else FinishReason.LENGTH
        assert row.tokens == expected
        assert row.finish_reason == ended

    chunks = list(decoder.stream(PROMPTS[0], max_new_tokens=24))
    assert [token for chunk in chunks for token in chunk.tokens] == result.rows[0].tokens
    assert chunks[-1].finish_reason is result.rows[0].finish_reason


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_sampled_row_writes_nothing_after_it(name: str) -> None:
    decoder = poisoned(name, LAST, np.nan)
    warm = SamplingParams(temperature=1.5)
    rows = decoder.generate(PROMPTS * 4, max_new_tokens=24, sampling=warm).rows
    assert {row.finish_reason for row in rows} == {FinishReason.NOT_FINITE, FinishReason.LENGTH}
    for row, prompt in zip(rows, PROMPTS * 4, strict=True):
        assert LAST not in row.tokens[:-1]
        if len(row.tokens) < 24:
            assert [*prompt, *row.tokens][-1] == LAST
            assert row.finish_reason is FinishReason.NOT_FINITE


def test_the_command_line_says_so(tmp_path: Path, cli: Any) -> None:
    target = edited(
        write_llama(tmp_path / "target"),
        {},
        {"model__norm__weight": np.full(32, np.nan, np.float32)},
    )

    arguments = ("generate", "--target", target, "--drafter", "none", "--prompt-ids", "[1, 2]")
    code, out, _ = cli(*arguments, "--json")
    assert code == 0
    row = json.loads(out)
    assert row.items() >= {"finish_reason": "not_finite", "token_ids": []}.items()

    code, out, _ = cli(*arguments)
    assert code == 0
    assert (
        "[not_finite: the target's logits are NaN or all minus infinity; check its weights and"
        " --dtype]" in out
    )
