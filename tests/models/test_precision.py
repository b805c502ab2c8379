"""Precisions and writes: float32 products ask for all bits; no two writes go to one slot."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle3_jax import cache as caches
from eagle3_jax import loop as loops
from eagle3_jax.cache import KeyValue, KeyValues
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, MIXED, Precision
from eagle3_jax.topology import Chain, DynamicTree
from eagle3_jax.tree import causal_mask

pytestmark = pytest.mark.bits

BATCH = [[1, 2, 3], [4, 5]]


def products(precision: Precision, topology: object = None) -> dict[str, set[str]]:
    """Returns the precisions of a generation's matrix products, by the types of operands."""
    target = tiny.target(13, precision=precision)
    loop, params = tiny.bind(target, tiny.eagle3(target, topology or Chain(2)))

    # By leaves: what `lower` tells of its arguments does not pass for the types of their fields.
    leaves, structure = jax.tree.flatten((params, tiny.prompts(BATCH, limit=4)))
    text = (
        jax.jit(
            lambda leaves: loops.generate(loop, *jax.tree.unflatten(structure, leaves), capacity=32)
        )
        .lower(leaves)
        .as_text()
    )

    precisions: dict[str, set[str]] = {}
    for line in text.splitlines():
        if "stablehlo.dot_general" in line:
            operands = re.findall(r"(?:x|<)(f32|bf16)>", line.partition(" : ")[2])[:2]
            match = re.search(r"precision = \[(\w+), (\w+)\]", line)
            precisions.setdefault(" ".join(operands), set()).add(
                " ".join(match.groups()) if match else "DEFAULT DEFAULT"
            )
    return precisions


@pytest.mark.parametrize("topology", [Chain(2), DynamicTree(num_nodes=6, max_depth=2, top_k=2)])
def test_every_product_of_float32_asks_for_all_of_its_bits(topology: object) -> None:
    """By default, GPUs of NVIDIA multiply in TensorFloat-32 and TPUs in bfloat16."""
    assert products(FLOAT32, topology) == {"f32 f32": {"HIGHEST HIGHEST"}}


def test_products_of_bfloat16_ask_for_nothing() -> None:
    assert products(BFLOAT16)["bf16 bf16"] == {"DEFAULT DEFAULT"}
    assert products(MIXED) == {"bf16 bf16": {"DEFAULT DEFAULT"}, "f32 f32": {"HIGHEST HIGHEST"}}


def test_who_tells_jax_a_precision_gets_that_one() -> None:
    with jax.default_matmul_precision("default"):
        assert products(FLOAT32) == {"f32 f32": {"DEFAULT DEFAULT"}}
    assert products(FLOAT32) == {"f32 f32": {"HIGHEST HIGHEST"}}


def test_the_gradient_asks_for_all_bits_too() -> None:
    target = tiny.target(13)
    fed = jnp.asarray(BATCH[:1], jnp.int32)
    positions = jnp.arange(fed.shape[1], dtype=jnp.int32)[None]

    def total(params: object) -> jax.Array:
        return jnp.sum(target.model(params, fed, positions, causal_mask(fed.shape[1])).final)

    text = jax.jit(jax.grad(total)).lower(target.params).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert lines
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in lines)


# ---------------------------------------------------------------- scattered writes


def block(rows: int, tokens: int, start: float) -> KeyValue:
    values = start + np.arange(rows * tokens, dtype=np.float32).reshape(rows, 1, tokens, 1)
    return KeyValue(jnp.asarray(values), jnp.asarray(-values))


@pytest.mark.parametrize("tokens", [1, 3])
def test_no_two_writes_of_a_row_go_to_the_same_slot_not_even_beyond_the_capacity(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    """The compiler may rely on this, and its behavior is undefined otherwise."""
    original = caches.scatter_tokens
    seen = []

    def scatter(buffer: jax.Array, slots: jax.Array, new: jax.Array) -> jax.Array:
        seen.append(np.asarray(slots))
        return original(buffer, slots, new)

    monkeypatch.setattr(caches, "scatter_tokens", scatter)
    for lengths in ([0, 4], [2, 3], [4, 4]):  # inside, at the edge, beyond
        layer = KeyValues.allocate(
            batch=2, capacity=4, num_kv_heads=1, head_dim=1, dtype=jnp.float32
        )
        length = jnp.asarray(lengths, jnp.int32)
        written = layer.write(block(2, tokens, 1.0), length)
        nodes = jnp.asarray([list(range(tokens))[::-1]] * 2, jnp.int32)
        for count in (0, 1, tokens):
            layer.commit(written, length, jnp.full((2,), count, jnp.int32), nodes)
    assert len(seen) == 3 * (2 + 3 * 2)
    for slots in seen:
        assert all(len(set(row)) == len(row) for row in slots.tolist())


def test_the_compiler_is_told_that_writes_never_meet() -> None:
    def write(new: KeyValue) -> KeyValue:
        layer = KeyValues.allocate(
            batch=2, capacity=4, num_kv_heads=1, head_dim=1, dtype=jnp.float32
        )
        return layer.write(new, jnp.zeros((2,), jnp.int32))

    for tokens in (1, 3):
        leaves = tuple(block(2, tokens, 0.0))
        text = (
            jax.jit(lambda keys, values: tuple(write(KeyValue(keys, values))))
            .lower(*leaves)
            .as_text()
        )
        # Keys and values call one function.
        assert text.count('"stablehlo.scatter"') == text.count("unique_indices = true") == 1
        assert text.count("call @scatter_tokens(") == 2


def test_a_single_write_at_and_beyond_the_edge_leaves_the_rest() -> None:
    """A single write is compiled as two, of which the second is always dropped."""
    for length, expected in ((3, [0, 0, 0, 5]), (4, [0, 0, 0, 0]), (7, [0, 0, 0, 0])):
        layer = KeyValues.allocate(
            batch=1, capacity=4, num_kv_heads=1, head_dim=1, dtype=jnp.float32
        )
        five = jnp.full((1, 1, 1, 1), 5.0)
        keys = layer.write(KeyValue(five, five), jnp.asarray([length], jnp.int32)).keys
        assert keys[0, 0, :, 0].tolist() == expected
