"""The loss of Medusa heads by hand, and their first parameters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from scipy.special import log_softmax
from training_pair import frozen_of, tau_of

from eagle3_jax.drafters import MedusaDrafter
from eagle3_jax.training.batches import TTTBatch
from eagle3_jax.training.methods import RECIPES, HeadOptions

TARGET = tiny.target(13)
MEDUSA = RECIPES["medusa"]


@pytest.mark.parametrize("shared", [False, True])
def test_the_loss_is_that_of_the_paper_row_by_row(shared: bool) -> None:
    ids = np.array([0, 2, 3, 5, 8, 9, 12]) if shared else np.arange(13)
    options = HeadOptions(depth=3, num_layers=2, draft_vocab_size=len(ids) if shared else None)
    drafter = MedusaDrafter(MEDUSA.config(TARGET.model.config, options))
    assert drafter.config.shared_output == shared
    head = jax.tree.map(lambda leaf: 0.5 * leaf + 0.1, drafter.init_params(jax.random.key(3)))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 13, (2, 30))
    real = np.ones((2, 30), bool)
    real[1, 25:] = False
    learn = real & (rng.random((2, 30)) > 0.1)
    batch = TTTBatch(
        tokens=jnp.array(tokens, jnp.int32),
        attention_mask=jnp.array(real),
        loss_mask=jnp.array(learn),
    )
    objective = jax.jit(functools.partial(MEDUSA.loss, drafter, TARGET.model, options=options))
    loss, metrics = objective(head, frozen_of(TARGET, jnp.array(ids)), batch)

    states = np.asarray(tiny.forward(TARGET.model, TARGET.params, batch.tokens)[1], np.float64)
    total = 0.0
    hits: list[dict[tuple[int, ...], bool]] = [{} for _ in range(3)]
    for k in range(3):
        terms = []
        for row, t in np.ndindex(2, 30):
            last = t + 2 + k
            labelled = last < 30 and real[row, last] and learn[row, t + k]
            z = states[row, t]
            for layer in (0, 1):
                linear = head["blocks"][k]["layers"][layer]
                y = z @ np.asarray(linear["kernel"], np.float64) + np.asarray(linear["bias"])
                z = z + y / (1 + np.exp(-y))
            output = head["outputs"][0 if shared else k]
            scores = z @ np.asarray(output["kernel"], np.float64)
            if not labelled:
                continue
            hits[k][row, t] = ids[scores.argmax()] == tokens[row, last]
            if tokens[row, last] in ids:
                draft_id = list(ids).index(tokens[row, last])
                terms.append(-log_softmax(scores)[draft_id])
        total += 0.8**k * np.mean(terms)
        assert float(metrics[f"loss_{k}"]) == pytest.approx(np.mean(terms), rel=1e-5)
        assert float(metrics[f"accuracy_{k}"]) == pytest.approx(np.mean(list(hits[k].values())))
    assert float(loss) == pytest.approx(total, rel=1e-5)
    assert 1 < float(metrics["simulated_tau"]) == pytest.approx(tau_of(hits))


def test_untrained_heads_have_the_logits_of_the_target() -> None:
    drafter = MedusaDrafter(MEDUSA.config(TARGET.model.config, HeadOptions(depth=2)))
    heads = drafter.bind({"head": MEDUSA.start(drafter, TARGET, None, jax.random.key(0))})
    states = jax.random.normal(jax.random.key(0), (3, 16))
    logits = heads(states, 2)
    for head in (0, 1):
        assert np.allclose(
            logits[:, head], TARGET.model.unembed(TARGET.params, states), rtol=1e-5, atol=1e-4
        )
