"""How weights lie: kernels divided over devices on their last axis, and tensors that fill one array in turns."""

from __future__ import annotations

import collections
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from eagle3_jax.conversion.rules import CheckpointError, Part, Rule, read_params, write_params

ROOT = Path(__file__).parent.parent.parent

FORWARD = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import tiny
from eagle3_jax.models.memory import causal_mask

target = tiny.target(64, layers=tiny.layers(3, num_heads=4, num_kv_heads=2, qkv_bias=True, qk_norm=True))
mesh = Mesh(np.array(jax.devices()), ("heads",))

def place(path, leaf):
    name = ".".join(str(entry.key) for entry in path)
    spec = P()
    if "qkv" in name or "gate_up" in name:
        spec = P(*[None] * (leaf.ndim - 1), "heads")
    elif name.endswith(("attention.o.kernel", "down.kernel")):
        spec = P("heads", None)
    return jax.device_put(leaf, NamedSharding(mesh, spec))

params = jax.tree_util.tree_map_with_path(place, target.params)
cache = jax.tree.map(
    lambda leaf: jax.device_put(leaf, NamedSharding(mesh, P(None, "heads") if leaf.ndim == 4 else P())),
    target.model.init_cache(8, 32),
)

def forward(params, tokens, cache):
    positions = jnp.broadcast_to(jnp.arange(4), tokens.shape)
    return target.model(params, tokens, positions, causal_mask(4), cache).final

tokens = jnp.zeros((8, 4), jnp.int32)
compiled = jax.jit(forward).lower(params, tokens, cache).compile()
alone = jax.jit(forward)(target.params, tokens, target.model.init_cache(8, 32))
assert np.allclose(compiled(params, tokens, cache), alone, atol=1e-5)
print(compiled.as_text())
"""


def test_a_forward_over_two_devices_adds_twice_a_layer_and_moves_nothing() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers")]),
    }
    done = subprocess.run([sys.executable, "-c", FORWARD], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    moves = r"= \S+ (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
    assert collections.Counter(re.findall(moves, done.stdout)) == {"all-reduce": 6}


def experts(count: int, width: int, inner: int) -> list[Rule]:
    """Gate and up of every expert in one array ``[E, D, 2I]``."""
    return [
        Rule(f"{expert}.{name}", "gate_up", transpose=True, part=Part(inner, 2, 1, place, place + 1, (expert,)))
        for expert in range(count)
        for place, name in enumerate(("gate", "up"))
    ]


def test_an_array_that_many_tensors_fill_is_filled_and_taken_apart_exactly() -> None:
    rng, table = np.random.default_rng(0), experts(3, 4, 5)
    tensors = {rule.source: rng.normal(size=(5, 4)).astype(np.float32) for rule in table}
    shapes = {"gate_up": np.empty((3, 4, 10), np.float32)}
    params = read_params(table, tensors, shapes, where="here")
    for expert in range(3):
        np.testing.assert_array_equal(np.asarray(params["gate_up"])[expert, :, 0::2], tensors[f"{expert}.gate"].T)
        np.testing.assert_array_equal(np.asarray(params["gate_up"])[expert, :, 1::2], tensors[f"{expert}.up"].T)
    again = write_params(table, params, shapes, where="here")
    assert again.keys() == tensors.keys()
    assert all(np.array_equal(again[name], value) for name, value in tensors.items())


def test_an_array_that_is_not_filled_or_filled_twice_is_no_table() -> None:
    table = experts(3, 4, 5)
    tensors = {rule.source: np.ones((5, 4), np.float32) for rule in table}
    shapes = {"gate_up": np.empty((3, 4, 10), np.float32)}
    with pytest.raises(AssertionError, match="differ"):
        read_params(table[:-1], dict(list(tensors.items())[:-1]), shapes, where="here")
    twice = [*table[:-1], table[-1]._replace(part=table[0].part)]
    with pytest.raises(CheckpointError, match=r"gives gate_up twice, the second time as 2\.up"):
        read_params(twice, tensors, shapes, where="here")
