"""Weights in int8: products of integers, rotated kernels, published W8A8 files, and tied tables."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_targets
import tiny
from quantised import LAYERS, plain, written
from scipy.linalg import hadamard

import eagle3_jax as e3
from eagle3_jax.conversion.tensors import read_tensors
from eagle3_jax.models.config import GatedMLP, GroupedQuery, RopeConfig, uniform
from eagle3_jax.models.layers import FLOAT32, MIXED, embed, product, product_by_table
from eagle3_jax.models.quantised import Int8Kernel, int8_product, quantise_int8


def whole_rotation(inputs: int, size: int) -> np.ndarray:
    """Returns blocks of an orthogonal Hadamard matrix, in float64."""
    return np.kron(np.eye(inputs // size), hadamard(size) / size**0.5)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("is_table", [False, True], ids=["kernel", "table"])
def test_a_product_is_that_of_integers(rows: int, is_table: bool) -> None:
    """Compares with integers of any size: sums are exact, and scales are multiplied afterwards."""
    random = np.random.default_rng(rows)
    inputs = 40
    outputs = 24

    values = random.integers(
        -128, 128, (outputs, inputs) if is_table else (inputs, outputs)
    ).astype(np.int8)
    scale = random.uniform(0.001, 0.1, outputs).astype(np.float32)
    kernel = Int8Kernel(values=jnp.asarray(values), scale=jnp.asarray(scale), is_table=is_table)

    x = random.normal(0, 1, (rows, inputs)).astype(np.float32) * np.float32(30)
    x[-1] = 0  # a row of zeros, which has no scale of its own

    largest = np.abs(x).max(1, keepdims=True)
    of_row = np.where(largest > 0, largest / np.float32(127), np.float32(1))
    integers = np.rint(x / of_row).astype(np.int64)
    sums = integers @ (values.T if is_table else values).astype(np.int64)
    expected = sums.astype(np.float32) * of_row * scale

    np.testing.assert_array_equal(np.asarray(int8_product(jnp.asarray(x), kernel)), expected)


@pytest.mark.parametrize("inputs", [24, 64, 192], ids=["blocks of 8", "one block", "three blocks"])
@pytest.mark.parametrize("is_table", [False, True], ids=["kernel", "table"])
def test_a_rotated_kernel_is_nearest_to_the_rotated_matrix(inputs: int, is_table: bool) -> None:
    random = np.random.default_rng(0)
    outputs = 20
    weights = random.normal(0, 1, (inputs, outputs)).astype(np.float32)
    weights[:, 3] = 0
    kernel = quantise_int8(weights.T if is_table else weights, is_table=is_table)

    assert kernel.rotation == (8 if inputs == 24 else 64)
    rotated = whole_rotation(inputs, kernel.rotation) @ weights

    scale = np.asarray(kernel.scale)
    values = np.asarray(kernel.values).T if is_table else np.asarray(kernel.values)
    np.testing.assert_allclose(
        scale, np.where(rotated.any(0), np.abs(rotated).max(0) / 127, 1), rtol=1e-6
    )

    assert np.abs(rotated / scale - values).max() <= 0.5 + 1e-4
    assert set(np.abs(values).max(0)) == {127, 0}

    dense = np.asarray(kernel.dense(jnp.float32))
    expected = whole_rotation(inputs, kernel.rotation) @ (values * scale)
    np.testing.assert_allclose(dense.T if is_table else dense, expected, atol=1e-5)

    if is_table:
        tokens = jnp.asarray([[3, 7]])
        np.testing.assert_allclose(embed(kernel, tokens, FLOAT32)[0], dense[[3, 7]], atol=1e-6)


def test_a_rotation_keeps_the_precision_of_rows_with_one_large_value() -> None:
    """Without a rotation the large activation takes the others' bits.

    The error is over three times larger.
    """
    random = np.random.default_rng(0)
    inputs = 128
    outputs = 64
    weights = random.normal(0, inputs**-0.5, (inputs, outputs)).astype(np.float32)
    x = random.normal(0, 1, (8, inputs)).astype(np.float32)
    x[:, 17] = 80
    rotated = quantise_int8(weights)
    scale = np.abs(weights).max(0) / np.float32(127)
    unrotated = Int8Kernel(
        values=jnp.asarray(np.rint(weights / scale), jnp.int8), scale=jnp.asarray(scale)
    )
    exact = x.astype(np.float64) @ weights.astype(np.float64)

    def error(kernel: Int8Kernel) -> float:
        difference = np.asarray(int8_product(jnp.asarray(x), kernel)) - exact
        return float(np.sqrt(np.mean(difference**2)))

    assert error(rotated) * 3 < error(unrotated)


def test_values_and_scales_of_a_published_file_are_kept_bit_for_bit(tmp_path: Path) -> None:
    """W8A8 of compressed-tensors is not rotated, and tensors dense in the file stay dense."""
    stored, _ = written(tmp_path, "int8")
    target = e3.load_target(stored, weights="int8")
    tensors = read_tensors(stored)
    kernel = target.params["blocks"][1]["attention"]["o"]["kernel"]

    assert isinstance(kernel, Int8Kernel)
    assert kernel.rotation == 1

    name = "model.layers.1.self_attn.o_proj.weight"
    np.testing.assert_array_equal(np.asarray(kernel.values), tensors[name].T)
    np.testing.assert_array_equal(
        np.asarray(kernel.scale), tensors[f"{name}_scale"].astype(np.float32)[:, 0]
    )

    assert not isinstance(target.params["head"]["kernel"], Int8Kernel)
    kernels = [leaf for leaf in jax.tree.leaves(target.params, is_leaf=is_int8) if is_int8(leaf)]
    assert len(kernels) == 4 * LAYERS
    assert all(kernel.rotation == 1 for kernel in kernels)


def is_int8(leaf: Any) -> bool:
    return isinstance(leaf, Int8Kernel)


def test_layers_and_output_matrix_are_integers(tmp_path: Path) -> None:
    untied: Any = e3.load_target(plain(tmp_path / "target"), weights="int8").params
    tied: Any = random_targets.in_eight_bits(tiny.target(61, tie_embeddings=True), "int8").params
    assert is_int8(untied["head"]["kernel"])

    assert not is_int8(untied["embedding"])
    assert tied["embedding"].is_table
    for block in (*untied["blocks"].values(), *tied["blocks"].values()):
        for part, name in (
            ("attention", "qkv"),
            ("attention", "o"),
            ("mlp", "gate_up"),
            ("mlp", "down"),
        ):
            assert is_int8(block[part][name]["kernel"]), (part, name)


@pytest.mark.parametrize("precision", [FLOAT32, MIXED], ids=lambda precision: precision.name)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_tied_table_gives_the_logits_of_its_transpose(precision: Any, rows: int) -> None:
    random = np.random.default_rng(rows)
    table = jnp.asarray(random.normal(0, 1, (50, 32)), precision.operands)
    x = jnp.asarray(random.normal(0, 1, (rows, 32)), jnp.float32)

    by_table, slopes = jax.value_and_grad(
        lambda x, table: product_by_table(x, table, precision).sum(), (0, 1)
    )(x, table)
    transposed, expected = jax.value_and_grad(
        lambda x, table: product(x, table.T, precision).sum(), (0, 1)
    )(x, table)

    np.testing.assert_allclose(by_table, transposed, rtol=1e-5)
    for slope, expected_slope in zip(slopes, expected, strict=True):
        np.testing.assert_allclose(
            slope.astype(jnp.float32), expected_slope.astype(jnp.float32), rtol=1e-2, atol=1e-3
        )


def test_one_row_of_a_tied_table_converts_no_table_on_cpus() -> None:
    """In mixed precision XLA converted the table to float32 in every step.

    That took ten times as long as the product.
    """
    table = jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((1, 1, 64), jnp.float32)
    program = (
        jax.jit(lambda x, table: product_by_table(x, table, MIXED))
        .lower(row, table)
        .compile()
        .as_text()
    )
    assert "f32[512,64]" not in program
    assert "f32[64,512]" not in program


@pytest.mark.bits
@pytest.mark.parametrize("capacity", [64, 128, 256])
@pytest.mark.parametrize(("rows", "size"), [(4, 4), (1, 3), (1, 5), (2, 1), (6, 1)])
def test_logits_have_the_same_bits_alone_in_blocks_and_in_batches(
    rows: int, size: int, capacity: int
) -> None:
    """On CPUs one different bit would change a rounding, and logits would be off by a tenth.

    The number of attention scores crosses 4,096 at other sizes for each capacity: there XLA changes
    its exponentials.
    """
    target = deep_target()
    texts = np.random.default_rng(0).integers(0, 61, (6, 40 + 20)).astype(np.int32)
    single = logits_of(target, texts[:1], size=1, capacity=capacity)
    together = logits_of(target, texts[:rows], size=size, capacity=capacity)
    np.testing.assert_array_equal(together[:1], single)


@functools.cache
def deep_target() -> e3.LoadedTarget:
    attention = GroupedQuery(num_heads=9, num_kv_heads=3, head_dim=64, rope=RopeConfig(theta=1e4))
    layers = uniform(6, attention, GatedMLP(width=384))
    target = tiny.target(61, width=576, layers=layers, tie_embeddings=True)
    return random_targets.in_eight_bits(target, "int8")


def logits_of(
    target: e3.LoadedTarget, texts: np.ndarray, *, size: int, capacity: int
) -> np.ndarray:
    """Logits of 15 tokens of every text, ``size`` tokens at a time after a prompt of 40."""
    model: Any = target.model
    logits, _ = tiny.in_blocks(model, target.params, texts, prompt=40, size=size, capacity=capacity)
    return logits[:, :15]
