"""Weights in FP8: stored as in the file, and multiplied as the weights that they represent."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantised as by_hand
from checkpoints import edit_tensors, same_params
from quantised import E4M3, GROUP, KEPT, LAYERS, layers, plain, written

import eagle3_jax as e3
from eagle3_jax import conversion
from eagle3_jax.conversion import rules
from eagle3_jax.conversion.tensors import read_tensors
from eagle3_jax.models.config import DecoderConfig, Experts, LayerConfig
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, MIXED, Precision, product
from eagle3_jax.models.mixture import Stack, gather_chosen, loop_over_runs, mixture, run_all
from eagle3_jax.models.quantised import LAYER, Fp8Kernel, quantise, quantised_shapes
from eagle3_jax.models.routers import Routing

# One of each network: the others have the same kernels in other files.


@pytest.mark.parametrize("name", KEPT)
def test_fp8_of_a_file_is_kept_bit_for_bit(tmp_path: Path, name: str) -> None:
    stored, dense = written(tmp_path, name)
    target = e3.load_target(stored, weights="fp8")
    tensors = read_tensors(stored)

    kernel = target.params["blocks"][1]["attention"]["o"]["kernel"]
    assert (
        np.asarray(kernel.values).tobytes()
        == tensors["model.layers.1.self_attn.o_proj.weight"].tobytes()
    )

    for path, leaf in rules.flatten(conversion.read_target(dense).params):
        stored_leaf: Any = target.params
        for key in path.split("."):
            stored_leaf = stored_leaf[int(key) if key.isdecimal() else key]

        assert isinstance(stored_leaf, Fp8Kernel) == (
            path.startswith("blocks") and path.endswith("kernel")
        ), path
        values = (
            stored_leaf.dense(jnp.float32) if isinstance(stored_leaf, Fp8Kernel) else stored_leaf
        )
        assert np.asarray(values).tobytes() == np.ascontiguousarray(np.asarray(leaf)).tobytes(), (
            path
        )


def random_kernel(
    random: np.random.Generator, inputs: int, block: int, **options: Any
) -> tuple[Fp8Kernel, np.ndarray]:
    """Returns a kernel of 24 outputs, and its dense values in float64."""
    values = by_hand.to_e4m3(random.normal(0, 60, (24, inputs)))
    scale = random.uniform(0.001, 0.1, (-(-inputs // block), 24)).astype(np.float32)
    kernel = Fp8Kernel(values=jnp.asarray(values), scale=jnp.asarray(scale), block=block, **options)
    return kernel, values.T.astype(np.float64) * np.repeat(scale, block, 0)[:inputs].astype(
        np.float64
    )


BLOCKS = pytest.mark.parametrize("block", [40, 16], ids=["channel", "block"])


@pytest.mark.parametrize(
    "precision", [FLOAT32, BFLOAT16, MIXED], ids=lambda precision: precision.name
)
@BLOCKS
@pytest.mark.parametrize("rows", [1, 6])
def test_a_product_is_that_of_the_kernel_it_stands_for(
    precision: Precision, block: int, rows: int
) -> None:
    random = np.random.default_rng(rows)
    kernel, dense = random_kernel(random, 40, block)
    x = jnp.asarray(random.normal(0, 1, (rows, 40)), precision.activations)

    operands = np.asarray(x.astype(precision.operands)).astype(np.float64)
    sizes = np.abs(operands) @ np.abs(dense)
    error = (
        np.abs(np.asarray(product(x, kernel, precision)).astype(np.float64) - operands @ dense)
        / sizes
    )

    # Where operands or results are bfloat16, of one rounding at most: a kernel with scales for
    # channels has none.
    exact = precision is FLOAT32 or (precision is MIXED and block == 40)
    assert error.max() < (1e-6 if exact else 2**-8)
    assert exact or error.max() > 1e-5


@BLOCKS
@pytest.mark.parametrize("precision", [FLOAT32, MIXED], ids=lambda precision: precision.name)
def test_a_dynamic_product_is_that_of_both_rounded(precision: Precision, block: int) -> None:
    random = np.random.default_rng(0)
    kernel, dense = random_kernel(random, 40, block, dynamic=True)
    sizes = np.array([1e-3, 1, 500, 0, 30], np.float32)

    x = random.normal(0, 1, (5, 40)).astype(np.float32) * sizes[:, None]
    expected = np.zeros((5, 24))

    for start in range(0, 40, block):
        part = x[:, start : start + block]
        of_row = np.maximum(np.abs(part).max(1, keepdims=True), np.float32(1e-30)) / np.float32(448)
        rounded = by_hand.to_e4m3(part / of_row).astype(np.float64) * of_row
        expected += rounded @ dense[start : start + block]

    actual = np.asarray(product(jnp.asarray(x), kernel, precision))
    assert np.all(np.abs(actual - expected) <= 1e-5 * np.abs(expected).max(1, keepdims=True))
    # A row of zeros has no scale of its own.
    assert not actual[3].any()


def test_experts_in_fp8_are_those_they_stand_for_in_every_form() -> None:
    random = np.random.default_rng(0)
    width = 16
    tokens = 3
    config = Experts(num_experts=6, per_token=2, width=12, router="softmax")
    normal = lambda *shape: random.normal(0, 0.4, shape).astype(np.float32)
    kernels = [quantise(array) for array in (normal(6, width, 24), normal(6, 12, width))]
    x = jnp.asarray(normal(tokens, width))
    chosen = jnp.asarray([[0, 5], [2, 3], [0, 1]])
    routing = Routing(chosen, jnp.asarray(random.uniform(0.2, 1, chosen.shape).astype(np.float32)))

    def run_form(form: Any, stack: Stack, rows: int = tokens) -> np.ndarray:
        """Returns the output of the first tokens."""
        first_rows = jax.tree.map(lambda array: array[:rows], (x, routing))
        return np.asarray(
            jax.jit(functools.partial(form, config=config, precision=FLOAT32))(*first_rows, stack)
        )

    expected = run_form(
        run_all, Stack(*(jnp.asarray(array.dense(jnp.float32)) for array in kernels), None, None)
    )
    stack = Stack(*(jax.tree.map(jnp.asarray, array) for array in kernels), None, None)
    for form in (run_all, gather_chosen, functools.partial(loop_over_runs, rows=2, skip=True)):
        np.testing.assert_allclose(run_form(form, stack), expected, atol=1e-6)
    dynamic = Stack(
        stack.gate_up.replace(dynamic=True), stack.down.replace(dynamic=True), None, None
    )
    rounded = run_form(mixture, dynamic)
    np.testing.assert_allclose(run_form(mixture, dynamic, rows=1), rounded[:1], atol=1e-6)
    assert 1e-4 < np.abs(rounded - expected).max() < 0.2 * np.abs(expected).max()


def test_router_and_gates_of_experts_are_not_rounded() -> None:
    experts = Experts(
        num_experts=4, per_token=2, width=12, router="softmax", shared_width=8, shared_gate=True
    )
    layer = LayerConfig(mixer=layers(24)[0].mixer, mlp=experts)

    model = DecoderTarget(DecoderConfig(vocab_size=61, width=32, layers=(layer,), max_positions=64))

    products = rules.flatten(model.param_products())
    rounded = {path for path, product_kind in products if product_kind == LAYER}

    assert rounded == {
        "blocks.0.attention.qkv.kernel", "blocks.0.attention.o.kernel", "blocks.0.mlp.gate_up", "blocks.0.mlp.down",
        "blocks.0.mlp.shared.gate_up.kernel", "blocks.0.mlp.shared.down.kernel",
    }  # fmt: skip


def test_rounding_on_load_is_to_the_nearest_value() -> None:
    every = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)
    every = np.unique(every[np.isfinite(every)])
    weights = np.random.default_rng(0).normal(0, 1, (3, 50, 20)).astype(np.float32)
    weights[1, :, 4] = 0
    # With a scale that is not its own it would overflow, and in E4M3 that is NaN.
    weights[2, 7, 5] = 1e30

    kernel = quantise(weights)
    scale = np.asarray(kernel.scale)
    assert scale.shape == (3, 1, 20)
    assert scale[1, 0, 4] == 1
    np.testing.assert_array_equal(scale[0, 0], np.abs(weights[0]).max(0) / np.float32(448))

    scaled = weights / scale
    nearest = np.abs(scaled[..., None] - every).min(-1)
    stored = np.swapaxes(np.asarray(kernel.values), -1, -2).astype(np.float32)
    np.testing.assert_array_equal(np.abs(scaled - stored), nearest)
    assert np.abs(stored).max() == 448

    np.testing.assert_array_equal(kernel.dense(jnp.float32), stored * scale)
    assert kernel[1].shape == (50, 20)
    assert kernel.shape == (3, 50, 20)


def test_a_dense_target_is_rounded_where_products_read_it_and_nowhere_else(tmp_path: Path) -> None:
    path = plain(tmp_path / "target")
    dense = e3.load_target(path)
    fp8 = e3.load_target(path, weights="fp8")

    assert dense.weights == "dense"
    assert fp8.weights == "fp8"

    for name in ("embedding", "head", "norm"):
        assert same_params(
            {name: jax.device_get(dense.params[name])}, {name: jax.device_get(fp8.params[name])}
        )

    kernels = [leaf for leaf in jax.tree.leaves(fp8.params, is_leaf=_is_fp8) if _is_fp8(leaf)]
    assert len(kernels) == 4 * LAYERS

    model: Any = fp8.model
    expected = quantised_shapes(model.param_shapes(), model.param_products(), "fp8")
    assert jax.tree.map(lambda leaf: leaf.shape, fp8.params) == jax.tree.map(
        lambda leaf: leaf.shape, expected
    )

    fused = fp8.params["blocks"][0]["mlp"]["gate_up"]["kernel"]
    assert fused.nbytes == 32 * 48 + 4 * 48  # a byte a weight, and a scale for every output


def _is_fp8(leaf: Any) -> bool:
    return isinstance(leaf, Fp8Kernel)


def test_what_a_file_leaves_dense_stays_dense(tmp_path: Path) -> None:
    stored, dense = written(tmp_path, "channel")
    name = "model.layers.1.self_attn.q_proj.weight"
    values = read_tensors(dense)[name]
    edit_tensors(stored, **{name: values, f"{name}_scale": None})
    blocks = e3.load_target(stored, weights="fp8").params["blocks"]
    assert _is_fp8(blocks[0]["attention"]["qkv"]["kernel"])
    # Queries, keys and values are one product.
    assert not _is_fp8(blocks[1]["attention"]["qkv"]["kernel"])
    assert same_params(conversion.read_target(stored).params, conversion.read_target(dense).params)


def test_commands_say_how_a_target_is_stored(tmp_path: Path, cli: Any) -> None:
    path = written(tmp_path, "int4")[0]
    code, out, _ = cli("inspect", path, "--json")
    described = json.loads(out)
    assert code == 0
    assert described["loadable"]

    assert (
        described["quantisation"]
        == f"int4 of compressed-tensors, a scale for {GROUP} inputs of an output"
    )
    assert described["num_parameters"] == sum(
        leaf.size for _, leaf in rules.flatten(conversion.read_target(path).params)
    )
    assert "quantised: int4" in conversion.diagnose(path, tmp_path / "nowhere")[0].detail

    command = [
        "generate", "--target", path, "--drafter", "none", "--prompt-ids", "[1, 2]",
        "--max-new-tokens", 3,
    ]  # fmt: skip

    code, out, _ = cli(*command, "--weights", "fp8", "--json")
    assert code == 0
    assert json.loads(out)["weights"] == "fp8"

    _, out, _ = cli(*command, "--weights", "fp8-dynamic")
    assert "weights: fp8-dynamic; lossless relative to the target with these weights" in out

    _, out, _ = cli(*command, "--weights", "int4")
    assert "weights: int4; lossless relative to the target with these weights" in out

    code, _, err = cli(*command, "--weights", "int3")
    assert code == 2
    known = "dense, fp8, fp8-dynamic, int8, int4"
    assert err == f"error: weights 'int3' are not known; use one of {known}\n"
