"""Training: the training-time test against the official code and an independent oracle, data order, exact resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from eagle3_jax.drafters import eagle3
from eagle3_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform, usual_head
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.training import ttt
from eagle3_jax.training.lm import Phase, next_token_loss, random_windows
from eagle3_jax.training.loop import OptimizerConfig, Trainer
from eagle3_jax.training.ttt import TTTBatch, TTTConfig, ttt_loss
from eagle3_jax.training.vocab import coverage, select_draft_vocabulary, token_counts
from eagle3_jax.tree import Chain
from eagle3_jax.types import Draft, Observation, SamplingParams, TargetOutput

GOLDEN = Path(__file__).parent / "golden" / "official"
VOCAB, DRAFT_VOCAB, STEPS = 13, 7, 3
DRAFT_TO_TARGET = jnp.array([0, 2, 3, 5, 8, 9, 12], jnp.int32)


class Pair(NamedTuple):
    """What the objective takes."""

    target: DecoderTarget
    drafter: Eagle3Drafter
    head: Any
    frozen: Any


@pytest.fixture(scope="module")
def pair():
    """A random target and head: grouped queries, and widths that differ wherever they may."""
    mixer = GroupedQuery(num_heads=4, num_kv_heads=2, head_dim=6)
    config = DecoderConfig(vocab_size=VOCAB, width=16, layers=uniform(2, mixer, GatedMLP(width=24)))
    head = Eagle3Config(
        vocab_size=VOCAB,
        width=12,
        layers=uniform(1, mixer, GatedMLP(width=20)),
        norm_eps=1e-5,
        draft_vocab_size=DRAFT_VOCAB,
        target_width=16,
        aux_layers=(0, 1, 2),
    )
    target, drafter = DecoderTarget(config), Eagle3Drafter(head, Chain(STEPS))
    keys = jax.random.split(jax.random.key(0), 3)
    embedding = jax.random.normal(keys[2], (VOCAB, 12))
    frozen = {"target_params": target.init(keys[0]), "embedding": embedding, "draft_to_target": DRAFT_TO_TARGET}
    # Large weights, so that attention and argmaxes depend on what is seen.
    return Pair(target, drafter, jax.tree.map(lambda leaf: 1.5 * leaf, drafter.init_params(keys[1])), frozen)


def make_batch(rows: int = 2, length: int = 6, *, seed: int = 0, padding: tuple[int, int] = (0, 0)) -> TTTBatch:
    """Random tokens; the last row is padded by ``padding`` tokens on the left and right."""
    tokens = jax.random.randint(jax.random.key(seed), (rows, length), 0, VOCAB)
    real = np.ones((rows, length), bool)
    real[-1, : padding[0]], real[-1, length - padding[1] :] = False, False
    return TTTBatch(tokens=tokens, attention_mask=jnp.asarray(real), loss_mask=jnp.asarray(real))


# Compiled once per shape: op by op, these tests would spend a minute on compilation.
unroll = jax.jit(ttt.unroll, static_argnums=(0, 5))
objective = jax.jit(ttt_loss, static_argnums=(0, 1, 5))


# --- the official code -----------------------------------------------------------------------------------------------


def read_golden_pair():
    """The recorded target, its weights rounded through float16 as the official code does, and head."""
    weights = {}
    for shard in sorted((GOLDEN / "target").glob("*.safetensors")):
        weights |= {name: array.astype(np.float16) for name, array in load_file(shard).items()}
    source = json.loads((GOLDEN / "target" / "config.json").read_text())
    mixer = GroupedQuery(
        num_heads=source["num_attention_heads"],
        num_kv_heads=source["num_key_value_heads"],
        head_dim=source["head_dim"],
    )
    config = DecoderConfig(
        vocab_size=source["vocab_size"],
        width=source["hidden_size"],
        layers=uniform(source["num_hidden_layers"], mixer, GatedMLP(width=source["intermediate_size"])),
        norm_eps=source["rms_norm_eps"],
    )
    blocks = {}
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        layer = torch_layer(weights, prefix, source["head_dim"])
        blocks[index] = layer | {"attention_norm": scale(weights, f"{prefix}input_layernorm")}
    target_params = {
        "embedding": weights["model.embed_tokens.weight"],
        "blocks": blocks,
        "norm": scale(weights, "model.norm"),
        "head": kernel(weights, "lm_head"),
    }
    weights = load_file(GOLDEN / "eagle3" / "model.safetensors")
    first = torch_layer(weights, "midlayer.", source["head_dim"]) | {
        "embedding_norm": scale(weights, "midlayer.input_layernorm"),
        "feature_norm": scale(weights, "midlayer.hidden_norm"),
    }
    head = {"fc": kernel(weights, "fc"), "first": first, "norm": scale(weights, "norm")}
    head["head"] = kernel(weights, "lm_head")
    draft_size = len(weights["d2t"])
    drafter = Eagle3Drafter(usual_head(config, draft_vocab_size=draft_size))
    target_params, head = jax.tree.map(lambda array: jnp.asarray(array, jnp.float32), (target_params, head))
    ids = jnp.asarray(np.arange(draft_size) + weights["d2t"], jnp.int32)
    frozen = {"target_params": target_params, "embedding": target_params["embedding"], "draft_to_target": ids}
    return Pair(DecoderTarget(config), drafter, head, frozen)


def kernel(weights, name):
    return {"kernel": weights[f"{name}.weight"].T}


def grouped(weights, prefix, size):
    """Columns of one key head at a time: its query heads, the key, the value."""
    q, k, v = (weights[f"{prefix}self_attn.{name}_proj.weight"].T for name in "qkv")
    heads, group = k.shape[1] // size, q.shape[1] // k.shape[1] * size
    columns = []
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        columns += [q[:, head * group : (head + 1) * group], k[:, own], v[:, own]]
    return {"kernel": np.concatenate(columns, axis=1)}


def interleaved(weights, prefix):
    gate, up = (weights[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    both = np.empty((gate.shape[0], 2 * gate.shape[1]), gate.dtype)
    both[:, 0::2], both[:, 1::2] = gate, up
    return {"kernel": both}


def scale(weights, name):
    return {"scale": weights[f"{name}.weight"]}


def torch_layer(weights, prefix, size):
    """Attention, MLP and its norm; the other norms differ between target and head."""
    return {
        "attention": {
            "qkv": grouped(weights, prefix, size),
            "o": kernel(weights, f"{prefix}self_attn.o_proj"),
        },
        "mlp": {
            "gate_up": interleaved(weights, prefix),
            "down": kernel(weights, f"{prefix}mlp.down_proj"),
        },
        "mlp_norm": scale(weights, f"{prefix}post_attention_layernorm"),
    }


def check_official_losses(steps=7):
    """Of the first steps; each is the same however many follow."""
    golden = json.loads((GOLDEN / "ttt_losses.json").read_text())
    target, drafter, head, frozen = read_golden_pair()
    batch = TTTBatch(
        tokens=jnp.asarray(golden["ids"], jnp.int32),
        attention_mask=jnp.asarray(golden["attention_mask"], bool),
        loss_mask=jnp.asarray(golden["loss_mask"], bool),
    )
    # Compiled here and now: a program of an earlier call would not know what has changed since.
    run = jax.jit(lambda head, batch: ttt_loss(drafter, target, head, frozen, batch, TTTConfig(num_steps=steps)))
    loss, metrics = run(head, batch)
    losses = golden["plosses"][:steps]
    for step, (expected, accuracy) in enumerate(zip(losses, golden["acces"], strict=False)):
        assert metrics[f"loss_{step}"] == pytest.approx(expected, abs=1e-4)
        assert metrics[f"accuracy_{step}"] == pytest.approx(accuracy, abs=1e-6)
    assert loss == pytest.approx(sum(0.8**k * value for k, value in enumerate(losses)), abs=1e-4)


def test_losses_are_those_of_the_official_code():
    check_official_losses()


# --- who sees what ---------------------------------------------------------------------------------------------------


def norm(x, params, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * np.asarray(params["scale"], np.float64)


def rope(x, position):
    """``[heads H]`` rotated as complex numbers."""
    half = x.shape[-1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * position * 10000.0 ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag], -1)


def oracle_logits(drafter, head, embedding, features, tokens, real):
    """The training-time test of one sequence in float64, one row and one key at a time, in the official layout:
    ``(k+1)·T`` keys of which row ``t`` sees ``j <= t`` in block 0 and ``t`` in each later one."""
    config, layer = drafter.config, head["first"]
    mixer = config.layers[0].mixer

    def mat(params, x):
        return x @ np.asarray(params["kernel"], np.float64)

    size, eps, groups = len(tokens), config.norm_eps, mixer.group
    x = mat(head["fc"], np.asarray(features, np.float64).reshape(size, -1))
    padded = np.concatenate([tokens, np.zeros(STEPS, int)])
    keys, values, logits = [], [], []
    for step in range(STEPS):
        embedded = np.asarray(embedding, np.float64)[padded[1 + step : 1 + step + size]]
        both = np.concatenate([norm(embedded, layer["embedding_norm"], eps), norm(x, layer["feature_norm"], eps)], -1)
        fused = mat(layer["attention"]["qkv"], both).reshape(size, mixer.num_kv_heads, groups + 2, mixer.head_dim)
        q, k, v = fused[:, :, :groups].reshape(size, mixer.num_heads, -1), fused[:, :, -2], fused[:, :, -1]
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
                seen = np.flatnonzero(mask[t])
                scores = np.array([queries[t][h] @ keys[s][h // groups] for s in seen]) / np.sqrt(mixer.head_dim)
                weights = np.exp(scores) / np.exp(scores).sum()
                out = sum(w * values[s][h // groups] for w, s in zip(weights, seen, strict=True))
                attended[t, h * mixer.head_dim : (h + 1) * mixer.head_dim] = out
        x = x + mat(layer["attention"]["o"], attended)
        inner = norm(x, layer["mlp_norm"], eps)
        gate, up = np.moveaxis(mat(layer["mlp"]["gate_up"], inner).reshape(size, -1, 2), 2, 0)
        x = x + mat(layer["mlp"]["down"], gate / (1 + np.exp(-gate)) * up)
        logits.append(mat(head["head"], norm(x, head["norm"], eps)))
    return logits


@pytest.mark.parametrize("padding", [(0, 0), (0, 2), (2, 0)])
def test_unroll_is_the_dense_mask_computation(pair, padding):
    _, drafter, head, frozen = pair
    batch = make_batch(padding=padding)
    features = jax.random.normal(jax.random.key(1), (2, 6, 3, 16))
    logits = unroll(drafter, head, frozen["embedding"], features, batch, STEPS)
    for b in range(2):
        tokens, real = np.asarray(batch.tokens[b]), np.asarray(batch.attention_mask[b])
        first = int(np.argmax(real))  # rows before it see nothing, which the oracle cannot express
        # Left padding turns all rotary positions alike, so the oracle may start at the first real token.
        rows = oracle_logits(drafter, head, frozen["embedding"], features[b, first:], tokens[first:], real[first:])
        for step in range(STEPS):
            np.testing.assert_allclose(logits[step][b, first:], rows[step], rtol=1e-4, atol=2e-4)


def test_unroll_is_chain_drafting_with_the_true_tokens(pair, monkeypatch):
    target, drafter, head, frozen = pair
    batch = make_batch()
    features = ttt.consult(drafter, target, frozen, batch, STEPS)[1]
    unrolled = unroll(drafter, head, frozen["embedding"], features, batch, STEPS)

    # Row t of the inference batch has committed x_0 .. x_t and knows x_{t+1}; then true tokens are forced upon it.
    tokens, rows = batch.tokens[0], batch.tokens.shape[1] - STEPS
    prefix = jnp.arange(rows)
    seen = Observation(
        tokens=jnp.tile(tokens, (rows, 1)),
        features=jnp.tile(features[:1], (rows, 1, 1, 1)),
        length=prefix + 1,
        next_token=tokens[prefix + 1],
    )
    recorded = []

    def forced(topology, *, root, first, run, draft_to_target):
        level, mask = first, jnp.ones((rows, 1, 0), bool)
        recorded.append(level.logits[:, 0])
        for depth in range(STEPS - 1):
            mask = jnp.ones((rows, 1, depth + 1), bool)
            level = run(tokens[prefix + 2 + depth][:, None], level.carry, depth, mask, level.memory)
            recorded.append(level.logits[:, 0])
        nodes = jnp.zeros((rows, STEPS + 1), jnp.int32)
        return Draft(tokens=nodes, parents=nodes, valid=nodes == 0)

    @jax.jit
    def infer(head):
        params = {"head": head, "embedding": frozen["embedding"], "draft_to_target": frozen["draft_to_target"]}
        state = drafter.observe(params, drafter.init(params, rows, len(tokens)), seen)
        drafter.propose(params, state, jax.random.split(jax.random.key(0), rows), SamplingParams())
        return recorded

    monkeypatch.setattr(eagle3, "grow", forced)
    for step, logits in enumerate(infer(head)):
        np.testing.assert_allclose(unrolled[step][0, :rows], logits, rtol=1e-4, atol=1e-4)


def test_the_first_step_does_not_depend_on_how_many_follow(pair):
    _, drafter, head, frozen = pair
    features = jax.random.normal(jax.random.key(1), (2, 6, 3, 16))
    one, many = (unroll(drafter, head, frozen["embedding"], features, make_batch(), k) for k in (1, STEPS))
    np.testing.assert_allclose(one[0], many[0], rtol=1e-6, atol=1e-6)
    assert not np.allclose(many[0], many[1], atol=1e-2)


def test_a_row_does_not_see_later_features(pair):
    _, drafter, head, frozen = pair
    batch, features = make_batch(), jax.random.normal(jax.random.key(1), (2, 6, 3, 16))
    before = unroll(drafter, head, frozen["embedding"], features, batch, STEPS)
    after = unroll(drafter, head, frozen["embedding"], features.at[:, 3].add(1.0), batch, STEPS)
    for step in range(STEPS):
        np.testing.assert_array_equal(before[step][:, :3], after[step][:, :3])
        assert not np.allclose(before[step][:, 3], after[step][:, 3])


# --- loss and metrics ------------------------------------------------------------------------------------------------


class TableTarget(DecoderTarget):
    """A target whose logits are the table that it gets as parameters."""

    def __call__(self, params, tokens, positions, mask, cache=None, aux_layers=()):
        final = jnp.zeros((*tokens.shape, self.config.width))
        return TargetOutput(final=final, features=final[:, :, None], written=())

    def unembed(self, params, final):
        return params["table"]


P = np.array([[0.4, 0.3, 0.3], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2]])
A, B = (0.75, 0.25), (0.25, 0.75)  # what the head gives to draft ids 0 and 1


def table_loss(monkeypatch, *, steps, ids, loss_mask, config):
    """The objective on given distributions: the target's are ``P``, the head's are ``steps [K][T W]``."""
    layers = uniform(1, GroupedQuery(num_heads=1, num_kv_heads=1, head_dim=2), GatedMLP(width=4))
    model = DecoderConfig(vocab_size=3, width=4, layers=layers)
    head = Eagle3Config(
        vocab_size=3, width=4, layers=layers, draft_vocab_size=len(ids), target_width=4, aux_layers=(0,)
    )
    frozen = {
        "target_params": {"table": jnp.log(jnp.asarray(P, jnp.float32))[None] + 3.0},  # known up to a constant
        "embedding": jnp.zeros((3, 4)),
        "draft_to_target": jnp.asarray(ids, jnp.int32),
    }
    monkeypatch.setattr(ttt, "unroll", lambda *_: [jnp.log(jnp.asarray(s, jnp.float32))[None] for s in steps])
    batch = TTTBatch(
        tokens=jnp.zeros((1, len(P)), jnp.int32),
        attention_mask=jnp.ones((1, len(P)), bool),
        loss_mask=jnp.asarray(loss_mask, bool)[None],
    )
    loss, metrics = ttt_loss(Eagle3Drafter(head, Chain(1)), TableTarget(model), {}, frozen, batch, config)
    return float(loss), {name: float(value) for name, value in metrics.items()}


def cross_entropy(p, q):
    return -sum(a * np.log(b) for a, b in zip(p, q, strict=True))


# Draft vocabulary {0, 2}. Labels of step 0 are P[1:] and then nothing; those of step 1 are P[2:] and then nothing.
CASE = {"steps": ([A, A, B, A, A], [A, B, A, A, A]), "ids": [0, 2]}
CE_0 = [cross_entropy((6 / 7, 1 / 7), A), cross_entropy((2 / 3, 1 / 3), A), cross_entropy((1 / 9, 8 / 9), B)]
CE_0 += [cross_entropy((5 / 7, 2 / 7), A), cross_entropy((1 / 2, 1 / 2), A)]


@pytest.mark.parametrize(
    ("denominator", "out_of_vocab", "loss", "accuracy"),
    [
        # Row 1's likeliest token, 1, is outside; row 4 has no label, which the official code takes for uniform.
        ("all", "mask", (CE_0[0] + CE_0[2] + CE_0[3] + CE_0[4]) / 5, 4 / 5),
        ("all", "keep", sum(CE_0) / 5, 4 / 5),
        ("supervised", "mask", (CE_0[0] + CE_0[2] + CE_0[3]) / 4, 3 / 4),
        ("supervised", "keep", sum(CE_0[:4]) / 4, 3 / 4),
    ],
)
def test_denominators_by_hand(monkeypatch, denominator, out_of_vocab, loss, accuracy):
    config = TTTConfig(num_steps=2, decay=0.5, denominator=denominator, out_of_vocab=out_of_vocab)
    total, metrics = table_loss(monkeypatch, **CASE, loss_mask=[1] * 5, config=config)
    assert metrics["loss_0"] == pytest.approx(loss, abs=1e-5)
    assert metrics["accuracy_0"] == pytest.approx(accuracy, abs=1e-5)
    assert total == pytest.approx(metrics["loss_0"] + 0.5 * metrics["loss_1"], abs=1e-5)


def test_masked_rows_count_in_the_official_denominator_only(monkeypatch):
    mask = [0, 0, 1, 0, 0]
    config = TTTConfig(num_steps=2)
    metrics = table_loss(monkeypatch, **CASE, loss_mask=mask, config=config)[1]
    assert metrics["loss_0"] == pytest.approx(CE_0[2] / 5, abs=1e-5)
    # At step 1 the mask has moved with the label: row 1 predicts what row 2 predicted.
    assert metrics["loss_1"] == pytest.approx(cross_entropy((1 / 9, 8 / 9), B) / 5, abs=1e-5)
    config = dataclasses.replace(config, denominator="supervised")
    metrics = table_loss(monkeypatch, **CASE, loss_mask=mask, config=config)[1]
    assert metrics["loss_0"] == pytest.approx(CE_0[2], abs=1e-5)


def test_acceptance_and_tau_by_hand(monkeypatch):
    metrics = table_loss(monkeypatch, **CASE, loss_mask=[1] * 5, config=TTTConfig(num_steps=2))[1]
    # Σ min(p, q) with what the target really gives to tokens 0 and 2; rows without a label do not count.
    assert metrics["acceptance_0"] == pytest.approx((0.7 + 0.3 + 0.85 + 0.7) / 4, abs=1e-5)
    assert metrics["acceptance_1"] == pytest.approx((0.3 + 0.85 + 0.7) / 3, abs=1e-5)
    # Step 0 hits in rows 0, 2, 3 of 0-3. At step 1 rows 1 and 2 of 0-2 hit, but row 1 was lost at step 0.
    assert metrics["simulated_tau"] == pytest.approx(1 + 3 / 4 + 1 / 3, abs=1e-5)


def test_tau_counts_only_chains_that_are_supervised_throughout(monkeypatch):
    metrics = table_loss(monkeypatch, **CASE, loss_mask=[1, 0, 1, 1, 1], config=TTTConfig(num_steps=2))[1]
    assert metrics["simulated_tau"] == pytest.approx(1 + 3 / 3 + 1 / 1, abs=1e-5)


def test_a_perfect_draft_is_always_accepted(monkeypatch):
    steps = [np.concatenate([P[1 + k :], np.full((1 + k, 3), 1 / 3)]) for k in range(3)]
    config = TTTConfig(num_steps=3, denominator="supervised")
    metrics = table_loss(monkeypatch, steps=steps, ids=[0, 1, 2], loss_mask=[1] * 5, config=config)[1]
    for k in range(3):
        entropy = np.mean([cross_entropy(p, p) for p in P[1 + k :]])
        assert metrics[f"loss_{k}"] == pytest.approx(entropy, abs=1e-5)
        assert metrics[f"accuracy_{k}"] == pytest.approx(1, abs=1e-5)
        assert metrics[f"acceptance_{k}"] == pytest.approx(1, abs=1e-5)
    assert metrics["simulated_tau"] == pytest.approx(4, abs=1e-5)


def test_padding_changes_nothing_under_the_supervised_denominator(pair):
    target, drafter, head, frozen = pair
    config = TTTConfig(num_steps=2, denominator="supervised")
    padded = make_batch(1, 8, padding=(0, 3))
    cut = jax.tree.map(lambda leaf: leaf[:, :5], padded)
    long, short = (objective(drafter, target, head, frozen, batch, config) for batch in (padded, cut))
    assert long[0] == pytest.approx(float(short[0]), abs=1e-5)
    for name, value in short[1].items():
        assert long[1][name] == pytest.approx(float(value), abs=1e-5), name


def test_only_the_head_is_differentiated_and_only_through_supervised_rows(pair):
    target, drafter, head, frozen = pair
    floats = {name: frozen[name] for name in ("target_params", "embedding")}
    config = TTTConfig(num_steps=2, denominator="supervised", out_of_vocab="keep")

    @jax.jit
    def gradients(head, floats, batch):
        def loss(head, floats):
            return ttt_loss(drafter, target, head, frozen | floats, batch, config)[0]

        return jax.value_and_grad(loss, argnums=(0, 1))(head, floats)

    _, (trained, untouched) = gradients(head, floats, make_batch())
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(untouched))
    assert all(np.any(np.asarray(leaf) != 0) for leaf in jax.tree.leaves(trained))

    nothing = make_batch().replace(loss_mask=jnp.zeros((2, 6), bool))
    loss, (trained, _) = gradients(head, floats, nothing)
    assert loss == 0
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(trained))


@pytest.mark.parametrize(
    "wrong", [{"num_steps": 0}, {"decay": 0.0}, {"decay": 1.5}, {"denominator": "mean"}, {"out_of_vocab": "drop"}]
)
def test_a_wrong_option_is_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        TTTConfig(**wrong)


# --- the draft vocabulary --------------------------------------------------------------------------------------------


def test_draft_vocabulary_takes_the_most_frequent_and_breaks_ties_to_the_lower_id():
    counts = np.array([2, 9, 5, 5, 0, 5, 7])
    np.testing.assert_array_equal(select_draft_vocabulary(counts, 4), [1, 2, 3, 6])
    assert select_draft_vocabulary(counts, 4).dtype == np.int32


def test_draft_vocabulary_is_filled_up_with_the_lowest_unused_ids():
    np.testing.assert_array_equal(select_draft_vocabulary(np.array([0, 0, 3, 0, 0, 1]), 4), [0, 1, 2, 5])
    np.testing.assert_array_equal(select_draft_vocabulary(np.zeros(5, int), 5), np.arange(5))


@pytest.mark.parametrize("size", [0, 6])
def test_draft_vocabulary_of_impossible_size_is_refused(size):
    with pytest.raises(ValueError, match="expected 1 to the target's 5"):
        select_draft_vocabulary(np.ones(5, int), size)


def test_token_counts_and_coverage():
    rows = [np.array([0, 1, 1, 3]), np.array([3, 3])]
    np.testing.assert_array_equal(token_counts(rows, None, 5), [1, 2, 0, 3, 0])
    masks = [np.array([False, True, True, True]), np.array([False, True])]
    counts = token_counts(rows, masks, 5)
    np.testing.assert_array_equal(counts, [0, 2, 0, 2, 0])
    assert coverage(counts, select_draft_vocabulary(counts, 1)) == 0.5
    with pytest.raises(ValueError, match="another tokenizer"):
        token_counts([np.array([5])], None, 5)
    with pytest.raises(ValueError, match="must agree"):
        token_counts(rows, masks[::-1], 5)
    with pytest.raises(ValueError, match="no token was counted"):
        coverage(np.zeros(5, int), np.array([0]))


# --- data order, optimisers, resume ----------------------------------------------------------------------------------


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


def test_a_run_whose_weights_lie_in_another_order_is_not_continued(pair, tmp_path):
    def trainer():
        return Trainer(lambda params, batch: (0.0, {}), OptimizerConfig(num_steps=100), tmp_path)

    first = trainer()
    first.save(first.start(pair.head))
    assert trainer().start(pair.head).step == 0
    for spoil in (lambda path: path.write_text("1"), lambda path: path.unlink()):  # as version 0.1 left it
        spoil(tmp_path / "layout")
        with pytest.raises(ValueError, match="weights lie in the order of another version; finish the run") as refusal:
            trainer()
        assert "\n" not in str(refusal.value)
