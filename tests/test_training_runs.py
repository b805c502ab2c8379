"""Runs of training: the order of data, optimisers, and a resumed run that is bit for bit the unbroken one."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from training_pair import Pair, make_batch, random_pair

from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.training.lm import Phase, next_token_loss, random_windows
from eagle3_jax.training.loop import OptimizerConfig, Trainer
from eagle3_jax.training.ttt import TTTConfig, ttt_loss


@pytest.fixture(scope="module")
def pair() -> Pair:
    return random_pair()


def test_windows_visit_every_tile_once_in_each_pass():
    length, tiles = 5, 8
    batch_at = random_windows(np.arange(length * (tiles + 1) + 1), (Phase(100, 2, length),), seed=3)
    passes = [np.concatenate([batch_at(4 * p + i)[:, 0] for i in range(4)]) for p in range(2)]
    for starts in passes:
        assert len(set(starts % length)) == 1  # one offset for the whole pass
        assert sorted(starts // length) == list(range(tiles))
    assert not np.array_equal(passes[0] // length, passes[1] // length)
    np.testing.assert_array_equal(np.diff(batch_at(0), axis=1), 1)
    np.testing.assert_array_equal(batch_at(3), batch_at(3))


def test_windows_follow_the_phases_and_refuse_what_does_not_fit():
    batch_at = random_windows(np.arange(50), (Phase(2, 4, 3), Phase(5, 2, 6)), seed=0)
    assert [batch_at(step).shape for step in (1, 2)] == [(4, 4), (2, 7)]
    with pytest.raises(ValueError, match="beyond the last phase"):
        batch_at(5)
    with pytest.raises(ValueError, match="need at least 51"):
        random_windows(np.arange(50), (Phase(1, 1, 25),), seed=0)
    assert random_windows(np.arange(51), (Phase(1, 3, 25),), seed=0)(0).shape == (3, 26)


@pytest.fixture
def optax_promotion():
    """Optax raises floats to integer step counts, which the suite's strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize("method", ["adamw", "muon"])
def test_a_target_learns_a_cycle(method):
    layers = uniform(1, GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=8), GatedMLP(width=32))
    config = DecoderConfig(vocab_size=8, width=16, layers=layers)
    target = DecoderTarget(config)
    optimizer = OptimizerConfig(method=method, learning_rate=2e-2, num_steps=30, warmup_steps=3)
    trainer = Trainer(lambda params, tokens: next_token_loss(target, params, tokens), optimizer)
    batch_at = random_windows(np.arange(200) % 8, (Phase(30, 4, 12),), seed=0)
    state = trainer.start(target.init(jax.random.key(0)))
    losses = [metrics["loss"] for _, metrics in trainer.run(state, batch_at, 30)]
    assert 0.5 * np.log(8) < losses[0] < 2 * np.log(8)  # random weights know nothing
    assert losses[-1] < 0.2 * losses[0]


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="use 'adamw' or 'muon'"):
        OptimizerConfig(method="sgd").build()


@pytest.mark.usefixtures("optax_promotion")
def test_a_resumed_run_has_bit_identical_losses(pair, tmp_path):
    target, drafter, head, frozen = pair

    def start():
        def loss(params, batch):
            return ttt_loss(drafter, target, params, frozen, batch, TTTConfig(num_steps=2))

        trainer = Trainer(loss, OptimizerConfig(learning_rate=1e-2, num_steps=6, warmup_steps=2), tmp_path)
        state = trainer.start(head)
        return int(state.step), trainer.run(state, lambda step: make_batch(seed=step), 6, save_every=3)

    first, run = start()
    unbroken = [next(run)[1] for _ in range(5)]  # dies after step 5; its last checkpoint is that of step 3
    second, run = start()
    resumed = [metrics for _, metrics in run]
    assert (first, second) == (0, 3)
    assert resumed[:2] == unbroken[3:]
    assert len({metrics["loss"] for metrics in (*unbroken, resumed[-1])}) == 6
    third, run = start()
    assert (third, list(run)) == (6, [])
