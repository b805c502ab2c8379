"""The sampled distribution of logits, against Hugging Face and against plain Python."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny

from eagle3_jax.devices import kernels
from eagle3_jax.sampling import probabilities
from eagle3_jax.types import SamplingMode

pytestmark = pytest.mark.core

SETTINGS = [
    (temperature, top_k, top_p)
    for temperature in (0.0, 0.5, 1.0, 2.0)
    for top_k in (0, 1, 5, 100)
    for top_p in (0.05, 0.8, 1.0)
]


def logits(seed: int = 0, tied: bool = False) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(len(SETTINGS), 3, 20)) * 2
    return (np.round(values) if tied else values).astype(np.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mode", [SamplingMode.TEMPERATURE, SamplingMode.TRUNCATED])
def test_probabilities_are_those_of_the_oracle_for_all_settings_in_one_batch(
    mode: SamplingMode, tied: bool
) -> None:
    """Without truncation a sampled row has neither top-k nor top-p; a greedy row ignores both."""
    is_read = lambda setting: (
        mode is SamplingMode.TRUNCATED or setting[0] == 0 or setting[1:] == (0, 1.0)
    )
    settings = list(filter(is_read, SETTINGS))
    values = logits(tied=tied)[: len(settings)]
    ours = np.asarray(probabilities(jnp.array(values), tiny.sampling_of(settings), mode))
    for row, setting in enumerate(settings):
        for node in range(3):
            np.testing.assert_allclose(
                ours[row, node], oracle.warped(values[row, node].tolist(), *setting), atol=2e-6
            )


@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True])
def test_probabilities_are_those_of_transformers(tied: bool) -> None:
    import torch
    from transformers.generation import logits_process as warpers

    values = logits(1, tied)
    ours = np.asarray(probabilities(jnp.array(values), tiny.sampling_of(SETTINGS)))
    for row, (temperature, top_k, top_p) in enumerate(SETTINGS):
        if temperature == 0:
            continue
        scores = warpers.TemperatureLogitsWarper(temperature)(None, torch.tensor(values[row]))
        if top_k:
            scores = warpers.TopKLogitsWarper(top_k)(None, scores)
        if top_p < 1:
            scores = warpers.TopPLogitsWarper(top_p)(None, scores)
        theirs = torch.softmax(scores, -1).numpy()
        # Which of several equal tokens falls at the edge of top-p is their sort's choice.
        if tied and top_p < 1:
            np.testing.assert_allclose(np.sort(ours[row]), np.sort(theirs), atol=2e-6)
        else:
            np.testing.assert_allclose(ours[row], theirs, atol=2e-6)


def test_half_precision_logits_become_float32_probabilities() -> None:
    params = tiny.sampling_of([(1.0, 0, 1.0)])
    probs = probabilities(jnp.array([[[0.0, -20.0]]], jnp.bfloat16), params)
    assert probs.dtype == jnp.float32
    assert float(probs[0, 0, 1]) == pytest.approx(np.exp(-20.0), rel=1e-5)


@pytest.mark.parametrize("size", [1, 7, 64, 65, 200])
def test_the_largest_of_pieces_is_the_largest(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in numpy, the first of equal values wins, and a NaN wins over all. GPUs use this form."""
    monkeypatch.setattr(kernels, "_ONE_KERNEL", 64)
    rows = np.random.default_rng(size).integers(-4, 4, (6, size)).astype(np.float32)
    # No distribution, and nothing but ties.
    rows[1] = -np.inf
    rows[2] = 3.0
    rows[3, size // 2 :] = np.nan
    rows[4, -1] = 9.0

    largest = kernels._largest_of_pieces(jnp.asarray(rows))
    np.testing.assert_array_equal(largest.index, rows.argmax(axis=-1))
    np.testing.assert_array_equal(largest.value, rows.max(axis=-1))

    # CPUs do not say where a NaN is.
    real = np.delete(rows, 3, axis=0)
    np.testing.assert_array_equal(
        kernels.largest(jnp.asarray(real)), (real.max(axis=-1), real.argmax(axis=-1))
    )
