"""The losses of EAGLE-1 and MTP, and their gradients, compared with PyTorch.

PyTorch runs every row as one chain.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import tiny
from training_pair import frozen_of, make_batch

pytest.importorskip("torch")
from torch_heads import MTP, Eagle1, network

from eagle3_jax.conversion import rules
from eagle3_jax.conversion.heads import eagle1, mtp
from eagle3_jax.training.batches import TTTBatch
from eagle3_jax.training.methods import RECIPES, HeadOptions

pytestmark = pytest.mark.torch

TARGET = tiny.target(13, norm_eps=1e-5)
SIZE = 7
ROWS = 2
GEOMETRY = {"width": 16, "vocab": 13, "target_layers": 2}


def batch(key: jax.Array | None = None) -> TTTBatch:
    """Returns a ragged batch, supervised in part; without a key there is no noise."""
    ragged = make_batch(ROWS, SIZE, padding=(0, 2))
    return ragged.replace(loss_mask=ragged.loss_mask.at[:, 0].set(False), key=key)


def in_torch(
    method: str, drafter: Any, params: Any, batch: TTTBatch, num_steps: int
) -> tuple[float, np.ndarray]:
    """Returns the paper's loss and its gradient with respect to ``fc`` or ``eh_proj [D 2D]``."""
    import torch

    config = drafter.config
    is_eagle1 = method == "eagle1"
    table = eagle1.head_rules(config) if is_eagle1 else mtp.head_rules(config, "deepseek")
    stored = rules.write_params(table, params, drafter.param_shapes(), where="")
    weights = {
        name: torch.tensor(np.asarray(value), requires_grad=True) for name, value in stored.items()
    }
    head = Eagle1(**GEOMETRY, bias=False) if is_eagle1 else MTP(**GEOMETRY)
    run = network(head, weights)
    logits, states = map(np.asarray, tiny.forward(TARGET.model, TARGET.params, batch.tokens))
    label = torch.tensor(logits).softmax(-1)
    states = torch.tensor(states)
    tables = TARGET.model.tables(TARGET.params)
    embedding = torch.tensor(np.asarray(tables.embedding))
    matrix = torch.tensor(np.asarray(tables.unembedding))
    total = torch.zeros(())
    terms: dict[int, list[Any]] = {step: [] for step in range(num_steps)}
    for row in range(ROWS):
        tokens = torch.tensor(np.asarray(batch.tokens[row])).long()
        learn = np.asarray(batch.loss_mask[row])
        real = np.asarray(batch.attention_mask[row])
        for t in range(SIZE):
            stream = states[row, : t + 1]
            for step in range(num_steps):
                # Position of the last token that is read, and of the state that is imitated.
                end = t + 1 + step
                if end >= SIZE or not real[end]:
                    break
                out = run(embedding[tokens[1 : end + 1]], stream)[-1:]
                stream = torch.cat([stream, out])
                if learn[t + step]:
                    logits = (out @ matrix).log_softmax(-1)
                    term = -(label[row, end] * logits).sum()
                    if method == "eagle1":
                        term = 0.1 * term + torch.nn.functional.smooth_l1_loss(
                            out[0], states[row, end]
                        )
                    terms[step].append(term)
    for step, rows in terms.items():
        decay = 1.0 if method == "eagle1" else 0.8**step
        total = total + decay * sum(rows) / len(rows)
    total.backward()
    name = "fc.weight" if method == "eagle1" else "model.layers.2.eh_proj.weight"
    return float(total.detach()), weights[name].grad.numpy()


def prepared(method: str, depth: int) -> tuple[Any, Any, Any]:
    """Returns the drafter, its first parameters and the loss."""
    recipe = RECIPES[method]
    options = HeadOptions(depth=depth, mlp_width=24)
    drafter = recipe.drafter(
        recipe.config(TARGET.model.config, options), precision=TARGET.model.precision
    )
    params = recipe.start(drafter, TARGET, None, jax.random.key(1))
    loss = lambda params, batch: recipe.loss(
        drafter, TARGET.model, params, frozen_of(TARGET), batch, options
    )
    return drafter, params, loss


@pytest.mark.parametrize(("method", "depth"), [("eagle1", 2), ("mtp", 2)])
def test_a_loss_and_its_gradient_are_those_of_chains_in_torch(method: str, depth: int) -> None:
    drafter, params, loss = prepared(method, depth)
    # Attention and states have to depend on the text.
    params = jax.tree.map(lambda leaf: 1.5 * leaf, params)
    (value, metrics), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch())
    expected, slope = in_torch(method, drafter, params, batch(), depth)
    assert float(value) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient["fc"]["kernel"].T, slope, atol=2e-4 * np.abs(slope).max())
    assert {"simulated_tau", "accuracy_0", f"loss_{depth - 1}"} <= set(metrics)


def test_noise_is_on_the_inputs_of_an_eagle1_head_and_not_on_its_labels() -> None:
    _, params, loss = prepared("eagle1", 1)
    loss = jax.jit(loss)
    keys = (None, jax.random.key(1), jax.random.key(1), jax.random.key(2))
    plain, noisy, repeated, changed = (float(loss(params, batch(key=key))[0]) for key in keys)
    assert noisy == repeated != changed
    assert 0 < abs(noisy - plain) < 0.2 * plain
