"""P-EAGLE's objective: its rows, equality with drafting, and the loss by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import rel_entr, softmax
from training_pair import VOCAB, make_batch, random_pair, tau_of

from eagle3_jax.checks import per_row
from eagle3_jax.drafters import PEagleConfig, PEagleDrafter
from eagle3_jax.models.config import with_window
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.topology import Chain
from eagle3_jax.training import p_eagle, ttt
from eagle3_jax.training.p_eagle import Chains, chain_mask, sample_chains
from eagle3_jax.types import DraftSampling, Observation, SamplingParams

DEPTH = 3

# Compiled once per shape: op by op, these tests would be slow.
sample = jax.jit(sample_chains, static_argnums=(2, 3))
parallel_logits = jax.jit(p_eagle.parallel_logits, static_argnums=0)


@pytest.fixture(scope="module")
def pair() -> tuple[DecoderTarget, PEagleDrafter, Any, Any]:
    """Two layers, the second with a window.

    The head's weights are large, so that it depends on what it attends to.
    """
    target, eagle3, _, frozen = random_pair()
    layers = (eagle3.config.layers[0], with_window(eagle3.config.layers[0], 3))
    config = PEagleConfig(**vars(eagle3.config) | {"layers": layers, "mask_token_id": VOCAB - 1})
    drafter = PEagleDrafter(config, Chain(DEPTH), draft_sampling=DraftSampling.PROBABILISTIC)
    head = jax.tree.map(lambda leaf: 1.5 * leaf, drafter.init_params(jax.random.key(1)))
    return target, drafter, head, frozen


def rows_of(chains: Chains, row: int) -> dict[int, list[int]]:
    """Returns the anchors of a row by depth."""
    anchors = np.asarray(chains.anchors)[row]
    present = np.asarray(chains.present)[row]
    by_depth: dict[int, list[int]] = {depth: [] for depth in set(chains.depths)}
    for anchor, depth, is_present in zip(anchors, chains.depths, present, strict=True):
        if is_present:
            by_depth[depth].append(int(anchor))
    return by_depth


def test_every_depth_keeps_the_share_of_the_paper() -> None:
    """⌊23 · 0.7⌋, ⌊22 · 0.49⌋, ⌊21 · 0.343⌋, ⌊20 · 0.2401⌋ and ⌊19 · 0.2⌋ of 24 positions."""
    chains, repeated, changed = (
        sample(jax.random.key(seed), jnp.ones((3, 24), bool), 6) for seed in (0, 0, 1)
    )
    for row in range(3):
        assert [len(rows_of(chains, row)[depth]) for depth in range(6)] == [24, 16, 10, 7, 4, 3]
    assert len(chains.depths) == 24 + 16 + 10 + 7 + 4 + 3
    assert np.array_equal(chains.anchors, repeated.anchors) and not np.array_equal(
        chains.anchors, changed.anchors
    )


@pytest.mark.parametrize("seed", range(3))
def test_chains_have_no_gaps_and_are_supervised(seed: int) -> None:
    valid = np.random.default_rng(seed).random((3, 24)) < np.array([[0.9], [0.5], [0.05]])
    # A position without an anchor before it.
    valid[0, 0] = True
    chains = sample(jax.random.key(seed), jnp.asarray(valid), 6)

    for row in range(3):
        of_depth = rows_of(chains, row)
        supervised = int(valid[row].sum())
        assert of_depth[0] == list(range(24))
        for depth in range(1, max(chains.depths) + 1):
            anchors = of_depth[depth]
            most = max(0, supervised - depth) * max(0.7**depth, 0.2)
            assert len(set(anchors)) == len(anchors) <= most
            assert set(anchors) <= set(of_depth[depth - 1])
            assert all(anchor >= 0 and valid[row, anchor + depth] for anchor in anchors)

    assert rows_of(chains, 0)[2]


def test_no_row_attends_to_padding_or_to_a_chain_that_was_not_sampled() -> None:
    """Two real positions of four; anchor 0 at depth 1, and two rows without a chain."""
    chains = Chains(
        anchors=jnp.array([[0, 1, 2, 3, 0, 0, 0]]),
        present=jnp.array([[1, 1, 1, 1, 1, 0, 0]], bool),
        depths=(0, 0, 0, 0, 1, 1, 2),
    )
    mask = chain_mask(chains, jnp.array([[1, 1, 0, 0]], bool))[0].astype(int)

    # Padding attends to itself.
    assert mask[:5, :4].tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 1, 0],
        [1, 1, 0, 1],
        [1, 0, 0, 0],
    ]
    assert mask[4, 4:].tolist() == [1, 0, 0] and not mask[:, 5:].any()


def test_training_has_the_distributions_of_drafting(pair) -> None:
    """Compares the distributions of training, at every anchor and depth, with those of drafting.

    Drafting follows every prefix, and a layer has a window.
    """
    target, drafter, head, frozen = pair
    batch = make_batch(1, 8)
    size = 8
    features = ttt.teacher_forward(drafter, target, frozen, batch, 1)[1]
    chains = sample(jax.random.key(0), jnp.ones((1, size), bool), DEPTH, 1.0)
    trained = jax.nn.softmax(
        parallel_logits(drafter, head, frozen["embedding"], features, batch, chains)
    )[0]

    prefix = jnp.arange(size - 1)
    seen = Observation(
        tokens=jnp.tile(batch.tokens, (size - 1, 1)),
        features=jnp.tile(features, (size - 1, 1, 1, 1)),
        length=prefix + 1,
        next_token=batch.tokens[0, prefix + 1],
    )

    @jax.jit
    def drafted(head: Any) -> Any:
        params = {
            "head": head,
            "embedding": frozen["embedding"],
            "draft_to_target": frozen["draft_to_target"],
        }
        state = drafter.observe(params, drafter.init(params, size - 1, size + DEPTH), seen)
        keys = jax.random.split(jax.random.key(0), size - 1)
        return drafter.propose(
            params, state, keys, per_row(SamplingParams(temperature=1.0), size - 1)
        ).probs

    probs = drafted(head)[:, 1:][:, :, frozen["draft_to_target"]]
    compared = 0
    for index, (anchor, depth) in enumerate(
        zip(chains.anchors[0].tolist(), chains.depths, strict=True)
    ):
        distribution = trained[index]
        if chains.present[0, index] and anchor < size - 1:
            np.testing.assert_allclose(distribution, probs[anchor, depth], atol=1e-5)
            compared += 1
    assert compared > 2 * size


def test_the_loss_is_one_mean_over_all_depths(pair) -> None:
    """In float64 from the logits of both: KL, labels, shares and chains, element by element."""
    target, drafter, head, frozen = pair
    batch = dataclasses.replace(make_batch(2, 8, padding=(0, 2)), key=jax.random.key(5))
    compiled = jax.jit(p_eagle.p_eagle_loss, static_argnums=(0, 1, 5))
    loss, metrics = compiled(drafter, target, head, frozen, batch, DEPTH)

    real = np.asarray(batch.attention_mask)
    valid = real & np.pad(real[:, 1:], ((0, 0), (0, 1)))
    chains = sample(batch.key, jnp.asarray(valid), DEPTH)
    features = ttt.teacher_forward(drafter, target, frozen, batch, 1)[1]
    scores = parallel_logits(drafter, head, frozen["embedding"], features, batch, chains)
    positions = jnp.broadcast_to(jnp.arange(8), (2, 8))
    seen = jnp.tril(jnp.ones((8, 8), jnp.bool_))[None] & batch.attention_mask[:, None, :]
    final = target(frozen["target_params"], batch.tokens, positions, seen).final
    logits = np.asarray(target.unembed(frozen["target_params"], final), np.float64)
    ids = np.asarray(frozen["draft_to_target"])

    terms: list[float] = []
    hits: list[dict[tuple[int, int], bool]] = [{} for _ in range(DEPTH)]
    for row in range(2):
        for index, depth in enumerate(chains.depths):
            anchor = int(chains.anchors[row, index])
            if not chains.present[row, index] or not valid[row, anchor + depth]:
                continue
            label = logits[row, anchor + depth + 1]
            score = np.asarray(scores[row, index], np.float64)
            terms.append(float(rel_entr(softmax(label[ids]), softmax(score)).sum()))
            hits[depth][row, anchor] = ids[score.argmax()] == label.argmax()
    assert loss == pytest.approx(np.mean(terms), abs=1e-5)
    for depth in range(DEPTH):
        assert metrics[f"accuracy_{depth}"] == pytest.approx(
            np.mean(list(hits[depth].values())), abs=1e-6
        )
    assert metrics["simulated_tau"] == pytest.approx(tau_of(hits), abs=1e-5)
