"""Distillation of a draft model, compared with the formula written with loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import training_pair
from scipy.special import rel_entr, softmax

from eagle3_jax.drafters import DraftModel
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.training.batches import TTTBatch
from eagle3_jax.training.draft_model import distillation_loss
from eagle3_jax.training.methods import RECIPES, HeadOptions, small_model

TARGET = tiny.target(13)
DEPTH = 3


def distributions(model: DecoderTarget, params: dict, tokens: list[int]) -> np.ndarray:
    """Returns the distribution after each token of a text without padding, ``[T V]``.

    In 64 bits from the logits on.
    """
    logits = tiny.forward(model, params, jnp.array([tokens]))[0]
    return softmax(np.asarray(logits, np.float64)[0], axis=-1)


def by_hand(draft: DecoderTarget, params: dict, batch: TTTBatch) -> tuple[float, dict[str, float]]:
    """Returns the objective and its metrics by their definitions."""
    divergences = []
    overlaps = []
    hits = {}

    for row, tokens in enumerate(np.asarray(batch.tokens)):
        real = tokens[: int(batch.attention_mask[row].sum())].tolist()
        ps = distributions(TARGET.model, TARGET.params, real)
        qs = distributions(draft, params, real)
        for position in range(1, len(real)):
            if batch.loss_mask[row, position - 1]:
                p = ps[position]
                q = qs[position]
                divergences.append(float(rel_entr(p, q).sum()))
                overlaps.append(float(np.minimum(p, q).sum()))
                hits[row, position] = p.argmax() == q.argmax()

    # The draft at a depth is that of a later position.
    by_depth = [
        {(row, at - depth): hit for (row, at), hit in hits.items() if at >= depth}
        for depth in range(DEPTH)
    ]

    metrics = {
        f"accuracy_{depth}": float(np.mean(list(by_depth[depth].values())))
        for depth in range(DEPTH)
    }

    metrics["acceptance_0"] = float(np.mean(overlaps))
    return float(np.mean(divergences)), {**metrics, "simulated_tau": training_pair.tau_of(by_depth)}


def test_the_loss_is_the_mean_divergence_where_the_target_wrote() -> None:
    drafter = RECIPES["draft-model"].drafter(
        small_model(TARGET.model.config, HeadOptions(depth=DEPTH, num_layers=1))
    )

    params = jax.tree.map(lambda leaf: 3.0 * leaf, drafter.model.init(jax.random.key(2)))
    batch = training_pair.make_batch(length=7, padding=(0, 2))
    batch = batch.replace(loss_mask=batch.loss_mask.at[0, :2].set(False))
    frozen = training_pair.frozen_of(TARGET)

    objective = lambda params: distillation_loss(
        drafter, TARGET.model, params, frozen, batch, DEPTH
    )
    (loss, metrics), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)

    expected, expected_metrics = by_hand(drafter.model, params, batch)
    assert 0 < loss == pytest.approx(expected, rel=1e-4)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        expected_metrics, rel=1e-4
    )
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


def test_a_small_model_is_of_its_targets_kind() -> None:
    recipe = RECIPES["draft-model"]
    drafter = recipe.drafter(
        small_model(TARGET.model.config, HeadOptions(depth=1, num_layers=1, width=16))
    )
    start = recipe.start(drafter, TARGET, None, jax.random.key(0))
    assert np.array_equal(start["embedding"], TARGET.params["embedding"]), (
        "the first layers of a target of that width"
    )

    config = tiny.config(13, 8, layers=tiny.layers(8, qk_norm=True, window=6))
    small = small_model(config, HeadOptions(depth=1))
    mixer = small.layers[0].mixer
    assert (small.width, small.num_layers, mixer.num_heads, mixer.num_kv_heads) == (8, 2, 2, 2)
    assert (mixer.head_dim, mixer.window, mixer.qk_norm, small.layers[0].mlp.width) == (
        8,
        6,
        True,
        12,
    )
    assert isinstance(RECIPES["draft-model"].drafter(small), DraftModel)
    with pytest.raises(ValueError, match="larger than its target"):
        small_model(config, HeadOptions(depth=1, num_layers=9))
