"""Every recipe alike: what it leaves to choose, that it teaches, and that what it trains is written and read again."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import SpeculativeDecoder, conversion
from eagle3_jax.cli._training_files import write_head
from eagle3_jax.conversion.heads import HEADS, kind_of
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.load import LoadedTarget
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.training.batches import text_batches
from eagle3_jax.training.loop import OptimizerConfig, Trainer
from eagle3_jax.training.methods import RECIPES, HeadOptions
from eagle3_jax.training.texts import Text, Texts

MIXER = GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=8)
# Deep and wide enough for every method.
LIKE = DecoderConfig(vocab_size=96, width=32, layers=uniform(12, MIXER, GatedMLP(width=64)), max_positions=64)
NO_CHOICE = {(method, "width") for method in RECIPES if method != "draft-model"}
NO_CHOICE |= {("eagle3", "num_layers"), ("mtp", "num_layers"), ("medusa", "mlp_width")}
NO_CHOICE |= {(method, "draft_vocab_size") for method in ("eagle1", "mtp", "draft-model")}


@pytest.mark.parametrize("option", ["num_layers", "width", "mlp_width", "draft_vocab_size"])
@pytest.mark.parametrize("method", sorted(RECIPES))
def test_a_choice_changes_the_head_or_is_refused(method: str, option: str) -> None:
    """An ignored option would be a silent error."""
    make = RECIPES[method].config
    usual = make(LIKE, HeadOptions(depth=4))
    refused = pytest.raises(ValueError, match=f"{option} is 2, and .* has no choice of it; leave it out")
    with refused if (method, option) in NO_CHOICE else contextlib.nullcontext():
        assert make(LIKE, HeadOptions(depth=4, **{option: 2})) != usual


def test_a_reduced_vocabulary_has_published_sizes() -> None:
    """The bundled head has 2,048 of 4,096 tokens; heads for Llama 3 have 32,000 of 128,256."""
    sizes = {40: 40, 4096: 2048, 49_152: 16_384, 128_256: 32_000}
    assert {vocab: RECIPES["eagle3"].draft_vocab_size(vocab) for vocab in sizes} == sizes
    assert RECIPES["medusa"].draft_vocab_size(4096) is None


TARGET = tiny.target(13, layers=tiny.layers(8, head_dim=4), max_positions=64)
# The layers of each head; the other recipes have the objective of one of these.
TAUGHT = {"dflash": 1, "dspark": 1, "draft-model": 2, "eagle1": 1, "medusa": 1, "mtp": None, "p-eagle": 2}
PROMPTS = tiny.random_prompts(16, 13, seed=4, low=3, high=6)
DEPTH = 3
STEPS = 80


@functools.cache
def written() -> list[list[int]]:
    """The target's own greedy continuations of the prompts."""
    return SpeculativeDecoder(TARGET, stop_tokens=()).generate(PROMPTS, max_new_tokens=14).tokens


@jax.numpy_dtype_promotion("standard")  # optax's own arithmetic mixes types
@pytest.mark.parametrize("method", TAUGHT)
def test_a_recipe_teaches(method: str) -> None:
    """It memorises the target's own text: the loss falls, all parameters move, and more drafts are accepted."""
    recipe = RECIPES[method]
    options = HeadOptions(depth=DEPTH, num_layers=TAUGHT[method])
    drafter = recipe.drafter(recipe.config(TARGET.model.config, options))
    frozen: Any = {"target_params": TARGET.params, "embedding": TARGET.params["embedding"], "draft_to_target": None}
    trainer = Trainer(
        lambda params, batch: recipe.loss(drafter, TARGET.model, params, frozen, batch, options),
        OptimizerConfig(learning_rate=1e-2, num_steps=STEPS, warmup_steps=5, weight_decay=0.0),
    )
    start = recipe.start(drafter, TARGET, None, jax.random.key(0))
    texts = Texts.of(
        Text([*prompt, *answer], [False] * len(prompt) + [True] * len(answer), index)
        for index, (prompt, answer) in enumerate(zip(PROMPTS, written(), strict=True))
    )
    batch_at, _ = text_batches(texts, 16, 0)
    *_, (state, _) = history = list(trainer.run(trainer.start(start), batch_at, STEPS))
    losses, taus = ([metrics[name] for _, metrics in history] for name in ("loss", "simulated_tau"))
    assert losses[-1] < 0.8 * losses[0] and taus[-1] > taus[0] + 0.5
    moved = jax.tree.map(lambda one, other: bool(jnp.any(one != other)), start, state.params)
    assert jax.tree.all(moved), moved
    params: Any = state.params
    if method != "draft-model":
        params = drafter.assemble(params, TARGET.model.tables(TARGET.params))
    decoder = SpeculativeDecoder(TARGET, LoadedDrafter(drafter, params), num_speculative_tokens=DEPTH, stop_tokens=())
    result = decoder.generate(PROMPTS, max_new_tokens=14)
    assert result.tokens == written() and result.stats.mean_acceptance_length > 2


@pytest.mark.parametrize("method", sorted(set(RECIPES) - {"draft-model"}))  # which is a target on disk
def test_what_is_trained_is_written_and_read_again(method: str, tmp_path) -> None:
    recipe = RECIPES[method]
    model = DecoderTarget(LIKE)
    target = LoadedTarget(model=model, params=model.init(jax.random.key(0)), vocab_size=96, max_positions=64)
    size = 40 if recipe.reduced else None
    ids = None if size is None else np.sort(np.random.default_rng(0).permutation(96)[:size])
    config = recipe.config(LIKE, HeadOptions(depth=4, draft_vocab_size=size))
    params = recipe.start(recipe.drafter(config, precision=model.precision), target, ids, jax.random.key(1))
    write_head(tmp_path / "head", config, params, ids, dtype="float32", num_target_layers=12)
    read = conversion.read_head(tmp_path / "head", LIKE)
    assert (read.config, read.method) == (config, kind_of(config).name)
    assert jax.tree.all(jax.tree.map(np.array_equal, read.head, params))
    variant = HEADS[read.method].variant
    assert method in (read.method, "" if variant is None else variant(config).lower())
