"""Weights in four bits: as their writers read them, kept in memory, and multiplied by groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from quantised import GPTQ_CONFIG, INT4, LAYERS, group, integers, plain, written

import eagle3_jax as e3
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.quantised import read_quantised
from eagle3_jax.models.config import Experts
from eagle3_jax.models.layers import BFLOAT16, FLOAT32, MIXED, Precision, product
from eagle3_jax.models.mixture import Stack, gather_chosen, loop_over_experts, mixture, run_all
from eagle3_jax.models.quantised import Int4Kernel, int4_product
from eagle3_jax.models.routers import Routing

GOLDEN = np.load(Path(__file__).parents[1] / "golden/quantised/tensors.npz")
FORMS = ["pairs", "int4"]


def read(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> np.ndarray:
    """Returns the weights of a layer ``q``."""
    named = {f"q.{name}": value for name, value in tensors.items()}
    fields = Fields({"quantization_config": config}, "config.json")
    return np.asarray(read_quantised(named, fields, Path())[0]["q.weight"])


def golden(prefix: str) -> dict[str, np.ndarray]:
    names = (name for name in GOLDEN.files if name.startswith(f"{prefix}."))
    return {name.removeprefix(f"{prefix}."): GOLDEN[name] for name in names}


@pytest.mark.core
def test_awq_is_read_as_autoawq_reads_it() -> None:
    stored = golden("awq")
    expected = stored.pop("weight")
    config = {"quant_method": "awq", "bits": 4, "group_size": 16}
    assert read(stored, config).tobytes() == expected.tobytes()


@pytest.mark.core
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("order", ["in turns", "reordered"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq_is_read_as_gptqmodel_reads_it(bits: int, order: str, form: str) -> None:
    stored = golden(f"gptq {bits} {order}")
    expected = {name: stored.pop(name) for name in ("gptq", "gptq_v2")}
    config = {**GPTQ_CONFIG, "bits": bits, "group_size": 16, "checkpoint_format": form}
    assert read(stored, config).tobytes() == expected[form].tobytes()


@pytest.mark.core
def test_nvfp4_is_read_as_model_optimizer_reads_it() -> None:
    stored = golden("nvfp4")
    expected = stored.pop("dequantised")
    stored["weight_scale"] = stored["weight_scale"].view(ml_dtypes.float8_e4m3fn)
    actual = read(stored, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16})
    # Theirs has no negative zero.
    assert (actual + 0.0).tobytes() == (expected + 0.0).tobytes()


OF_COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "groups": ("pack", {"num_bits": 4, "strategy": "group", "group_size": 16}),
    "outputs": ("pack", {"num_bits": 4, "strategy": "channel"}),
    "eight bits": ("pack", {"num_bits": 8, "strategy": "group", "group_size": 32}),
    "symmetric": ("pack", {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": True}),
    "bytes": ("int", {"num_bits": 8, "strategy": "channel"}),
    "nvfp4": (
        "nvfp4-pack", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    ),
}  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("name", OF_COMPRESSED)
def test_compressed_tensors_are_read_as_their_package_reads_them(name: str) -> None:
    """The package compresses random weights of 20 outputs, which fill no word, and reads them."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    form, fields = OF_COMPRESSED[name]
    fields = {"symmetric": False, "type": "int", **fields}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**fields))
    random = np.random.default_rng(0)
    weight = torch.from_numpy(random.normal(0, 1, (20, 64)).astype(np.float32))
    groups = 64 // fields["group_size"] if "group_size" in fields else 1
    tensors = {"weight": weight, "weight_scale": torch.rand(20, groups) / 10 + 0.1}
    if fields["type"] == "float":
        tensors["weight_global_scale"] = torch.tensor([37.0])
        tensors["weight_scale"] = tensors["weight_scale"] * 100
    elif not fields["symmetric"]:
        most = 2 ** (fields["num_bits"] - 1)
        tensors["weight_zero_point"] = torch.randint(-most, most, (20, groups), dtype=torch.int8)

    compressor = BaseCompressor.get_value_from_registry(f"{form}-quantized")
    stored = compressor.compress(tensors, scheme)
    theirs = compressor.decompress(stored, scheme)["weight"]

    def of_numpy(tensor: Any) -> np.ndarray:
        if tensor.dtype == torch.float8_e4m3fn:
            return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
        return tensor.detach().numpy()

    ours = read(
        {key: of_numpy(value) for key, value in stored.items()}, group(fields, f"{form}-quantized")
    )
    # Their NVFP4 is in bfloat16.
    rounded = torch.from_numpy(ours).to(theirs.dtype)
    assert torch.equal(rounded, theirs)


@pytest.mark.core
def test_reordered_inputs_have_the_scale_of_their_group() -> None:
    random = np.random.default_rng(0)
    weights = random.normal(0, 1, (16, 32)).astype(np.float32)
    values, scale, _ = integers(weights, symmetric=True)
    order = random.permutation(np.arange(32) // 8).astype(np.int32)
    shifts = 4 * np.arange(8, dtype=np.uint32)
    packed = (values.reshape(16, 4, 8) << shifts).sum(-1, dtype=np.uint32).view(np.int32)
    stored = {
        "weight_packed": packed,
        "weight_scale": scale,
        "weight_shape": np.array([16, 32]),
        "weight_g_idx": order,
    }
    fields = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}
    expected = (values.astype(np.float32) - 8) * scale[:, order]
    config = group({**fields, "actorder": "group"}, "pack-quantized")
    np.testing.assert_array_equal(read(stored, config), expected)

    # Groups of -1 throughout are in turns.
    stored["weight_g_idx"] = np.full(32, -1, np.int32)
    np.testing.assert_array_equal(
        read(stored, config), (values.astype(np.float32) - 8) * np.repeat(scale, 8, 1)
    )


# In memory.


def kernel_of(
    form: str, *stack: int, block: int = 16, inputs: int = 64, outputs: int = 24, zeros: bool = True
) -> tuple[Int4Kernel, np.ndarray]:
    """Returns a kernel in pairs or in int4, and the weights that it represents in float64."""
    random = np.random.default_rng(block)
    groups = inputs // block
    values = random.integers(-8, 8, (*stack, inputs, outputs)).astype(np.int8)
    scale = random.uniform(0.01, 0.1, (*stack, groups, outputs)).astype(np.float32)
    zero = random.integers(-8, 8, scale.shape).astype(np.int8) * zeros
    centred = values.astype(np.float64) - np.repeat(zero, block, -2)
    kernel = jax.tree.map(jnp.asarray, Int4Kernel.packed(values, scale, zero, block))
    assert kernel.is_paired and (kernel.zero is not None) == zeros
    if form == "int4":
        turned = jnp.asarray(np.swapaxes(values, -1, -2)).astype(jnp.int4)
        kernel = kernel.replace(values=turned)
    return kernel, centred * np.repeat(scale.astype(np.float64), block, -2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("block", [2, 16, 64])
def test_a_kernel_holds_its_weights(form: str, block: int, zeros: bool) -> None:
    for stack in ((), (3,)):
        kernel, dense = kernel_of(form, *stack, block=block, zeros=zeros)
        assert kernel.shape == dense.shape
        np.testing.assert_array_equal(kernel.dense(jnp.float32), dense.astype(np.float32))
        # Two values in a byte, scales in float32 and zero points in a byte.
        assert kernel.nbytes == dense.size // 2 + (4 + zeros) * dense.size // block
    np.testing.assert_array_equal(kernel[1].dense(jnp.float32), dense[1].astype(np.float32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 3, 8, 9])
@pytest.mark.parametrize(("precision", "error"), [(FLOAT32, 1e-6), (MIXED, 6e-3), (BFLOAT16, 1e-2)])
def test_a_product_is_that_of_its_weights(
    form: str, rows: int, precision: Precision, error: float
) -> None:
    """Nine rows are more than half of a group, for which int4 is dequantised first."""
    kernel, dense = kernel_of(form)
    x = np.random.default_rng(rows).normal(0, 1, (rows, 1, 64)).astype(ml_dtypes.bfloat16)
    out = product(jnp.asarray(x), kernel, precision)
    expected = x.astype(np.float64) @ dense
    assert out.dtype == precision.activations
    assert np.abs(np.asarray(out, np.float64) - expected).max() < error * np.abs(expected).max()


def test_sums_of_groups_are_scaled_in_float32_and_weights_are_not_rounded() -> None:
    kernel, dense = kernel_of("int4", zeros=False)
    x = np.random.default_rng(0).normal(0, 1, (4, 64)).astype(ml_dtypes.bfloat16)
    out = np.asarray(int4_product(jnp.asarray(x), kernel, jnp.bfloat16, None))
    expected = x.astype(np.float64) @ dense
    assert np.abs(out - expected).max() < 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("form", FORMS)
def test_algorithms_for_experts_agree_in_four_bits(form: str) -> None:
    width = 32
    config = Experts(num_experts=4, per_token=2, width=16, router="softmax")
    gate_up, dense_gate_up = kernel_of(form, 4, inputs=width, outputs=32)
    down, dense_down = kernel_of(form, 4, inputs=16, outputs=width)
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(0, 1, (5, width)), jnp.float32)
    chosen = jnp.asarray([random.permutation(4)[:2] for _ in range(5)], jnp.int32)
    routing = Routing(chosen, jnp.asarray(random.uniform(0, 1, (5, 2)), jnp.float32))

    dense = [jnp.asarray(part, jnp.float32) for part in (dense_gate_up, dense_down)]
    options: dict[str, Any] = {"config": config, "precision": FLOAT32}
    expected = np.asarray(mixture(x, routing, Stack(*dense, None, None), **options))
    stack = Stack(gate_up, down, None, None)
    for algorithm in (mixture, loop_over_experts, run_all, gather_chosen):
        out = np.asarray(algorithm(x, routing, stack, **options))
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def is_int4(leaf: Any) -> bool:
    return isinstance(leaf, Int4Kernel)


@pytest.mark.parametrize("name", INT4)
def test_values_of_a_file_are_kept_and_give_the_text_of_the_dense_ones(
    tmp_path: Path, name: str
) -> None:
    path = written(tmp_path, name)[0]
    dense = e3.load_target(path)
    target = e3.load_target(path, weights="int4")
    kernels = jax.tree.leaves(target.params, is_leaf=is_int4)
    assert sum(map(is_int4, kernels)) == 4 * LAYERS

    for kernel, leaf in zip(kernels, jax.tree.leaves(dense.params), strict=True):
        stored = kernel.dense(jnp.float32) if is_int4(kernel) else kernel
        np.testing.assert_array_equal(stored, leaf)

    texts = [
        e3.SpeculativeDecoder(model, None).generate([[1, 17, 5]], max_new_tokens=12).tokens
        for model in (dense, target)
    ]
    assert texts[0] == texts[1]


def test_files_without_integers_of_four_bits_are_refused(tmp_path: Path) -> None:
    for path, words in (
        (plain(tmp_path / "plain"), "is not quantised"),
        (written(tmp_path / "a", "nvfp4")[0], "is nvfp4 of compressed-tensors"),
        (written(tmp_path / "b", "int8")[0], "is int8 of compressed-tensors"),
    ):
        with pytest.raises(ValueError, match=rf"weights 'int4' keep .*{words}.*use another of d"):
            e3.load_target(path, weights="int4")
