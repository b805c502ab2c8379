"""Attention and embedding against their definitions, and the compiled programs of both."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax
from tiny import draw

from eagle3_jax.cache import KeyValue
from eagle3_jax.models.attention import Segment, attention
from eagle3_jax.models.config import GatedMLP, GroupedQuery, LayerConfig
from eagle3_jax.models.layers import (
    BFLOAT16,
    FLOAT32,
    MIXED,
    Precision,
    _normalise_by_sum,
    embed,
    normalised,
)

BATCH = 2
FED = 3
HEADS = 4
KV_HEADS = 2
SIZE = 8
LAYER = LayerConfig(
    mixer=GroupedQuery(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=SIZE), mlp=GatedMLP(width=4)
)


def dense(
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Computes ``softmax(q kᵀ / √H) v`` in float64, a query and a head at a time."""
    out = np.zeros(queries.shape)
    for row, token, head in np.ndindex(*queries.shape[:3]):
        kv_head = head // (HEADS // KV_HEADS)
        seen = np.flatnonzero(mask[row, token])
        scores = (
            keys[row, kv_head, seen].astype(np.float64) @ queries[row, token, head] / np.sqrt(SIZE)
        )
        out[row, token, head] = softmax(scores) @ values[row, kv_head, seen]
    return out.reshape(*queries.shape[:2], -1)


def test_attention_over_several_runs_is_one_softmax_over_all_of_them() -> None:
    queries = draw(0, BATCH, FED, HEADS, SIZE)
    rng = np.random.default_rng(1)

    runs = [
        (draw(2 * i + 2, BATCH, KV_HEADS, n, SIZE), draw(2 * i + 3, BATCH, KV_HEADS, n, SIZE))
        for i, n in enumerate((5, 2))
    ]
    masks = [rng.random((BATCH, FED, n)) < 0.6 for n in (5, 2)]
    masks[0][:, :, 0] = True
    self_kv = (draw(8, BATCH, KV_HEADS, FED, SIZE), draw(9, BATCH, KV_HEADS, FED, SIZE))

    as_kv = lambda pair: KeyValue(*map(jnp.asarray, pair))
    segments = [Segment(as_kv(kv), jnp.asarray(mask)) for kv, mask in zip(runs, masks, strict=True)]
    ours = attention(jnp.asarray(queries), segments, [as_kv(self_kv)])

    keys, values = (np.concatenate([*(kv[i] for kv in runs), self_kv[i]], axis=2) for i in (0, 1))
    diagonal = np.broadcast_to(np.eye(FED, dtype=bool), (BATCH, FED, FED))
    expected = dense(queries, keys, values, np.concatenate([*masks, diagonal], axis=2))
    np.testing.assert_allclose(ours, expected, atol=2e-6)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    queries = 100 * draw(0, BATCH, FED, HEADS, SIZE)
    keys = 100 * draw(1, BATCH, KV_HEADS, 6, SIZE)
    values = draw(2, BATCH, KV_HEADS, 6, SIZE)
    mask = np.ones((BATCH, FED, 6), bool)
    kv = KeyValue(jnp.asarray(keys), jnp.asarray(values))
    ours = attention(jnp.asarray(queries), [Segment(kv, jnp.asarray(mask))])
    np.testing.assert_allclose(ours, dense(queries, keys, values, mask), atol=1e-4)


def test_a_query_that_sees_nothing_is_finite() -> None:
    kv = KeyValue(
        jnp.asarray(draw(1, BATCH, KV_HEADS, 4, SIZE)),
        jnp.asarray(draw(2, BATCH, KV_HEADS, 4, SIZE)),
    )
    nothing = jnp.zeros((BATCH, FED, 4), bool)
    assert np.isfinite(
        attention(jnp.asarray(draw(0, BATCH, FED, HEADS, SIZE)), [Segment(kv, nothing)])
    ).all()


@pytest.mark.parametrize("precision", [FLOAT32, MIXED, BFLOAT16], ids=lambda p: p.name)
def test_embedding_takes_rows_and_widens_no_table(precision: Precision) -> None:
    table = jnp.asarray(draw(0, 977, 16)).astype(precision.operands)
    tokens = jnp.asarray([[3, 976, 3], [0, 1, 2]])
    run = jax.jit(lambda table, tokens: embed(table, tokens, precision))
    assert run(table, tokens).dtype == precision.activations
    assert np.array_equal(run(table, tokens), table[tokens].astype(precision.activations))
    if table.dtype == jnp.bfloat16:
        assert not re.search(r"f32\[977,16\]", run.lower(table, tokens).compile().as_text())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_embedding_has_the_gradient_of_a_lookup(dtype: jnp.dtype) -> None:
    table = jnp.asarray(draw(0, 7, 3)).astype(dtype)
    tokens = jnp.asarray([[1, 2, 1]])
    loss = lambda look: lambda table: jnp.sum(look(table).astype(jnp.float32) ** 2)
    ours = jax.grad(loss(lambda table: embed(table, tokens, FLOAT32)))(table)
    theirs = jax.grad(loss(lambda table: table[tokens]))(table)
    assert ours.dtype == dtype
    assert float(jnp.abs(theirs).max()) > 0
    assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("size", [1.0, 1e-3, 1e4])
def test_a_norm_of_one_row_is_its_definition(size: float) -> None:
    """Tests the forms of GPUs and of other devices; at 1e-3 the constant is as large as the row."""
    x = size * draw(0, 1, 1, 4096)
    eps = 1e-6
    expected = x / np.sqrt(np.mean(x.astype(np.float64) ** 2) + eps)
    for out in (_normalise_by_sum(jnp.asarray(x), eps=eps), normalised(jnp.asarray(x), eps)):
        np.testing.assert_allclose(out, expected, rtol=2**-21)
