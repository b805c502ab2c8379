"""The cache against a Python list per row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.cache import Cache, KeyValue, KeyValues
from eagle3_jax.models.context import cache_mask

pytestmark = pytest.mark.core

BATCH = 4
CAPACITY = 10
LAYERS = 2
HEADS = 1
SIZE = 2


def block(seed: int, fed: int) -> tuple[KeyValue, ...]:
    rng = np.random.default_rng(seed)
    draw = lambda size: jnp.array(rng.normal(size=(BATCH, HEADS, fed, size)), jnp.float32)
    # Values may be narrower, as in MLA.
    return tuple(KeyValue(draw(SIZE), draw(SIZE - 1)) for _ in range(LAYERS))


def empty() -> Cache:
    layer = KeyValues.allocate(
        batch=BATCH,
        capacity=CAPACITY,
        num_kv_heads=HEADS,
        head_dim=SIZE,
        value_dim=SIZE - 1,
        dtype=jnp.float32,
    )
    return Cache.of((layer,) * LAYERS, batch=BATCH)


def commit(
    cache: Cache, new: tuple[KeyValue, ...], count: list[int], nodes: np.ndarray | None = None
) -> Cache:
    written = tuple(
        layer.write(block, cache.length) for layer, block in zip(cache.layers, new, strict=True)
    )
    return cache.commit(
        written, jnp.array(count, jnp.int32), None if nodes is None else jnp.array(nodes, jnp.int32)
    )


def test_commits_append_the_chosen_tokens_of_each_row_in_order() -> None:
    """The first round commits nodes in order. Every round commits nothing in some row."""
    cache = empty()
    rows: list[list[list[np.ndarray]]] = [[] for _ in range(BATCH)]
    rng = np.random.default_rng(0)

    for round_, count in enumerate(([3, 2, 1, 0], [0, 2, 0, 1], [3, 0, 0, 4])):
        fed = max(count)
        new = block(round_, fed)
        nodes = np.stack([rng.permutation(fed) for _ in range(BATCH)]) if round_ else None
        cache = commit(cache, new, count, nodes)
        chosen = np.tile(np.arange(fed), (BATCH, 1)) if nodes is None else nodes
        for row in range(BATCH):
            for node in chosen[row, : count[row]]:
                rows[row].append([np.asarray(leaf)[row, :, node] for leaf in jax.tree.leaves(new)])

    assert cache.length.tolist() == [len(tokens) for tokens in rows]
    for row, tokens in enumerate(rows):
        for leaf, expected in zip(
            jax.tree.leaves(cache.layers), zip(*tokens, strict=True), strict=True
        ):
            assert np.array_equal(leaf[row, :, : len(tokens)], np.stack(expected, axis=1))


def test_tokens_past_the_capacity_are_dropped_and_overwrite_nothing() -> None:
    full = commit(empty(), block(0, CAPACITY - 1), [CAPACITY - 1] * BATCH)
    for nodes in (None, np.tile(np.arange(3), (BATCH, 1))):
        over = commit(full, block(1, 3), [3] * BATCH, nodes)
        old = full.layers[0].keys
        new = over.layers[0].keys
        written = block(1, 3)[0].keys
        assert np.array_equal(old[:, :, :-1], new[:, :, :-1])
        assert np.array_equal(new[:, :, -1], written[:, :, 0])


def test_a_block_sees_what_is_committed_and_of_itself_what_its_mask_says() -> None:
    cache = commit(empty(), block(0, 3), [3, 2, 1, 0])
    mask = np.random.default_rng(0).random((BATCH, 4, 4)) < 0.5

    for block_mask in (mask, mask[:1]):
        seen = np.asarray(cache_mask(jnp.asarray(block_mask), cache.length, CAPACITY))
        for row, length in enumerate((3, 2, 1, 0)):
            row_mask = block_mask[row % len(block_mask)]
            for token in range(4):
                expected = (
                    [True] * length + row_mask[token].tolist() + [False] * (CAPACITY - length - 4)
                )
                assert seen[row, token].tolist() == expected
        # A level of a tree asks for the last tokens of a block alone.
        assert np.array_equal(
            cache_mask(jnp.asarray(block_mask[:, 2:]), cache.length, CAPACITY), seen[:, 2:]
        )
