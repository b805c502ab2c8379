"""The sampled distribution of logits, against Hugging Face and against plain Python."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import tiny

from eagle3_jax.devices import kernels
from eagle3_jax.sampling import keys_at, probabilities, row_keys, uniforms
from eagle3_jax.types import SamplingMode

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
def test_probabilities_are_those_of_the_oracle_for_all_settings_in_one_batch(tied: bool) -> None:
    values = logits(tied=tied)
    ours = np.asarray(probabilities(jnp.array(values), tiny.sampling_of(SETTINGS)))
    for row, setting in enumerate(SETTINGS):
        for node in range(3):
            np.testing.assert_allclose(ours[row, node], oracle.warped(values[row, node].tolist(), *setting), atol=2e-6)


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
        if tied and top_p < 1:  # which of several equal tokens falls at the edge of top-p is their sort's choice
            np.testing.assert_allclose(np.sort(ours[row]), np.sort(theirs), atol=2e-6)
        else:
            np.testing.assert_allclose(ours[row], theirs, atol=2e-6)


def test_ties_at_the_edge_of_top_p_keep_the_lower_ids() -> None:
    sampling = tiny.sampling_of([(1.0, 0, 0.45)])
    probs = np.asarray(probabilities(jnp.zeros((1, 1, 4)), sampling))
    assert np.flatnonzero(probs[0, 0]).tolist() == [0, 1]


def test_a_greedy_row_is_a_point_mass_on_the_lowest_of_tied_maxima() -> None:
    greedy = tiny.sampling_of([(0.0, 0, 1.0)])
    for sampling_mode in (SamplingMode.TEMPERATURE, SamplingMode.TRUNCATED):
        probs = probabilities(jnp.array([[[1.0, 3.0, 3.0]]]), greedy, sampling_mode)
        assert probs[0, 0].tolist() == [0.0, 1.0, 0.0]


def test_skipping_the_sort_changes_nothing_when_no_row_truncates() -> None:
    params = tiny.sampling_of([(0.0, 3, 0.1), (0.7, 0, 1.0), (1.0, 0, 1.0)])
    values = jnp.array(logits()[:3])
    plain, sorted_ = (
        probabilities(values, params, mode) for mode in (SamplingMode.TEMPERATURE, SamplingMode.TRUNCATED)
    )
    np.testing.assert_allclose(plain, sorted_, atol=1e-6)


def test_half_precision_logits_become_float32_probabilities() -> None:
    params = tiny.sampling_of([(1.0, 0, 1.0)])
    probs = probabilities(jnp.array([[[0.0, -20.0]]], jnp.bfloat16), params)
    assert probs.dtype == jnp.float32
    assert float(probs[0, 0, 1]) == pytest.approx(np.exp(-20.0), rel=1e-5)


def test_randomness_differs_by_row_position_and_purpose() -> None:
    keys = row_keys(0, 3)
    at = lambda position, purpose: uniforms(keys_at(keys, jnp.full(3, position, jnp.int32), purpose), 2)
    uses = ((4, 0), (4, 1), (5, 0), (5, 1))
    values = np.concatenate([np.asarray(at(*use)).ravel() for use in uses])
    assert len(set(values.tolist())) == values.size
    assert ((values >= 0) & (values < 1)).all()
    second_key = jax.tree.map(lambda k: k[1:2], keys)
    single_row = uniforms(keys_at(second_key, jnp.array([4], jnp.int32), 0), 2)
    assert np.array_equal(single_row[0], at(4, 0)[1])


@pytest.mark.parametrize("size", [1, 7, 64, 65, 200])
def test_the_largest_of_pieces_is_the_largest(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in numpy, the first of equal values wins, and a NaN wins over all. GPUs use this form."""
    monkeypatch.setattr(kernels, "_ONE_KERNEL", 64)
    rows = np.random.default_rng(size).integers(-4, 4, (6, size)).astype(np.float32)
    # no distribution, and nothing but ties
    rows[1] = -np.inf
    rows[2] = 3.0
    rows[3, size // 2 :] = np.nan
    rows[4, -1] = 9.0
    largest = kernels._largest_of_pieces(jnp.asarray(rows))
    np.testing.assert_array_equal(largest.index, rows.argmax(axis=-1))
    np.testing.assert_array_equal(largest.value, rows.max(axis=-1))
    real = np.delete(rows, 3, axis=0)  # CPUs do not say where a NaN is
    np.testing.assert_array_equal(kernels.largest(jnp.asarray(real)), (real.max(axis=-1), real.argmax(axis=-1)))
