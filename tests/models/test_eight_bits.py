"""Weights in FP8, int8 and int4: unchanged by drafts, shared with drafters, divided by meshes."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_targets
import tiny
from checkpoints import write_llama
from heads_on_disk import CHECKPOINTS
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from quantised import plain, written

import eagle3_jax as e3
from eagle3_jax.devices.sharding import param_shardings
from eagle3_jax.models.quantised import (
    Fp8Kernel,
    Int4Kernel,
    QuantisedKernel,
    quantise_int8,
    quantised_shapes,
)
from eagle3_jax.topology import Chain, DynamicTree

PROMPTS = ([1, 17, 5, 42], [9, 3])
TARGETS: dict[str, Callable[[Path], e3.LoadedTarget]] = {
    "fp8": lambda folder: e3.load_target(written(folder, "channel")[0], weights="fp8"),
    "fp8-dynamic": lambda folder: e3.load_target(
        written(folder, "tensor")[0], weights="fp8-dynamic"
    ),
    "int8": lambda folder: e3.load_target(plain(folder / "target"), weights="int8"),
    "int4": lambda folder: e3.load_target(written(folder, "gptq")[0], weights="int4"),
    "int4 with zeros": lambda folder: e3.load_target(
        written(folder, "int4 with zeros")[0], dtype="mixed", weights="int4"
    ),
    "int8, tied": lambda folder: random_targets.in_eight_bits(
        tiny.target(61, tie_embeddings=True), "int8"
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_drafts_change_nothing(tmp_path: Path, name: str) -> None:
    target = TARGETS[name](tmp_path)
    for shape in (Chain(3), DynamicTree(num_nodes=6, max_depth=2, top_k=2)):
        drafter = tiny.eagle3(target, shape, draft_vocab_size=40)
        assert tiny.check_same_text(target, drafter, PROMPTS, max_new_tokens=24).lossless


# One of each network: the others have the same kernels in other files.
DRAFTERS = {
    "fp8": (
        "EAGLE-3 head (eagle layout)", "P-EAGLE head (sglang layout)", "MTP head (deepseek layout)",
        "Medusa head (vllm layout)", "DSpark head (vllm layout)", "draft model",
    ),
    "fp8-dynamic": ("EAGLE-3 head (eagle layout)",),
    "int8": ("EAGLE-3 head (eagle layout)", "Medusa head (vllm layout)", "draft model"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("weights", "name"), [(weights, name) for weights in DRAFTERS for name in DRAFTERS[weights]]
)
def test_a_drafter_has_the_weights_of_its_target_and_changes_nothing(
    tmp_path: Path, weights: str, name: str
) -> None:
    path = write_llama(tmp_path / "target")
    files = CHECKPOINTS[name](tmp_path / "drafter")

    target = e3.load_target(path, weights=weights)
    dense = e3.load_drafter(files, target=e3.load_target(path))
    drafter = e3.load_drafter(files, target=target)

    is_kernel = lambda leaf: isinstance(leaf, QuantisedKernel)
    kernels = list(filter(is_kernel, jax.tree.leaves(drafter.params, is_leaf=is_kernel)))
    assert kernels
    assert all(kernel.dynamic == (weights != "fp8") for kernel in kernels)

    saved = sum(4 * math.prod(kernel.shape) - kernel.nbytes for kernel in kernels)  # of float32
    assert bytes_of(dense.params) - bytes_of(drafter.params) == saved > 0

    assert tiny.check_same_text(target, drafter, PROMPTS, max_new_tokens=16).lossless


def bytes_of(params: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def fp8(inputs: int, block: int) -> Fp8Kernel:
    values = jax.ShapeDtypeStruct((8, inputs), jnp.float8_e4m3fn)
    return Fp8Kernel(
        values=values, scale=jax.ShapeDtypeStruct((inputs // block, 8), jnp.float32), block=block
    )


def int4(inputs: int, block: int) -> Int4Kernel:
    scale = np.ones((inputs // block, 8), np.float32)
    return Int4Kernel.packed(np.ones((inputs, 8), np.int8), scale, scale.astype(np.int8), block)


MESH = AbstractMesh((2, 2), ("data", "model"))
COLUMNS = PartitionSpec(None, "model")
ROWS = PartitionSpec("model", None)


@pytest.mark.parametrize(
    ("kernel", "spec", "values", "scale"),
    [
        (fp8(64, 64), ROWS, COLUMNS, PartitionSpec(None, None)),
        (fp8(64, 16), ROWS, COLUMNS, PartitionSpec("model", None)),
        (fp8(48, 16), ROWS, COLUMNS, PartitionSpec(None, None)),  # half of three blocks
        (int4(64, 16), ROWS, ROWS, PartitionSpec("model", None)),
        (int4(48, 16), ROWS, PartitionSpec(None, None), PartitionSpec(None, None)),
        (int4(48, 16), COLUMNS, COLUMNS, COLUMNS),
        (quantise_int8(np.ones((8, 16), np.float32)), COLUMNS, COLUMNS, PartitionSpec("model")),
        (quantise_int8(np.ones((8, 16), np.float32)), ROWS, ROWS, PartitionSpec(None)),
        (
            quantise_int8(np.ones((16, 8), np.float32), is_table=True),
            ROWS,
            ROWS,
            PartitionSpec("model"),
        ),
    ],
)
def test_scales_are_divided_as_their_values_are(
    kernel: Any, spec: Any, values: Any, scale: Any
) -> None:
    divided = kernel.divided(NamedSharding(MESH, spec))
    assert divided.values.spec == values
    assert divided.scale.spec == scale


def test_a_mesh_divides_the_kernels_of_a_model() -> None:
    model: Any = tiny.target(60).model
    shapes = quantised_shapes(model.param_shapes(), model.param_products(), "fp8")
    shardings = param_shardings(MESH, model, shapes)["blocks"][0]["attention"]
    assert shardings["qkv"]["kernel"].values.spec == ROWS
    assert shardings["qkv"]["kernel"].scale.spec == PartitionSpec(None, "model")
    assert shardings["o"]["kernel"].values.spec == COLUMNS
    assert shardings["o"]["kernel"].scale.spec == PartitionSpec(None, None)
