"""Objectives of block drafters, compared with a NumPy head that runs one block at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from block_heads import BlockHead, biased, chosen_ids, run_block
from checkpoints import loaded_head, target_tables
from convolved_heads import ConvolvedHead
from scipy.special import softmax

from eagle3_jax.drafters import Markov
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.training.batches import TTTBatch
from eagle3_jax.training.dflash import BlockObjective, block_loss, choose_anchors
from eagle3_jax.training.methods import RECIPES, HeadOptions, spread_layers
from eagle3_jax.types import EmbeddingTables, TargetOutput

SIZE = 9
EMBEDDING, OUTPUT = target_tables()


class GivenTarget(DecoderTarget):
    """A target whose features and logits are its parameters."""

    def __call__(self, params, tokens, positions, mask, cache=None, aux_layers=()):
        return TargetOutput(final=jnp.zeros((2, SIZE, 32)), features=params["features"], written=())

    def unembed(self, params, final):
        return params["logits"]

    def tables(self, params):
        return EmbeddingTables(jnp.asarray(EMBEDDING), jnp.asarray(OUTPUT.T))


layers = uniform(1, GroupedQuery(num_heads=1, num_kv_heads=1, head_dim=2), GatedMLP(width=4))
TARGET = GivenTarget(DecoderConfig(vocab_size=61, width=32, layers=layers))
RANDOM = np.random.default_rng(8)
FEATURES = RANDOM.normal(size=(2, SIZE, 3, 32)).astype(np.float32)
LOGITS = 2 * RANDOM.normal(size=(2, SIZE, 61)).astype(np.float32)
TOKENS = RANDOM.integers(0, 61, (2, SIZE))
REAL = np.ones((2, SIZE), bool)
REAL[1, 7:] = False
LEARN = np.zeros((2, SIZE), bool)
LEARN[0, 2:8] = True
LEARN[1, 1:6] = True
LEARN[0, 4] = False
BATCH = TTTBatch(
    tokens=jnp.asarray(TOKENS, jnp.int32),
    attention_mask=jnp.asarray(REAL),
    loss_mask=jnp.asarray(LEARN),
)


def by_hand(head: BlockHead, objective: BlockObjective) -> float:
    """Returns the loss, computed for one anchor and one prediction at a time."""
    ids = chosen_ids(head)
    sums = {"text": [], "distance": [], "divergence": [], "confidence": []}
    text = np.pad(TOKENS, ((0, 0), (0, 8)))
    for row in range(2):
        for a in range(1, SIZE):
            if not (REAL[row, a] and LEARN[row, a - 1]):
                continue

            block = run_block(
                head, EMBEDDING, OUTPUT, FEATURES[row, :a], TOKENS[row, a], head.predicted
            )
            logits, confidence = biased(
                head, block, TOKENS[row, a], text[row, a + 1 : a + head.predicted].tolist()
            )

            for k in range(head.predicted):
                before = a + k
                if before >= SIZE or not REAL[row, before] or not LEARN[row, before - 1]:
                    continue

                weight = np.exp(-k / 4) if objective.decays else 1.0
                p = softmax(LOGITS[row, before].astype(np.float64), -1)[ids]
                q = softmax(logits[k], -1)
                distance = np.abs(p - q).sum() + 1 - p.sum()
                sums["distance"].append(weight * distance)

                t = objective.temperature
                p_t = softmax(np.log(p) / t, -1)
                q_t = softmax(logits[k] / t, -1)
                divergence = (p_t * np.log(p_t / q_t)).sum()
                sums["divergence"].append(weight * t**2 * divergence)

                if head.confidence:
                    label = np.minimum(p, q).sum()
                    c = confidence[k]
                    entropy = label * np.log(c) + (1 - label) * np.log(1 - c)
                    sums["confidence"].append(-weight * entropy)

                word = before + 1
                if word < SIZE and REAL[row, word] and TOKENS[row, word] in ids:
                    draft_id = ids.tolist().index(TOKENS[row, word])
                    sums["text"].append(-weight * np.log(q[draft_id]))

    return sum(
        getattr(objective, name) * float(np.mean(values)) for name, values in sums.items() if values
    )


@pytest.mark.parametrize(
    ("head", "objective"),
    [
        (BlockHead(block=4, layers=1, draft_vocab=40), BlockObjective(text=1.0)),
        (
            BlockHead(block=3, layers=1, rank=4, from_anchor=True, confidence="markov"),
            BlockObjective(text=0.1, distance=0.9, confidence=1.0),
        ),
        (
            BlockHead(
                block=3,
                layers=1,
                rank=4,
                from_anchor=True,
                markov="rnn",
                confidence="hidden",
                draft_vocab=40,
            ),
            BlockObjective(text=0.1, distance=0.9, confidence=1.0),
        ),
        (
            BlockHead(block=4, layers=2, causal=True),
            BlockObjective(divergence=1.0, temperature=1.5, decays=False),
        ),
        (
            BlockHead(block=5, layers=3, windows=(True, False, True), is_causal=False),
            BlockObjective(text=1.0),
        ),
        (BlockHead(block=4, windows=(True, False)), BlockObjective(text=1.0)),
    ],
    ids=["DFlash", "DSpark", "DSpark, recurrent", "JetSpec", "windows", "causal windows"],
)
def test_all_blocks_in_one_pass_are_the_blocks_one_by_one(
    head: BlockHead, objective: BlockObjective
) -> None:
    """So no block attends to another or to its future, and only predictions are counted."""
    drafter, params = loaded_head(head.write)
    frozen: Any = {
        "target_params": {"logits": jnp.asarray(LOGITS), "features": jnp.asarray(FEATURES)},
        "embedding": jnp.asarray(EMBEDDING),
        "draft_to_target": params.get("draft_to_target"),
    }
    run = jax.jit(lambda params: block_loss(drafter, TARGET, params, frozen, BATCH, objective))
    loss, metrics = run(params["head"])
    assert float(loss) == pytest.approx(by_hand(head, objective), rel=2e-5)
    assert 1 <= float(metrics["simulated_tau"]) <= 1 + head.predicted


@pytest.mark.torch
def test_the_selector_learns_the_words_that_are_candidates() -> None:
    """Compared with the PyTorch twin, one anchor and one prediction at a time."""
    import torch
    from dflash2_torch import Twin

    head = ConvolvedHead(layers=2, block=4, sliding=(True, False), window=3)
    drafter, params = loaded_head(head.write)
    tensors = {name: torch.tensor(value) for name, value in head.tensors().items()}
    twin = Twin(head.config(), tensors, (torch.tensor(EMBEDDING), torch.tensor(OUTPUT)))

    sums: dict[str, list[float]] = {"text": [], "selector": []}
    for row in range(2):
        for a in range(1, SIZE):
            if not (REAL[row, a] and LEARN[row, a - 1]):
                continue
            features = torch.tensor(FEATURES[row, :a]).flatten(1)
            hidden, logits = twin.block(features, torch.tensor(TOKENS[row, a]), 3)
            for k, before in enumerate(range(a, min(a + 3, SIZE - 1))):
                if not (REAL[row, before] and LEARN[row, before - 1] and REAL[row, before + 1]):
                    continue
                word = TOKENS[row, before + 1]
                scores = twin.scores(hidden[k], logits[k], torch.tensor(TOKENS[row, before]))
                weight = np.exp(-k / 4)
                sums["text"].append(weight * -float(logits[k].log_softmax(-1)[word]))
                if torch.isfinite(scores[word]):
                    sums["selector"].append(weight * -float(scores.log_softmax(-1)[word]))

    assert 0 < len(sums["selector"]) < len(sums["text"])
    frozen: Any = {
        "target_params": {"logits": jnp.asarray(LOGITS), "features": jnp.asarray(FEATURES)},
        "embedding": jnp.asarray(EMBEDDING),
        "draft_to_target": None,
    }
    for name, values in sums.items():
        objective = BlockObjective(**{name: 1.0})
        loss = lambda tree, objective=objective: block_loss(
            drafter, TARGET, tree, frozen, BATCH, objective
        )[0]
        value, grads = jax.jit(jax.value_and_grad(loss))(params["head"])
        assert float(value) == pytest.approx(np.mean(values), rel=2e-5), name
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(grads))


def test_anchors_are_sampled_where_the_next_token_is_worth_learning() -> None:
    allowed = [{3, 4, 6, 7, 8}, {2, 3, 4, 5, 6}]
    for key in (None, jax.random.key(0)):
        anchors, valid = choose_anchors(BATCH.replace(key=key), 7)
        for row in range(2):
            assert set(np.asarray(anchors)[row][np.asarray(valid)[row]].tolist()) == allowed[row]
    keys = jax.random.split(jax.random.key(1), 99)
    sampled = [choose_anchors(BATCH.replace(key=key), 2)[0][0].tolist() for key in keys]
    assert {anchor for pair in sampled for anchor in pair} == allowed[0]
    assert all(first < second for first, second in sampled)


def test_published_layers_are_read() -> None:
    assert spread_layers(36) == (2, 10, 18, 26, 34)
    assert spread_layers(8) == (2, 3, 4, 5, 6)
    assert spread_layers(2) == (1, 2)


def test_recipes_are_of_published_kinds() -> None:
    target = tiny.config(13, num_layers=8, width=32)
    dflash, dspark, jetspec = (
        RECIPES[method].config(target, HeadOptions(depth=7))
        for method in ("dflash", "dspark", "jetspec")
    )
    sizes = [(config.block_size, config.num_predicted) for config in (dflash, dspark, jetspec)]
    assert sizes == [(8, 7), (7, 7), (8, 7)]
    assert [config.causal for config in (dflash, dspark, jetspec)] == [False, False, True]

    assert dspark.markov == Markov(rank=32)
    assert dspark.confidence == "markov"

    reduced = RECIPES["dflash"].config(target, HeadOptions(depth=15, draft_vocab_size=6))
    assert reduced.own_output and (reduced.draft_vocab_size, reduced.block_size) == (6, 16)
