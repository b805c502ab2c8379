"""Loading parameters from a file preserves the bits of every type and holds no second copy.

An accelerator gets arrays in the order of the file and reorders their axes itself. The tests run
that path on a CPU.
"""

from __future__ import annotations

import dataclasses
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import TARGET, write_llama
from safetensors.numpy import load_file, save_file

import eagle3_jax as e3
from eagle3_jax.conversion.rules import Joined, Part, flatten
from eagle3_jax.devices import sharding
from eagle3_jax.devices.sharding import make_mesh, put_array
from eagle3_jax.measure.timing import CompileClock
from eagle3_jax.models.config import GatedMLP, GroupedQuery, uniform

QUERIES = 6
KEYS = 2
SIZE = 8
WIDTH = 40
INNER = 56
LAYERS = 2
MIXER = GroupedQuery(num_heads=QUERIES, num_kv_heads=KEYS, head_dim=SIZE)
CONFIG = dataclasses.replace(
    TARGET, width=WIDTH, vocab_size=72, layers=uniform(LAYERS, MIXER, GatedMLP(width=INNER))
)
# Unusual numbers: subnormal ones, the largest, ties between two neighbours in bfloat16, zeros and
# infinity.
UNUSUAL = (1e-40, -1e-41, 3.4e38, 1.00390625, 1.01171875, 0.0, -0.0, np.inf, 6e-8)


def write(directory: Path, dtype: Any, config: Any = CONFIG) -> dict[str, np.ndarray]:
    """Writes a random target whose tensors begin with unusual numbers, and returns its tensors."""
    path = write_llama(directory, config) / "model.safetensors"
    tensors = {name: value.copy() for name, value in load_file(path).items()}
    for name, values in tensors.items():
        values.flat[: len(UNUSUAL)] = UNUSUAL
        with np.errstate(over="ignore"):
            tensors[name] = values.astype(dtype)
    save_file(tensors, path)
    return tensors


def expected(tensors: dict[str, np.ndarray], precision: str) -> dict[str, np.ndarray]:
    """Builds our arrays column by column."""
    matrix_type, vector_type = {
        "float32": (np.float32, np.float32),
        "bfloat16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16),
        "mixed": (ml_dtypes.bfloat16, np.float32),
    }[precision]

    def rows(name: str) -> list[np.ndarray]:
        return list(tensors[f"{name}.weight"])

    vectors = {"norm.scale": "model.norm"}
    columns = {"head.kernel": rows("lm_head"), "embedding": tensors["model.embed_tokens.weight"].T}
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        block = f"blocks.{index}"

        q, k, v = (rows(f"{layer}.self_attn.{name}_proj") for name in "qkv")
        group = QUERIES // KEYS * SIZE
        qkv = []
        for head in range(KEYS):
            keys = slice(head * SIZE, (head + 1) * SIZE)
            qkv += q[head * group : (head + 1) * group]
            qkv += k[keys]
            qkv += v[keys]

        gates, ups = (rows(f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        vectors[f"{block}.attention_norm.scale"] = f"{layer}.input_layernorm"
        vectors[f"{block}.mlp_norm.scale"] = f"{layer}.post_attention_layernorm"
        columns[f"{block}.attention.qkv.kernel"] = qkv
        columns[f"{block}.attention.o.kernel"] = rows(f"{layer}.self_attn.o_proj")
        columns[f"{block}.mlp.gate_up.kernel"] = [
            row for pair in zip(gates, ups, strict=True) for row in pair
        ]

        columns[f"{block}.mlp.down.kernel"] = rows(f"{layer}.mlp.down_proj")
    arrays = {
        path: np.stack(list(matrix), axis=-1).astype(matrix_type)
        for path, matrix in columns.items()
    }
    return arrays | {
        path: tensors[f"{name}.weight"].astype(vector_type) for path, name in vectors.items()
    }


def bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(array)
    return str(array.dtype), array.shape, np.ascontiguousarray(array).tobytes()


@pytest.fixture(params=["cpu", "gpu"])
def platform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Selects the path of loading; both end on the CPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: request.param)
    return request.param


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "mixed"])
@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_parameters_have_the_bits_of_the_file(
    tmp_path: Path, platform: str, stored: Any, precision: str
) -> None:
    tensors = write(tmp_path, stored)
    for mesh in (None, make_mesh(devices=jax.devices()[:1])):
        with np.errstate(over="ignore"):
            params = e3.load_target(tmp_path, dtype=precision, mesh=mesh).params
            truth = expected(tensors, precision)
        leaves = dict(flatten(params))
        assert leaves.keys() == truth.keys()
        for path, array in truth.items():
            assert bits(leaves[path]) == bits(array), (platform, path)


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_a_small_type_is_exact_in_a_wider_type(platform: str, stored: Any) -> None:
    del platform
    every = np.arange(2**16, dtype=np.uint16).view(stored)
    numbers = every[~np.isnan(every.astype(np.float32))].reshape(2, -1)
    for array in (numbers, numbers.T, numbers[:, 3:99], numbers.T[5:9]):
        assert bits(put_array(array, jnp.float32)) == bits(array.astype(np.float32))


@pytest.mark.parametrize("shape", [(), (3,), (1, 3), (3, 1), (2, 3, 4)])
def test_arrays_with_axes_in_any_order_are_placed_exactly(
    platform: str, shape: tuple[int, ...]
) -> None:
    del platform
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for view in (array, array.T, array.swapaxes(0, -1) if shape else array):
        assert bits(put_array(view, jnp.float32)) == bits(view)
        assert bits(put_array(view, jnp.bfloat16)) == bits(view.astype(ml_dtypes.bfloat16))


def test_loading_compiles_a_program_for_every_shape(tmp_path: Path, platform: str) -> None:
    """Shapes are those of qkv, o, gate_up, down and the head; embedding and norms need none."""
    config = dataclasses.replace(CONFIG, width=44, vocab_size=76, layers=CONFIG.layers * 3)
    write(tmp_path, ml_dtypes.bfloat16, config)
    num_programs = []
    for _ in range(2):
        with CompileClock() as clock:
            e3.load_target(tmp_path, dtype="bfloat16")
        num_programs.append(clock.programs)
    assert num_programs == [5 if platform == "gpu" else 0, 0]


def test_the_host_holds_no_second_copy_of_an_array(tmp_path: Path, platform: str) -> None:
    """tracemalloc counts numpy's allocations.

    On a CPU there are none: arrays are copied into the memory of the parameters. Otherwise there
    are two arrays at a time.
    """
    layers = uniform(
        3, GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=64), GatedMLP(width=4096)
    )

    write(tmp_path, ml_dtypes.bfloat16, dataclasses.replace(CONFIG, width=256, layers=layers))
    e3.load_target(tmp_path, dtype="bfloat16")  # the first call also allocates other memory
    tracemalloc.start()
    target = e3.load_target(tmp_path, dtype="bfloat16")
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(target.params)]
    if platform == "cpu":
        assert peak - after < 0.5 * max(sizes)
    else:
        # Two arrays at a time, whose memory may be freed a little later; all are 4.7 of these.
        assert peak - after < 3 * max(sizes)


def stack_of_experts(num_experts: int, inputs: int, outputs: int) -> Joined:
    """Returns the array of experts that are stored one by one, transposed."""
    random = np.random.default_rng(1)
    tensors = random.normal(size=(num_experts, outputs, inputs)).astype(ml_dtypes.bfloat16)
    parts = [(Part(leading=(expert,)), tensor.T) for expert, tensor in enumerate(tensors)]
    return Joined(parts, (num_experts, inputs, outputs), is_exchanged=True)


def test_a_stack_of_experts_reaches_an_accelerator_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    stack = stack_of_experts(64, 64, 512)
    truth = bits(np.asarray(stack))
    put_array(stack, jnp.bfloat16)  # the first call compiles

    expert_bytes = 64 * 512 * 2
    monkeypatch.setattr(sharding, "_MOST_AT_ONCE", 3 * expert_bytes)
    assert bits(put_array(stack, jnp.bfloat16)) == truth
    tracemalloc.start()
    put_array(stack, jnp.bfloat16)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The memory of a copy that has ended may be freed a little later.
    assert 2.9 * expert_bytes < peak < 10 * expert_bytes


@pytest.mark.parametrize(
    "index", [3, slice(2, 5), slice(None), (slice(4, 6), slice(None), slice(1, 3)), (1, slice(2))]
)
def test_a_part_of_a_stack_is_that_of_the_whole(index: Any) -> None:
    stack = stack_of_experts(6, 4, 5)
    assert bits(np.asarray(stack[index])) == bits(np.asarray(stack)[index])


def test_parameters_are_not_the_files_own_memory(tmp_path: Path) -> None:
    """On a CPU, JAX shares memory that is aligned to 64 bytes; a write could change the model."""
    tensors = write(tmp_path, np.float32, dataclasses.replace(CONFIG, width=64, vocab_size=128))
    path = tmp_path / "model.safetensors"
    size = sum(value.nbytes for value in tensors.values())
    header = path.read_bytes()[8:-size]
    # The length of the header aligns the first tensor.
    header += b" " * (-(8 + len(header)) % 64)
    path.write_bytes(len(header).to_bytes(8, "little") + header + path.read_bytes()[-size:])
    meshes = (None, make_mesh(devices=jax.devices()[:1]))

    loaded = [e3.load_target(tmp_path, mesh=mesh).params for mesh in meshes]
    with path.open("r+b") as file:
        file.seek(8 + len(header))
        file.write(bytes(size))
    assert not any(value.any() for value in load_file(path).values())
    for params in loaded:
        for name, leaf in flatten(params):
            assert np.asarray(leaf).any(), name
