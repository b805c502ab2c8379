"""The loss of Medusa heads by hand, and that it teaches them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import SpeculativeDecoder
from eagle3_jax.decode import LoadedDrafter
from eagle3_jax.drafters import MedusaDrafter
from eagle3_jax.models.decoder import causal_mask
from eagle3_jax.training.medusa import MedusaOptions, heads_of, initial_heads, medusa_loss
from eagle3_jax.training.ttt import TTTBatch

TARGET = tiny.target(13)


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return scores - scores.max() - np.log(np.exp(scores - scores.max()).sum())


@pytest.mark.parametrize("shared", [False, True])
def test_the_loss_is_that_of_the_paper_row_by_row(shared: bool) -> None:
    options = MedusaOptions(num_heads=3, num_layers=2, shared_output=shared, decay=0.7)
    ids = np.array([0, 2, 3, 5, 8, 9, 12])
    drafter = MedusaDrafter(heads_of(TARGET.model.config, len(ids), options))
    head = jax.tree.map(lambda leaf: 0.5 * leaf + 0.1, drafter.init_params(jax.random.key(3)))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 13, (2, 9))
    real = np.ones((2, 9), bool)
    real[1, 7:] = False
    learn = real & (rng.random((2, 9)) > 0.2)
    batch = TTTBatch(tokens=jnp.array(tokens, jnp.int32), attention_mask=jnp.array(real), loss_mask=jnp.array(learn))
    frozen = {
        "target_params": TARGET.params,
        "embedding": TARGET.params["embedding"],
        "draft_to_target": jnp.array(ids),
    }
    loss, metrics = jax.jit(functools.partial(medusa_loss, drafter, TARGET.model, options=options))(head, frozen, batch)

    positions = jnp.broadcast_to(jnp.arange(9), (2, 9))
    states = np.asarray(TARGET.model(TARGET.params, batch.tokens, positions, causal_mask(9)).final, np.float64)
    total, tau, chains = 0.0, 1.0, {(row, t): True for row in range(2) for t in range(9)}
    for k in range(3):
        terms, hits, alive = [], [], []
        for row, t in np.ndindex(2, 9):
            last = t + 2 + k
            labelled = last < 9 and real[row, last] and learn[row, t + k]
            z = states[row, t]
            for layer in (0, 1):
                linear = head["blocks"][k]["layers"][layer]
                y = z @ np.asarray(linear["kernel"], np.float64) + np.asarray(linear["bias"])
                z = z + y / (1 + np.exp(-y))
            scores = z @ np.asarray(head["outputs"][0 if shared else k]["kernel"], np.float64)
            if not labelled:
                chains.pop((row, t), None)
                continue
            hit = ids[scores.argmax()] == tokens[row, last]
            hits.append(hit)
            if tokens[row, last] in ids:
                terms.append(-log_softmax(scores)[list(ids).index(tokens[row, last])])
            if (row, t) in chains:
                chains[row, t] &= bool(hit)
                alive.append(chains[row, t])
        total += 0.7**k * np.mean(terms)
        tau += np.mean(alive)
        assert float(metrics[f"loss_{k}"]) == pytest.approx(np.mean(terms), rel=1e-5)
        assert float(metrics[f"accuracy_{k}"]) == pytest.approx(np.mean(hits))
    assert float(loss) == pytest.approx(total, rel=1e-5)
    assert float(metrics["simulated_tau"]) == pytest.approx(tau)


def test_untrained_heads_say_what_the_targets_output_layer_says() -> None:
    drafter = MedusaDrafter(heads_of(TARGET.model.config, 13, MedusaOptions(num_heads=2)))
    tables = TARGET.model.tables(TARGET.params)
    heads = drafter.bound({"head": initial_heads(drafter, tables.unembedding, None)})
    states = jax.random.normal(jax.random.key(0), (3, 16))
    logits = heads(states, 2)
    for head in (0, 1):
        assert np.allclose(logits[:, head], TARGET.model.unembed(TARGET.params, states), rtol=1e-5, atol=1e-4)


def test_the_loss_falls_and_more_is_accepted() -> None:
    """On the target's own greedy text, memorised: two heads, 120 steps of plain gradient descent with momentum."""
    import optax

    prompts = tiny.random_prompts(24, 13, seed=2, low=2, high=5)
    texts = SpeculativeDecoder(TARGET).generate(prompts, max_new_tokens=20).tokens
    rows = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    width = max(map(len, rows))
    tokens, real = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for row, text in enumerate(rows):
        tokens[row, : len(text)], real[row, : len(text)] = text, True
    batch = TTTBatch(tokens=jnp.array(tokens), attention_mask=jnp.array(real), loss_mask=jnp.array(real))
    options = MedusaOptions(num_heads=2)
    drafter = MedusaDrafter(heads_of(TARGET.model.config, 13, options))
    tables = TARGET.model.tables(TARGET.params)
    frozen = {"target_params": TARGET.params, "embedding": tables.embedding, "draft_to_target": jnp.arange(13)}
    optimizer = optax.adam(1e-2)

    @jax.jit
    def train(params):
        def step(carry, _):
            params, state = carry
            grad = jax.value_and_grad(functools.partial(medusa_loss, drafter, TARGET.model), has_aux=True)
            (loss, metrics), slope = grad(params, frozen, batch, options)
            updates, state = optimizer.update(slope, state)
            return (optax.apply_updates(params, updates), state), (loss, metrics["simulated_tau"])

        return jax.lax.scan(step, (params, optimizer.init(params)), length=120)

    start = initial_heads(drafter, tables.unembedding, None)
    (params, _), (losses, taus) = train(start)
    assert losses[-1] < 0.5 * losses[0] and taus[-1] > taus[0] + 0.3, (losses[::20], taus[::20])

    def accepted(head) -> float:
        of = LoadedDrafter(drafter, drafter.assemble(head, tables))
        stats = SpeculativeDecoder(TARGET, of).generate(prompts, max_new_tokens=20).stats
        return stats.mean_acceptance_length

    assert accepted(params) > accepted(start) + 0.3
