"""A sampled chain and its head against numpy: positions, the ids fed back, ``q`` of every depth.

The output distribution is exact for every head, so it cannot show that a head computes something wrong.
The oracle is that of training, one row and one key at a time in float64: row ``t`` of its step ``k`` is the draft that
follows ``x_0 .. x_t`` and is ``k`` tokens deep.
"""

from __future__ import annotations

import jax
import numpy as np
import test_training
import tiny

from eagle3_jax.sampling import row_keys
from eagle3_jax.topology import Chain
from eagle3_jax.types import Draft, DraftSampling

VOCABULARY = 13
KNOWN = 5
DEPTH = test_training.STEPS
TEMPERATURES = (0.0, 0.6, 1.0, 1.7)
ROWS = 3 * len(TEMPERATURES)


def drafted() -> tuple[Draft, dict, np.ndarray, np.ndarray]:
    """Returns a sampled chain after ``KNOWN`` committed tokens, the head's parameters, and the tokens with features."""
    target = tiny.target(VOCABULARY)
    head = tiny.eagle3(target, Chain(DEPTH), draft_vocab_size=7, draft_sampling=DraftSampling.PROBABILISTIC)
    params = head.params | {"head": jax.tree.map(lambda leaf: 1.5 * leaf, head.params["head"])}
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY, (ROWS, KNOWN))
    root = rng.integers(0, VOCABULARY, ROWS)
    features = rng.normal(size=(ROWS, KNOWN, 3, 16)).astype(np.float32)
    seen = tiny.seen_of(tokens, features, [KNOWN] * ROWS, root)
    sampling = tiny.sampling_of([(temperature, 0, 1.0) for temperature in np.resize(TEMPERATURES, ROWS)])

    def propose(params, seen):
        state = head.drafter.observe(params, head.drafter.init(params, ROWS, 16), seen)
        return head.drafter.propose(params, state, row_keys(3, ROWS), sampling)

    draft = jax.jit(propose)(params, seen)
    return draft, params | {"drafter": head.drafter}, np.concatenate([tokens, root[:, None]], axis=1), features


def test_a_sampled_chain_declares_the_softmax_of_the_head_after_its_own_tokens() -> None:
    draft, params, known, features = drafted()
    ids = np.asarray(params["draft_to_target"])
    outside = np.setdiff1d(np.arange(VOCABULARY), ids)
    assert np.array_equal(draft.tokens[:, 0], known[:, -1])
    assert np.isin(draft.tokens[:, 1:], ids).all()
    assert draft.parents[0].tolist() == [-1, *range(DEPTH)]
    assert bool(draft.valid.all())
    for row in range(ROWS):
        temperature = TEMPERATURES[row % len(TEMPERATURES)]
        text = np.concatenate([known[row], np.asarray(draft.tokens[row, 1:])])  # as if the draft were the text
        padded = np.zeros((len(text), *features.shape[2:]))
        padded[:KNOWN] = features[row]
        steps = test_training.oracle_logits(
            params["drafter"], params["head"], params["embedding"], padded, text, np.ones(len(text), bool)
        )
        for depth, logits in enumerate(steps):
            scores = logits[KNOWN - 1]
            q = np.asarray(draft.probs[row, depth + 1], np.float64)
            assert not q[outside].any(), "mass on a token that the head does not have"
            if temperature == 0:
                expected = np.eye(len(ids))[scores.argmax()]
                assert draft.tokens[row, depth + 1] == ids[scores.argmax()]
            else:
                weights = np.exp((scores - scores.max()) / temperature)
                expected = weights / weights.sum()
            difference = np.abs(q[ids] - expected).max()
            assert difference < 2e-5, f"q at depth {depth + 1}, temperature {temperature}: off by {difference:.2g}"
