"""Training: the order of data, optimisers, and a resumed run that equals the unbroken one."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models_on_disk import write_bytes_target, write_llama
from safetensors.numpy import load_file
from training_pair import make_batch
from training_runs import kill_after, written_texts

from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.training.lm import Phase, next_token_loss, random_windows
from eagle3_jax.training.loop import NotFinite, OptimizerConfig, Trainer
from eagle3_jax.training.ttt import TTTConfig, ttt_loss


def test_windows_visit_every_tile_once_in_each_pass():
    length = 5
    tiles = 8
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
    np.testing.assert_array_equal(
        batch_at(3), random_windows(np.arange(50), (Phase(3, 2, 6),), seed=0)(1)
    )
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
    assert 0.5 * np.log(8) < losses[0] < 2 * np.log(8)  # random weights: nearly uniform
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

        trainer = Trainer(
            loss, OptimizerConfig(learning_rate=1e-2, num_steps=6, warmup_steps=2), tmp_path
        )
        state = trainer.start(head)
        return int(state.step), trainer.run(
            state, lambda step: make_batch(seed=step), 6, save_every=3
        )

    first, run = start()
    # It dies after step 5; its last checkpoint is that of step 3.
    unbroken = [next(run)[1] for _ in range(5)]
    second, run = start()
    resumed = [metrics for _, metrics in run]
    assert (first, second) == (0, 3)
    assert resumed[:2] == unbroken[3:]
    assert len({metrics["loss"] for metrics in (*unbroken, resumed[-1])}) == 6
    third, run = start()
    assert (third, list(run)) == (6, [])


@pytest.mark.usefixtures("optax_promotion")
def test_a_step_that_is_not_finite_is_not_taken(tmp_path):
    def loss(params, batch):
        # The gradient of the square root at 0 is infinite, while the value is finite.
        return jnp.sum(params["w"] ** 2) + jnp.sqrt(batch), {}

    trainer = Trainer(loss, OptimizerConfig(num_steps=9, warmup_steps=1), tmp_path)
    batches = [1.0, 1.0, 1.0, float("nan")]
    run = trainer.run(
        trainer.start({"w": jnp.ones(3)}), lambda step: jnp.float32(batches[step]), 9, save_every=2
    )
    *_, state = [next(run)[0] for _ in range(3)]
    with pytest.raises(
        NotFinite, match=rf"step 4: the loss is nan .* the last checkpoint is {tmp_path / '2'}\."
    ):
        next(run)
    assert np.isfinite(state.params["w"]).all()

    def steep(params, batch):
        return jnp.sqrt(jnp.sum(params["w"]) * batch), {}

    trainer = Trainer(steep, OptimizerConfig(num_steps=9, warmup_steps=1))
    with pytest.raises(
        NotFinite, match="step 1: the loss is 0 and the norm of its gradient inf; there is no check"
    ):
        next(trainer.run(trainer.start({"w": jnp.zeros(3)}), lambda step: jnp.float32(1), 9))


# As a command

HEAD = (
    "--steps", 3, "--batch", 2, "--draft-vocab-size", 32, "--unroll", "1:1,2", "--warmup-steps", 1,
    "--dtype", "float32", "--save-every", 1,
)  # fmt: skip


def drafted(head: Path) -> np.ndarray:
    """Returns the target's ids of a head's draft vocabulary."""
    offsets = load_file(head / "model.safetensors")["d2t"]
    return offsets + np.arange(len(offsets))


@pytest.mark.usefixtures("optax_promotion")
def test_a_head_continues_only_the_run_that_was_begun(cli, refused, tmp_path, monkeypatch):
    target = write_llama(tmp_path / "target", width=16)
    data = written_texts(tmp_path / "texts")
    unbroken = tmp_path / "unbroken"
    out = tmp_path / "out"
    code, output, _ = cli("train", "head", target, data, unbroken, *HEAD)
    assert code == 0 and "continuing" not in output  # not even in the second phase
    with monkeypatch.context() as patch:
        kill_after(patch, 2)
        code, _, output = cli("train", "head", target, data, out, *HEAD, "--save-every", 100)
        assert (
            code == 130 and "interrupted at step 2 of 3; the same command continues there" in output
        )
    files = sorted(path.relative_to(out) for path in out.rglob("*"))

    other_target = write_llama(tmp_path / "other", width=16)
    raw = bytearray((other_target / "model.safetensors").read_bytes())
    raw[-1] ^= 1  # a bit of the last weight
    (other_target / "model.safetensors").write_bytes(bytes(raw))
    slower = ("--learning-rate", 1e-3)
    both = ("--seed", 7, "--batch", 3)
    changes: dict[str, tuple[Any, ...]] = {
        "DATA was sha256 ": (target, written_texts(tmp_path / "more", 1), out, *HEAD),
        "TARGET was sha256 ": (other_target, data, out, *HEAD),
        "--seed was 0 and is 7": (target, data, out, *HEAD, "--seed", 7),
        "--batch was 2 and is 3": (target, data, out, *HEAD, "--batch", 3),
        "--steps was 3 and is 4": (target, data, out, *HEAD, "--steps", 4),
        "--draft-vocab-size was 32 and is 33": (target, data, out, *HEAD, "--draft-vocab-size", 33),
        "--learning-rate was 0.004 and is 0.001": (target, data, out, *HEAD, *slower),
        "--unroll was 1:1,2 and is 2": (target, data, out, *HEAD, "--unroll", "2"),
        "--batch was 2 and is 3; --seed was 0 and is 7": (target, data, out, *HEAD, *both),
    }
    for says, arguments in changes.items():
        line = refused("train", "head", *arguments)
        assert says in line and f"{out} holds the checkpoints of another run" in line
    assert files == sorted(path.relative_to(out) for path in out.rglob("*"))

    # The vocabulary stays, even if another version would choose another. The interval of
    # checkpoints may change.
    monkeypatch.setattr(
        "eagle3_jax.training.vocab.select_draft_vocabulary", lambda counts, size: np.arange(size)
    )
    code, output, _ = cli("train", "head", target, data, out, *HEAD, "--save-every", 5)
    assert (
        code == 0
        and output.count("continuing from step ") == output.count("continuing from step 2\n") == 1
    )
    ours, theirs = (load_file(path / "model.safetensors") for path in (out, unbroken))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
    assert not np.array_equal(drafted(unbroken), np.arange(32))


@pytest.mark.usefixtures("optax_promotion")
def test_a_target_continues_only_the_run_that_was_begun(cli, refused, tmp_path, monkeypatch):
    # A corpus has a tokenizer.
    data = write_bytes_target(tmp_path / "data")
    np.save(data / "train.npy", np.random.default_rng(0).integers(0, 256, 400).astype(np.uint16))
    shape = (
        "--layers", 1, "--width", 16, "--mlp-width", 16, "--heads", 2, "--kv-heads", 1,
        "--head-dim", 8, "--steps", 3, "--phases", "2x16", "--warmup-steps", 1,
        "--dtype", "float32", "--save-every", 1,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        kill_after(patch, 2)
        assert cli("train", "target", data, tmp_path / "out", *shape)[0] == 130

    says = refused(
        "train", "target", data, tmp_path / "out", *shape, "--seed", 1, "--phases", "3x16"
    )
    changed = "--phases was 2x16 and is 3x16; --seed was 0 and is 1. Give the same"
    assert f"another run: {changed}" in says

    np.save(data / "train.npy", np.arange(256, dtype=np.uint16))
    assert "another run: CORPUS was sha256 " in refused(
        "train", "target", data, tmp_path / "out", *shape
    )


def test_a_signal_ends_a_run_after_its_step_and_the_same_command_goes_on(tmp_path):
    target = write_llama(tmp_path / "target", width=16)
    data = written_texts(tmp_path / "data")
    arguments = (
        "train", "head", target, data, tmp_path / "out", *HEAD[4:], "--steps", 10**6,
        "--batch", 2, "--unroll", 2, "--save-every", 10**6, "--evaluate-every", 0,
    )  # fmt: skip
    command = [sys.executable, "-m", "eagle3_jax", *map(str, arguments)]

    steps = []
    for number, code in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert run.stdout is not None
        lines = iter(run.stdout.readline, "")
        assert any(line.startswith("step ") for line in lines)
        run.send_signal(number)
        _, error = run.communicate(timeout=60)
        assert run.returncode == code

        match = re.search(
            r"interrupted at step (\d+) of 1000000; the same command continues there", error
        )
        assert match is not None, error
        steps.append(int(match[1]))
        assert (tmp_path / "out" / "checkpoints" / match[1]).is_dir()

    assert steps[0] < steps[1]


def test_what_train_data_did_not_write_is_refused(refused, tmp_path):
    target = write_llama(tmp_path / "target", width=16)
    data = tmp_path / "data"
    assert "write them with `eagle3 train data TARGET" in refused(
        "train", "head", target, data, tmp_path / "out"
    )

    written_texts(data)
    shard = data / "texts-00001.npz"
    content = shard.read_bytes()
    for damaged in (b"", b"PK\x03\x04damaged", b"\x93NUMPY\x01\x00", content[:-40]):
        shard.write_bytes(damaged)
        assert f"{shard} is damaged or" in refused("train", "head", target, data, tmp_path / "out")
    shard.unlink()
    unfinished = "is not finished: 1 of 2 files are absent; run the same `eagle3 train data`"
    assert unfinished in refused("train", "head", target, data, tmp_path / "out")

    shard.write_bytes(content)
    (data / "data.json").write_text(json.dumps({"options": {"--held-out": 0.0}, "shards": 2}))
    assert "of the 7 texts in" in refused("train", "head", target, data, tmp_path / "out")
    assert "0 are held out" in refused("train", "head", target, data, tmp_path / "out")

    other_target = write_llama(tmp_path / "small", width=16, vocab_size=40)
    (data / "data.json").write_text(json.dumps({"options": {"--held-out": 0.1}, "shards": 2}))
    assert "encoded with another tokenizer" in refused(
        "train", "head", other_target, data, tmp_path / "out"
    )
