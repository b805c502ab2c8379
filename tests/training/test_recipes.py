"""Every recipe: its options, and that it teaches."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from training_pair import frozen_of

import eagle3_jax as e3
from eagle3_jax import SpeculativeDecoder
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.training.batches import text_batches
from eagle3_jax.training.loop import OptimizerConfig, Trainer
from eagle3_jax.training.methods import RECIPES, HeadOptions, initial_head, official_head
from eagle3_jax.training.texts import Text, Texts

MIXER = GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=8)
# Deep and wide enough for every method.
CONFIG = DecoderConfig(
    vocab_size=96, width=32, layers=uniform(12, MIXER, GatedMLP(width=64)), max_positions=64
)
NO_CHOICE = {(method, "width") for method in RECIPES if method != "draft-model"}
NO_CHOICE |= {("eagle3", "num_layers"), ("mtp", "num_layers"), ("medusa", "mlp_width")}
NO_CHOICE |= {
    (method, "draft_vocab_size") for method in ("eagle1", "mtp", "dflash2", "draft-model")
}


@pytest.mark.parametrize("option", ["num_layers", "width", "mlp_width", "draft_vocab_size"])
@pytest.mark.parametrize("method", sorted(RECIPES))
def test_a_choice_changes_the_head_or_is_refused(method: str, option: str) -> None:
    """An ignored option would be a silent error."""
    make = RECIPES[method].config
    usual = make(CONFIG, HeadOptions(depth=4))
    refused = pytest.raises(
        ValueError, match=f"{option} is 2, and .* has no choice of it; leave it out"
    )
    with refused if (method, option) in NO_CHOICE else contextlib.nullcontext():
        assert make(CONFIG, HeadOptions(depth=4, **{option: 2})) != usual


def test_a_reduced_vocabulary_has_published_sizes() -> None:
    """The bundled head has 2,048 of 4,096 tokens; heads for Llama 3 have 32,000 of 128,256."""
    sizes = {40: 40, 4096: 2048, 49_152: 16_384, 128_256: 32_000}
    assert {vocab: RECIPES["eagle3"].draft_vocab_size(vocab) for vocab in sizes} == sizes
    assert RECIPES["medusa"].draft_vocab_size(4096) is None


def test_an_eagle3_head_starts_as_the_last_layer_of_its_target() -> None:
    target = e3.load_target()
    config = target.model.config
    drafter = RECIPES["eagle3"].drafter(official_head(config, 100))
    start = RECIPES["eagle3"].start(
        drafter, target, np.arange(100, dtype=np.int32), jax.random.key(0)
    )

    last = target.params["blocks"][config.num_layers - 1]
    first = start["first"]
    attention = first["attention"]
    for fresh, expected in (
        (attention["qkv"]["kernel"][config.width :], last["attention"]["qkv"]["kernel"]),
        (attention["o"]["kernel"], last["attention"]["o"]["kernel"]),
        (first["feature_norm"]["scale"], last["attention_norm"]["scale"]),
        (first["mlp"]["down"]["kernel"], last["mlp"]["down"]["kernel"]),
    ):
        np.testing.assert_array_equal(fresh, expected)

    random = drafter.init_params(jax.random.key(0))
    added = start["fc"]["kernel"] - random["fc"]["kernel"]
    np.testing.assert_allclose(added[-config.width :], np.eye(config.width), atol=1e-6)
    assert not jnp.any(added[: -config.width])


def test_norms_of_weights_around_zero_start_around_one() -> None:
    """The weight of a head's norm multiplies as it is; of Gemma's, 1 plus the stored one."""
    target = tiny.target(13, layers=tiny.layers(8, head_dim=4), norm_kind="zero-centred")
    drafter = RECIPES["eagle3"].drafter(official_head(target.model.config, 13))
    start = initial_head(drafter, target, None, jax.random.key(0))
    np.testing.assert_array_equal(start["norm"]["scale"], 1 + target.params["norm"]["scale"])
    config = dataclasses.replace(target.model.config, final_norm_kind="float32")
    target = dataclasses.replace(target, model=dataclasses.replace(target.model, config=config))
    start = initial_head(drafter, target, None, jax.random.key(0))
    np.testing.assert_array_equal(start["norm"]["scale"], target.params["norm"]["scale"])


TARGET = tiny.target(13, layers=tiny.layers(8, head_dim=4), max_positions=64)
# The layers of each head; the other recipes have the objective of one of these.
TAUGHT = {
    "dflash": 1,
    "dflash2": 1,
    "dspark": 1,
    "draft-model": 2,
    "eagle1": 1,
    "medusa": 1,
    "mtp": None,
    "p-eagle": 2,
}
PROMPTS = tiny.random_prompts(16, 13, seed=4, low=3, high=6)
DEPTH = 3
STEPS = 80


@functools.cache
def written() -> list[list[int]]:
    """Returns the target's greedy continuations of the prompts."""
    return SpeculativeDecoder(TARGET, stop_tokens=()).generate(PROMPTS, max_new_tokens=14).tokens


@jax.numpy_dtype_promotion("standard")  # optax's own arithmetic mixes types
@pytest.mark.parametrize("method", TAUGHT)
def test_a_recipe_teaches(method: str) -> None:
    """A head memorises text of the target.

    The loss falls, all parameters move, and more drafts are accepted.
    """
    recipe = RECIPES[method]
    options = HeadOptions(depth=DEPTH, num_layers=TAUGHT[method])
    drafter = recipe.drafter(recipe.config(TARGET.model.config, options))

    frozen = frozen_of(TARGET)
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
    moved = jax.tree.map(lambda before, after: bool(jnp.any(before != after)), start, state.params)
    assert jax.tree.all(moved), moved

    params: Any = state.params
    if method != "draft-model":
        params = drafter.assemble(params, TARGET.model.tables(TARGET.params))
    decoder = SpeculativeDecoder(
        TARGET, LoadedDrafter(drafter, params), num_speculative_tokens=DEPTH, stop_tokens=()
    )
    result = decoder.generate(PROMPTS, max_new_tokens=14)
    assert result.tokens == written() and result.stats.mean_acceptance_length > 2
