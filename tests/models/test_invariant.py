"""Invariant decoding: a token's bits depend on earlier tokens only; its kernels are checked."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_targets
import tiny

import eagle3_jax as e3
from eagle3_jax import loop as loops
from eagle3_jax.cache import KeyValue
from eagle3_jax.drafters import NGram
from eagle3_jax.models import flash, invariant
from eagle3_jax.models.attention import Segment, attention
from eagle3_jax.models.config import (
    Experts,
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    RopeConfig,
    uniform,
)
from eagle3_jax.models.context import cache_mask
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import PRECISIONS, RMSNorm
from eagle3_jax.tree import causal_mask

PROMPT = 40
NEW = 18
# Rows, tokens of a block, slots of a cache; all are compared with one row, one token and 64 slots.
SHAPES = [(1, 3, 70), (1, 6, 192), (8, 1, 64), (8, 6, 128)]


def random(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


# ---------------------------------------------------------------- kernels for GPUs, interpreted


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("inputs", [0, 1], ids=["kernel", "table"])
@pytest.mark.parametrize(
    ("count", "width", "outputs"), [(1, 40, 24), (5, 1030, 130), (70, 128, 64), (9, 512, 256)]
)
def test_the_kernel_multiplies(
    count: int, width: int, outputs: int, inputs: int, dtype: Any
) -> None:
    """Sizes that no tile divides, several tiles of rows, and several splits of the inputs."""
    rows = random(0, count, width, dtype=dtype)
    kernel = random(1, width, outputs, dtype=dtype)
    stored = kernel.T if inputs == 1 else kernel
    actual = invariant.product_by_kernel(rows, stored, jnp.float32, inputs=inputs, interpret=True)
    expected = np.asarray(rows, np.float64) @ np.asarray(kernel, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * width**0.5)


def test_a_row_has_the_same_bits_among_any_rows() -> None:
    rows = random(0, 130, 600, dtype=jnp.bfloat16)
    kernel = random(1, 600, 100, dtype=jnp.bfloat16)
    multiply = functools.partial(
        invariant.product_by_kernel, kernel=kernel, dtype=jnp.bfloat16, interpret=True
    )
    together = multiply(rows)
    for start, end in ((0, 1), (5, 9), (60, 70), (129, 130)):
        np.testing.assert_array_equal(multiply(rows[start:end]), together[start:end])


@pytest.mark.parametrize("kind", ["plain", "float32", "zero-centred"])
@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_kernel_normalises(kind: Any, heads: int | None, dtype: Any) -> None:
    """Up to one rounding of the result, because its sum has another order."""
    norm = RMSNorm(72, 1e-5, kind, heads, invariant=True)
    norm.scale[...] = random(1, *norm.scale.shape)
    x = random(0, 2, 5, 3, 72, dtype=dtype)
    actual = invariant.norm(x, norm.factor(x), 1e-5, interpret=True)
    tolerance = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(
        np.asarray(actual, np.float32),
        np.asarray(norm(x), np.float32),
        rtol=2 * tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("tokens", [1, 6, 200])
def test_the_kernel_attends(tokens: int) -> None:
    """Also for a prompt of 200 tokens, which is run 128 queries at a time."""
    queries = random(0, 2, tokens, 6, 32)
    kv = KeyValue(random(1, 2, 2, 320, 32), random(2, 2, 2, 320, 32))
    length = jnp.array([0, 77], jnp.int32)
    visible = cache_mask(causal_mask(tokens), length, 320)
    expected = attention(queries, (Segment(kv, visible),))
    for seen in (None, visible):
        actual = flash.invariant_attention(
            queries, kv, seen, length, size=tokens, scale=32**-0.5, interpret=True
        )
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)


def test_a_query_has_the_same_bits_in_any_block_batch_and_cache() -> None:
    kv = KeyValue(
        random(1, 4, 2, 256, 16, dtype=jnp.bfloat16), random(2, 4, 2, 256, 16, dtype=jnp.bfloat16)
    )
    queries = random(0, 4, 12, 4, 16, dtype=jnp.bfloat16)

    def attended(rows: int, first: int, end: int, slots: int) -> np.ndarray:
        cut = KeyValue(*(buffer[:rows, :, :slots] for buffer in kv))
        length = jnp.full((rows,), 100 + first, jnp.int32)
        options = {"size": end - first, "scale": 0.25, "interpret": True}
        return np.asarray(
            flash.invariant_attention(queries[:rows, first:end], cut, None, length, **options)
        )

    together = attended(4, 0, 12, 256)
    for rows, first, end, slots in (
        (1, 0, 1, 128),
        (1, 3, 9, 192),
        (2, 11, 12, 256),
        (4, 4, 10, 128),
    ):
        np.testing.assert_array_equal(attended(rows, first, end, slots), together[:rows, first:end])


# ---------------------------------------------------------------- targets on a CPU


def target_of(dtype: str, kind: str) -> e3.LoadedTarget:
    """A random target that has other bits in blocks or batches without invariance.

    This was seen for each of the cases below.

    XLA has other kernels for one query head of a key head, and in bfloat16 for two; roundings to
    bfloat16 hide most of it in small layers.
    """
    heads = {"one head": (2, 2), "pairs": (4, 2)}.get(kind, (6, 2))
    channels = 64 if kind == "pairs" else 32
    options: dict[str, Any] = {"rope": RopeConfig(theta=1e4)}
    if kind == "norms":
        options |= {"qk_norm": True, "qkv_bias": True, "window": 24, "softcap": 20.0}

    mixer = GroupedQuery(num_heads=heads[0], num_kv_heads=heads[1], head_dim=channels, **options)
    precision = PRECISIONS["float32" if dtype == "int8" else dtype]
    layers = uniform(2, mixer, GatedMLP(width=704 if kind == "pairs" else 160))
    width = 256 if kind == "pairs" else 96
    target = tiny.target(
        61, width=width, layers=layers, tie_embeddings=kind == "pairs", precision=precision
    )

    return random_targets.in_eight_bits(target, "int8") if dtype == "int8" else target


def bits_of(
    target: e3.LoadedTarget, model: DecoderTarget, texts: np.ndarray, *, size: int, capacity: int
) -> list[np.ndarray]:
    """Logits of the last tokens of every text, and all keys and values.

    ``size`` tokens at a time, after a prompt.
    """
    logits, cache = tiny.in_blocks(
        model, target.params, texts, prompt=PROMPT, size=size, capacity=capacity
    )
    return [
        logits,
        *(np.asarray(leaf)[:, :, : PROMPT + NEW] for leaf in jax.tree.leaves(cache.layers)),
    ]


@pytest.mark.bits
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", "one head"),
        ("bfloat16", "pairs"),
        ("mixed", "norms"),
        ("int8", "one head"),
    ],
)
def test_bits_do_not_depend_on_blocks_batches_and_caches(dtype: str, kind: str) -> None:
    """One token at a time has the bits of blocks, of batches and of larger caches.

    In logits, keys and values.
    """
    target = target_of(dtype, kind)
    model = target.model.invariant(target.weights)
    texts = np.random.default_rng(0).integers(0, 61, (8, PROMPT + NEW)).astype(np.int32)
    single = bits_of(target, model, texts[:1], size=1, capacity=64)
    for rows, size, capacity in SHAPES:
        together = bits_of(target, model, texts[:rows], size=size, capacity=capacity)
        for ours, theirs in zip(together, single, strict=True):
            np.testing.assert_array_equal(
                ours[:1], theirs, err_msg=f"{rows} rows, {size} tokens, {capacity} slots"
            )


@pytest.mark.bits
@pytest.mark.parametrize("size", [7, 64])
def test_a_prompt_in_chunks_has_the_bits_of_the_whole(size: int) -> None:
    """Prompts of 33 and 20 tokens, also in chunks that end in padding."""
    target = target_of("bfloat16", "norms")
    head = tiny.eagle3(target)
    decoder = e3.SpeculativeDecoder(target, head, num_speculative_tokens=3, invariant=True)

    texts = np.random.default_rng(1).integers(0, 61, 33).tolist()
    loop, prompts, rows = decoder.batch([texts, texts[:20]], 8, None, 0, None)

    unchunked = loops.prefill(loop, decoder.params, prompts, capacity=64)
    state = loops.empty(loop, decoder.params, prompts, capacity=64)
    length = jnp.array([len(row) for row in rows], jnp.int32)
    for _ in range(-(-33 // size)):
        state = loops.extend(loop, decoder.params, state, length, size=size)

    for ours, theirs in zip(
        jax.tree.leaves(state.cache.layers), jax.tree.leaves(unchunked.cache.layers), strict=True
    ):
        for row, end in enumerate((33, 20)):
            np.testing.assert_array_equal(ours[row, :, :end], theirs[row, :, :end])

    np.testing.assert_array_equal(state.tokens[:, :34], unchunked.tokens[:, :34])


@pytest.mark.bits
def test_texts_are_those_of_plain_decoding() -> None:
    """Of the shipped pair in bfloat16: a chain in a batch, and n-grams alone."""
    target = e3.load_target(dtype="bfloat16")
    head = e3.load_drafter(target=target)
    prompts = ["def fibonacci(n):", "import os\n", "class Stack:\n    def", "for i in range("]
    generate = lambda decoder, prompts: decoder.generate(prompts, max_new_tokens=24).rows[0]
    expected = generate(e3.SpeculativeDecoder(target, invariant=True), prompts[:1])
    chain = e3.SpeculativeDecoder(target, head, num_speculative_tokens=5, invariant=True)
    lookup = e3.SpeculativeDecoder(target, NGram(), invariant=True)
    assert chain.invariant and not e3.SpeculativeDecoder(target, head).invariant
    for row in (generate(chain, prompts), generate(lookup, prompts[:1])):
        assert row.stats.num_accepted_tokens > 0
        assert row.tokens == expected.tokens


# ---------------------------------------------------------------- refusals


EXPERTS = Experts(num_experts=4, per_token=2, width=8, router="softmax")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            LayerConfig(
                mixer=tiny.layers(1)[0].mixer,
                mlp=Experts(num_experts=4, per_token=2, width=8, router="softmax"),
            ),
            "Experts",
        ),
        (tiny.layers(1, sinks=True)[0], "without sinks"),
    ],
)
def test_layers_whose_rows_depend_on_each_other_are_refused(
    layer: LayerConfig, message: str
) -> None:
    target = tiny.target(layers=(layer, layer))
    with pytest.raises(ValueError, match=f"layer 0 has .*{message}"):
        e3.SpeculativeDecoder(target, invariant=True)


def test_trees_meshes_and_fp8_are_refused() -> None:
    target = tiny.target()
    head = tiny.eagle3(target)

    with pytest.raises(ValueError, match="with a tree"):
        e3.SpeculativeDecoder(
            target, head, tree=e3.DynamicTree(num_nodes=4, max_depth=2, top_k=2), invariant=True
        )
    with pytest.raises(ValueError, match="for a mesh"):
        e3.SpeculativeDecoder(target, mesh=e3.make_mesh("data=1"), invariant=True)
    with pytest.raises(ValueError, match="weights are fp8"):
        e3.SpeculativeDecoder(random_targets.in_eight_bits(target, "fp8"), invariant=True)

    model = target.model.invariant()
    cache = model.init_cache(1, 64)
    token = jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="is a tree"):
        model(target.params, token, token, causal_mask(1), cache)
