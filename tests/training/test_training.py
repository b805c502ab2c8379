"""The training-time test, compared with the official code and with an oracle in float64."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_pair import STEPS, Pair, make_batch

from eagle3_jax import conversion
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.config import with_window
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.training import ttt
from eagle3_jax.training.batches import TTTBatch
from eagle3_jax.training.ttt import TTTConfig, ttt_loss

GOLDEN = Path(__file__).parent.parent / "golden" / "official"

# Compiled once per shape: op by op, these tests would spend a minute on compilation.
unroll = jax.jit(ttt.unroll, static_argnums=(0, 5))


def read_golden_pair():
    """Reads the recorded head and target.

    Their weights are rounded through float16 as in the official code.
    """
    target = conversion.read_target(GOLDEN / "target")
    head = conversion.read_head(GOLDEN / "eagle3", target.config)
    wide = lambda params, dtype: jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf, dtype), jnp.float32), params
    )

    target_params = wide(target.params, np.float16)
    ids = jnp.asarray(head.draft_to_target)
    frozen = {
        "target_params": target_params,
        "embedding": target_params["embedding"],
        "draft_to_target": ids,
    }

    drafter = Eagle3Drafter(head.config)
    return Pair(DecoderTarget(target.config), drafter, wide(head.head, np.float32), frozen)


def check_official_losses(steps=7):
    """Checks the losses of the first steps, which do not depend on the number of later steps."""
    golden = json.loads((GOLDEN / "ttt_losses.json").read_text())
    target, drafter, head, frozen = read_golden_pair()
    batch = TTTBatch(
        tokens=jnp.asarray(golden["ids"], jnp.int32),
        attention_mask=jnp.asarray(golden["attention_mask"], bool),
        loss_mask=jnp.asarray(golden["loss_mask"], bool),
    )

    # Compiled in every call, because an injected bug may have changed the code since an earlier
    # one.
    config = TTTConfig(num_steps=steps)
    run = jax.jit(lambda head, batch: ttt_loss(drafter, target, head, frozen, batch, config))
    loss, metrics = run(head, batch)

    losses = golden["plosses"][:steps]
    for step, (expected, accuracy) in enumerate(zip(losses, golden["acces"], strict=False)):
        assert metrics[f"loss_{step}"] == pytest.approx(expected, abs=1e-4)
        assert metrics[f"accuracy_{step}"] == pytest.approx(accuracy, abs=1e-6)
    assert loss == pytest.approx(sum(0.8**k * value for k, value in enumerate(losses)), abs=1e-4)


def test_losses_are_those_of_the_official_code():
    check_official_losses()


def norm(x, params, eps):
    return (
        x
        / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps)
        * np.asarray(params["scale"], np.float64)
    )


def rope(x, position):
    """``[heads H]`` rotated as complex numbers."""
    half = x.shape[-1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(
        1j * position * 10000.0 ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag], -1)


def oracle_logits(drafter, head, embedding, features, tokens, real):
    """Runs the training-time test of one sequence in float64, in the official layout.

    It computes one row and one key at a time.


    Row ``t`` attends to the keys ``j <= t`` of block 0 and to key ``t`` of each later block, within
    the window.
    """
    config = drafter.config
    layer = head["first"]
    mixer = config.layers[0].mixer
    key_positions = np.concatenate([np.arange(len(tokens)) + step for step in range(STEPS)])

    def mat(params, x):
        return x @ np.asarray(params["kernel"], np.float64)

    size = len(tokens)
    eps = config.norm_eps
    groups = mixer.group
    x = mat(head["fc"], np.asarray(features, np.float64).reshape(size, -1))
    padded = np.concatenate([tokens, np.zeros(STEPS, int)])
    keys = []
    values = []
    logits = []
    for step in range(STEPS):
        embedded = np.asarray(embedding, np.float64)[padded[1 + step : 1 + step + size]]
        both = np.concatenate(
            [norm(embedded, layer["embedding_norm"], eps), norm(x, layer["feature_norm"], eps)], -1
        )
        fused = mat(layer["attention"]["qkv"], both).reshape(
            size, mixer.num_kv_heads, groups + 2, mixer.head_dim
        )
        q = fused[:, :, :groups].reshape(size, mixer.num_heads, -1)
        k = fused[:, :, -2]
        v = fused[:, :, -1]
        queries = [rope(row, t + step) for t, row in enumerate(q)]
        keys += [rope(row, t + step) for t, row in enumerate(k)]
        values += list(v)
        mask = np.zeros((size, (step + 1) * size), bool)
        mask[:, :size] = np.tril(np.ones((size, size), bool)) & real
        for later in range(1, step + 1):
            mask[:, later * size : (later + 1) * size] = np.eye(size, dtype=bool)
        attended = np.zeros((size, mixer.num_heads * mixer.head_dim))
        for t in range(size):
            for h in range(mixer.num_heads):
                far = t + step - key_positions[: mask.shape[1]] >= (mixer.window or 10**6)
                seen = np.flatnonzero(mask[t] & ~far)
                scores = np.array([queries[t][h] @ keys[s][h // groups] for s in seen]) / np.sqrt(
                    mixer.head_dim
                )
                weights = np.exp(scores) / np.exp(scores).sum()
                out = sum(w * values[s][h // groups] for w, s in zip(weights, seen, strict=True))
                attended[t, h * mixer.head_dim : (h + 1) * mixer.head_dim] = out
        x = x + mat(layer["attention"]["o"], attended)
        inner = norm(x, layer["mlp_norm"], eps)
        gate, up = np.moveaxis(mat(layer["mlp"]["gate_up"], inner).reshape(size, -1, 2), 2, 0)
        x = x + mat(layer["mlp"]["down"], gate / (1 + np.exp(-gate)) * up)
        logits.append(mat(head["head"], norm(x, head["norm"], eps)))
    return logits


def windowed(drafter, window):
    layers = tuple(with_window(layer, window) for layer in drafter.config.layers)
    return dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, layers=layers))


@pytest.mark.parametrize(
    ("padding", "window"), [((0, 0), None), ((0, 0), 1), ((0, 2), 2), ((2, 0), 4)]
)
def test_unroll_is_the_dense_mask_computation(pair, padding, window):
    _, drafter, head, frozen = pair
    drafter = windowed(drafter, window)
    batch = make_batch(padding=padding)
    features = jax.random.normal(jax.random.key(1), (2, 6, 3, 16))
    logits = unroll(drafter, head, frozen["embedding"], features, batch, STEPS)

    for b in range(2):
        tokens = np.asarray(batch.tokens[b])
        real = np.asarray(batch.attention_mask[b])
        # Rows before the first real token attend to nothing, which the oracle cannot express.
        first = int(np.argmax(real))
        # Left padding turns all rotary positions alike, so the oracle may start at the first real
        # token.
        rows = oracle_logits(
            drafter, head, frozen["embedding"], features[b, first:], tokens[first:], real[first:]
        )

        for step in range(STEPS):
            # A row of padding whose window has only padding attends to nothing either.
            ours = np.asarray(logits[step])[b, real]
            theirs = rows[step][real[first:]]
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-4)
