"""Loss and metrics of the training-time test by hand, and the draft vocabulary."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_pair import make_batch

from eagle3_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, uniform
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.topology import Chain
from eagle3_jax.training import ttt
from eagle3_jax.training.batches import TTTBatch
from eagle3_jax.training.ttt import TTTConfig, ttt_loss
from eagle3_jax.training.vocab import coverage, select_draft_vocabulary
from eagle3_jax.types import TargetOutput

# Compiled once per shape: op by op, these tests would be slow.
objective = jax.jit(ttt_loss, static_argnums=(0, 1, 5))


class TableTarget(DecoderTarget):
    """A target whose logits are the table that it gets as parameters."""

    def __call__(self, params, tokens, positions, mask, cache=None, aux_layers=()):
        final = jnp.zeros((*tokens.shape, self.config.width))
        return TargetOutput(final=final, features=final[:, :, None], written=())

    def unembed(self, params, final):
        return params["table"]


P = np.array([[0.4, 0.3, 0.3], [0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.1, 0.1, 0.8], [0.5, 0.3, 0.2]])
# The head's probabilities of draft ids 0 and 1.
A = (0.75, 0.25)
B = (0.25, 0.75)


def table_loss(monkeypatch, *, steps, ids, loss_mask, config):
    """Returns the objective for fixed distributions.

    The target's are ``P``, the head's are ``steps [K][T W]``.
    """
    layers = uniform(1, GroupedQuery(num_heads=1, num_kv_heads=1, head_dim=2), GatedMLP(width=4))
    model = DecoderConfig(vocab_size=3, width=4, layers=layers)
    head = Eagle3Config(
        vocab_size=3,
        width=4,
        layers=layers,
        draft_vocab_size=len(ids),
        target_width=4,
        aux_layers=(0,),
    )

    # Logits are known up to a constant.
    table = jnp.log(jnp.asarray(P, jnp.float32))[None] + 3.0
    frozen = {
        "target_params": {"table": table},
        "embedding": jnp.zeros((3, 4)),
        "draft_to_target": jnp.asarray(ids, jnp.int32),
    }
    logits = [jnp.log(jnp.asarray(step, jnp.float32))[None] for step in steps]
    monkeypatch.setattr(ttt, "unroll", lambda *_: logits)

    batch = TTTBatch(
        tokens=jnp.zeros((1, len(P)), jnp.int32),
        attention_mask=jnp.ones((1, len(P)), bool),
        loss_mask=jnp.asarray(loss_mask, bool)[None],
    )

    loss, metrics = ttt_loss(
        Eagle3Drafter(head, Chain(1)), TableTarget(model), {}, frozen, batch, config
    )
    return float(loss), {name: float(value) for name, value in metrics.items()}


def cross_entropy(p, q):
    return -sum(a * np.log(b) for a, b in zip(p, q, strict=True))


# Draft vocabulary {0, 2}. Labels of step 0 are P[1:] and then nothing; those of step 1 are P[2:]
# and then nothing.
CASE = {"steps": ([A, A, B, A, A], [A, B, A, A, A]), "ids": [0, 2]}
CE_0 = [
    cross_entropy((6 / 7, 1 / 7), A),
    cross_entropy((2 / 3, 1 / 3), A),
    cross_entropy((1 / 9, 8 / 9), B),
]
CE_0 += [cross_entropy((5 / 7, 2 / 7), A), cross_entropy((1 / 2, 1 / 2), A)]


@pytest.mark.parametrize(
    ("denominator", "loss", "accuracy"),
    [
        # The likeliest token of row 1 is outside the draft vocabulary. Row 4 has no label: a
        # uniform one in "all".
        ("all", (CE_0[0] + CE_0[2] + CE_0[3] + CE_0[4]) / 5, 4 / 5),
        ("supervised", (CE_0[0] + CE_0[2] + CE_0[3]) / 4, 3 / 4),
    ],
)
def test_denominators_by_hand(monkeypatch, denominator, loss, accuracy):
    config = TTTConfig(num_steps=2, decay=0.5, denominator=denominator)
    total, metrics = table_loss(monkeypatch, **CASE, loss_mask=[1] * 5, config=config)
    assert metrics["loss_0"] == pytest.approx(loss, abs=1e-5)
    assert metrics["accuracy_0"] == pytest.approx(accuracy, abs=1e-5)
    assert total == pytest.approx(metrics["loss_0"] + 0.5 * metrics["loss_1"], abs=1e-5)


def test_masked_rows_count_in_the_official_denominator_only(monkeypatch):
    mask = [0, 0, 1, 0, 0]
    config = TTTConfig(num_steps=2)
    metrics = table_loss(monkeypatch, **CASE, loss_mask=mask, config=config)[1]
    assert metrics["loss_0"] == pytest.approx(CE_0[2] / 5, abs=1e-5)
    # At step 1 the mask moves with the label: row 1 predicts the token that row 2 predicted before.
    assert metrics["loss_1"] == pytest.approx(cross_entropy((1 / 9, 8 / 9), B) / 5, abs=1e-5)
    config = dataclasses.replace(config, denominator="supervised")
    metrics = table_loss(monkeypatch, **CASE, loss_mask=mask, config=config)[1]
    assert metrics["loss_0"] == pytest.approx(CE_0[2], abs=1e-5)


def test_acceptance_and_tau_by_hand(monkeypatch):
    metrics = table_loss(monkeypatch, **CASE, loss_mask=[1] * 5, config=TTTConfig(num_steps=2))[1]
    # Σ min(p, q) with the target's full probabilities of tokens 0 and 2; rows without a label do
    # not count.
    assert metrics["acceptance_0"] == pytest.approx((0.7 + 0.3 + 0.85 + 0.7) / 4, abs=1e-5)
    assert metrics["acceptance_1"] == pytest.approx((0.3 + 0.85 + 0.7) / 3, abs=1e-5)
    # Step 0 hits in rows 0, 2, 3 of 0-3. At step 1 rows 1 and 2 of 0-2 hit, but row 1 was lost at
    # step 0.
    assert metrics["simulated_tau"] == pytest.approx(1 + 3 / 4 + 1 / 3, abs=1e-5)


def test_tau_counts_only_chains_that_are_supervised_throughout(monkeypatch):
    metrics = table_loss(
        monkeypatch, **CASE, loss_mask=[1, 0, 1, 1, 1], config=TTTConfig(num_steps=2)
    )[1]
    assert metrics["simulated_tau"] == pytest.approx(1 + 3 / 3 + 1 / 1, abs=1e-5)


def test_padding_changes_nothing_under_the_supervised_denominator(pair):
    target, drafter, head, frozen = pair
    config = TTTConfig(num_steps=2, denominator="supervised")
    padded = make_batch(1, 8, padding=(0, 3))
    cut = jax.tree.map(lambda leaf: leaf[:, :5], padded)
    long, short = (
        objective(drafter, target, head, frozen, batch, config) for batch in (padded, cut)
    )
    assert long[0] == pytest.approx(float(short[0]), abs=1e-5)
    for name, value in short[1].items():
        assert long[1][name] == pytest.approx(float(value), abs=1e-5), name


def test_only_the_head_is_differentiated_and_only_through_supervised_rows(pair):
    target, drafter, head, frozen = pair
    floats = {name: frozen[name] for name in ("target_params", "embedding")}
    config = TTTConfig(num_steps=2, denominator="supervised")

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


# ---------------------------------------------------------------- the draft vocabulary


@pytest.mark.parametrize(
    ("counts", "size", "chosen"),
    [
        ([2, 9, 5, 5, 0, 5, 7], 4, [1, 2, 3, 6]),  # the most frequent; ties go to the lower id
        ([0, 0, 3, 0, 0, 1], 4, [0, 1, 2, 5]),  # filled up with the lowest unused ids
        ([0] * 5, 5, [0, 1, 2, 3, 4]),
    ],
)
def test_the_draft_vocabulary(counts, size, chosen):
    vocabulary = select_draft_vocabulary(np.array(counts), size)
    assert vocabulary.dtype == np.int32 and vocabulary.tolist() == chosen
    with pytest.raises(ValueError, match="expected 1 to the target's"):
        select_draft_vocabulary(np.array(counts), len(counts) + 1)


def test_the_coverage_is_the_share_of_the_counted_tokens():
    counts = np.array([0, 2, 0, 2, 0])
    assert coverage(counts, select_draft_vocabulary(counts, 1)) == 0.5
