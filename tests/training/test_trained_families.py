"""A head of 200 training steps is accepted more often than n-grams, whatever the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest

pytest.importorskip("torch")
from families import RECIPES, VOCAB

from eagle3_jax import GenerationResult, SpeculativeDecoder, load_target
from eagle3_jax.drafters import NGram
from validation import peaked

pytestmark = pytest.mark.torch

FAMILIES = (
    "qwen3", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "gpt_oss", "glm4_moe",
    "llama4, norms", "qwen3_next", "glm4_moe_lite",
)  # fmt: skip
STEPS = 200
NEW_TOKENS = 32
LEARNED, UNSEEN = (peaked.random_prompts(48, VOCAB, seed=seed) for seed in (1, 2))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    families.parametrize(metafunc, FAMILIES, FAMILIES[:1])


def test_a_trained_head_is_accepted_more_often_than_ngrams(tmp_path: Path, name: str) -> None:
    recipe = RECIPES[name]
    recipe = recipe._replace(fields=recipe.fields | {"tie_word_embeddings": False})
    target = load_target(peaked.write_peaked(recipe, tmp_path / "target", loudness=3.0))

    def decoder(drafter: Any) -> SpeculativeDecoder:
        return SpeculativeDecoder(
            target, drafter, num_speculative_tokens=peaked.DEPTH, stop_tokens=()
        )

    looked_up = decoder(NGram())
    written = looked_up.generate(LEARNED, max_new_tokens=NEW_TOKENS).tokens
    head, losses = peaked.learned(target, LEARNED, written, steps=STEPS)
    ngrams = looked_up.generate(UNSEEN, max_new_tokens=NEW_TOKENS)
    drafted = decoder(head).generate(UNSEEN, max_new_tokens=NEW_TOKENS)
    assert drafted.tokens == ngrams.tokens
    assert np.mean(losses[-10:]) < 0.7 * losses[0]
    assert tokens_per_round(drafted) > tokens_per_round(ngrams) + 0.3
    assert tokens_per_round(drafted) > 1.5, "accepted by chance"


def tokens_per_round(result: GenerationResult) -> float:
    """Rounds in which nothing was drafted count: each writes one token and what is accepted."""
    tokens = sum(map(len, result.tokens))
    return tokens / (tokens - int(result.stats.num_accepted_tokens))
