"""Every family and layer on eight simulated devices: one device's tokens, and collectives."""

from __future__ import annotations

import dataclasses
from typing import Any

import families
import pytest
import tiny
from eight_devices import run_on_eight_devices
from jax.sharding import AbstractMesh

from eagle3_jax.devices.sharding import MESH_AXES, param_shardings
from eagle3_jax.models.config import Experts

SCRIPT = "on_a_mesh_families.py"
KINDS = ("experts", "latent attention", "recurrent layers")
# Whose layers are of none of these kinds; the others are slow.
FEW = ("llama4, norms",)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        # Two devices do not divide the one global key head of gemma4.
        names = [name for name in families.RECIPES if name != "gemma4"]
        families.parametrize(metafunc, names, FEW)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_on_eight_devices(SCRIPT)


def test_eight_devices_write_what_one_writes_of_a_family(name: str) -> None:
    assert run_on_eight_devices(SCRIPT, name)[name] == {"chain": True, "tree": True}


def test_eight_devices_write_what_one_writes_and_gather_no_weights(results: dict[str, Any]) -> None:
    """Counts sums of two target layers, of the head's layer, and of four argmaxes.

    The head's layer runs for two levels and for accepted tokens.
    """
    moves = {"all-reduce": 2 * (2 + 2 + 1) + 2 * 4}
    assert results == {kind: {"chain": True, "tree": True, "step": moves} for kind in KINDS}


def test_a_mesh_that_does_not_divide_the_experts_is_refused() -> None:
    mixture = Experts(num_experts=6, per_token=2, width=6, router="softmax")
    layer = dataclasses.replace(tiny.layers(1, num_heads=4, num_kv_heads=4)[0], mlp=mixture)
    model = tiny.target(layers=(layer,)).model
    with pytest.raises(
        ValueError, match=r"model=4,data=1 does not divide 6 experts: model can be 1, 2, 3$"
    ):
        param_shardings(AbstractMesh((1, 4), MESH_AXES), model, model.param_shapes())
