"""Runs every kind of layer, and named families, on a mesh of eight devices; prints one JSON object.

For ``test_mesh_families.py``. In float32, and with seeds at which no two logits nearly tie.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import families
import jax
import random_targets
import tiny
from on_a_mesh import CHAIN, TREE, generated, moved, stack

from eagle3_jax.models.config import (
    Experts,
    GatedDelta,
    GatedMLP,
    GroupedQuery,
    Latent,
    LayerConfig,
)

MESH = "model=4,data=2"
HALVES = "model=2,data=4"  # what divides the two key heads of every recipe
SOFTMAX = Experts(
    num_experts=8, per_token=3, width=6, router="softmax", shared_width=8, shared_gate=True
)
SIGMOID = Experts(
    num_experts=8,
    per_token=3,
    width=6,
    router="sigmoid",
    groups=4,
    kept_groups=2,
    scaling=2.5,
    shared_width=8,
)
CLAMPED = Experts(
    num_experts=8, per_token=3, width=6, router="softmax-of-chosen", bias=True, limit=1.5
)
GROUPED = GroupedQuery(num_heads=8, num_kv_heads=4, head_dim=4, output_gate=True)
SINKS = GroupedQuery(
    num_heads=8, num_kv_heads=4, head_dim=4, sinks=True, qkv_bias=True, o_bias=True, window=7
)
LATENT = Latent(num_heads=4, q_rank=6, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=6)
DELTA = GatedDelta(num_key_heads=4, num_value_heads=8, key_dim=4, value_dim=4)
TARGETS = {
    "experts": (LayerConfig(mixer=SINKS, mlp=CLAMPED), LayerConfig(mixer=SINKS, mlp=CLAMPED)),
    "latent attention": (
        LayerConfig(mixer=LATENT, mlp=GatedMLP(width=24)),
        LayerConfig(mixer=LATENT, mlp=SIGMOID),
    ),
    "recurrent layers": (
        LayerConfig(mixer=DELTA, mlp=SOFTMAX),
        LayerConfig(mixer=GROUPED, mlp=SOFTMAX),
    ),
}


def pair(layers: tuple[LayerConfig, ...]) -> Any:
    """Returns a target with random corrections, biases and sinks, and a head of plain layers."""
    target = tiny.target(60, layers=layers)

    def unlike(path: Any, leaf: jax.Array) -> jax.Array:
        name = path[-1].key
        if name in ("bias", "correction", "sinks", "gate_up_bias", "down_bias"):
            return leaf + 0.3 * jax.random.normal(jax.random.key(len(leaf)), leaf.shape)
        return leaf

    target = dataclasses.replace(
        target, params=jax.tree_util.tree_map_with_path(unlike, target.params)
    )
    return target, tiny.eagle3(target, draft_vocab_size=32, layers=stack(1))


def of_kind(layers: tuple[LayerConfig, ...]) -> dict[str, Any]:
    """Compares the output of a mesh for a kind of layer, and counts the collectives of a step."""
    models = pair(layers)
    return same(models, MESH) | {"step": moved(models, MESH, **CHAIN)["moves"]}


def same(models: Any, mesh: str) -> dict[str, bool]:
    """Returns whether eight devices write the same as one, for a chain and a tree."""
    on_one_device = generated(models, None, **CHAIN)
    assert len({token for row in on_one_device for token in row}) > 9
    drafts = {"chain": CHAIN, "tree": TREE}
    return {
        name: generated(models, mesh, **options) == on_one_device
        for name, options in drafts.items()
    }


def of_family(name: str) -> dict[str, bool]:
    target = random_targets.of_family(families.RECIPES[name], 60)
    results = same((target, tiny.eagle3(target, draft_vocab_size=32, layers=stack(1))), HALVES)
    jax.clear_caches()
    return results


if __name__ == "__main__":
    named = sys.argv[1:]
    print(
        json.dumps(
            {name: of_family(name) for name in named}
            or {name: of_kind(TARGETS[name]) for name in TARGETS}
        )
    )
