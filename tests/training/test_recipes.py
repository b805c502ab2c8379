"""Every recipe alike: what it leaves to choose, and that what it trains is written and read again."""

from __future__ import annotations

import contextlib

import jax
import numpy as np
import pytest

from eagle3_jax import conversion
from eagle3_jax.cli._training_files import write_head
from eagle3_jax.conversion.heads import HEADS, kind_of
from eagle3_jax.load import LoadedTarget
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.training.methods import RECIPES, HeadOptions

MIXER = GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=8)
# Deep and wide enough for every method.
LIKE = DecoderConfig(vocab_size=96, width=32, layers=uniform(12, MIXER, GatedMLP(width=64)), max_positions=64)
NO_CHOICE = {(method, "width") for method in RECIPES if method != "draft-model"}
NO_CHOICE |= {("eagle3", "num_layers"), ("mtp", "num_layers"), ("medusa", "mlp_width")}
NO_CHOICE |= {(method, "draft_vocab_size") for method in ("eagle1", "mtp", "draft-model")}


@pytest.mark.parametrize("option", ["num_layers", "width", "mlp_width", "draft_vocab_size"])
@pytest.mark.parametrize("method", sorted(RECIPES))
def test_a_choice_changes_the_head_or_is_refused(method: str, option: str) -> None:
    """A value that nobody reads would be a silent no."""
    make = RECIPES[method].config
    usual = make(LIKE, HeadOptions(depth=4))
    refused = pytest.raises(ValueError, match=f"{option} is 2, and .* has no choice of it; leave it out")
    with refused if (method, option) in NO_CHOICE else contextlib.nullcontext():
        assert make(LIKE, HeadOptions(depth=4, **{option: 2})) != usual


@pytest.mark.parametrize("option", ["num_layers", "width", "mlp_width", "draft_vocab_size"])
@pytest.mark.parametrize("value", [0, 10**12])
def test_a_number_beyond_every_head_is_refused(option: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value}; expected a whole number from 1 to"):
        HeadOptions(depth=4, **{option: value})


@pytest.mark.parametrize("method", sorted(set(RECIPES) - {"draft-model"}))  # which is a target on disk
def test_what_is_trained_is_written_and_read_again(method: str, tmp_path) -> None:
    recipe = RECIPES[method]
    model = DecoderTarget(LIKE)
    target = LoadedTarget(model=model, params=model.init(jax.random.key(0)), vocab_size=96, max_positions=64)
    size = recipe.draft_vocab_size and 40
    ids = None if size is None else np.sort(np.random.default_rng(0).permutation(96)[:size])
    config = recipe.config(LIKE, HeadOptions(depth=4, draft_vocab_size=size))
    params = recipe.start(recipe.drafter(config, precision=model.precision), target, ids, jax.random.key(1))
    write_head(tmp_path / "head", config, params, ids, dtype="float32", num_target_layers=12)
    read = conversion.read_head(tmp_path / "head", LIKE)
    assert (read.config, read.method) == (config, kind_of(config).name)
    assert jax.tree.all(jax.tree.map(np.array_equal, read.head, params))
    variant = HEADS[read.method].variant
    assert method in (read.method, "" if variant is None else variant(config).lower())
