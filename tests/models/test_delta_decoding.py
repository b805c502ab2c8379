"""Targets with gated delta nets behind everything that decodes; as a program, on two devices."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax.drafters.draft_model import DraftModel
from eagle3_jax.models.config import GatedDelta, GatedMLP, LayerConfig
from eagle3_jax.models.memory import causal_mask
from eagle3_jax.sharding import make_mesh
from eagle3_jax.topology import Chain, DynamicTree

DELTA = LayerConfig(
    mixer=GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6), mlp=GatedMLP(width=24)
)
ATTENTION = tiny.layers(1, head_dim=8, qk_norm=True, output_gate=True)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4], [0, 1, 0, 1, 0], [2, 2]]
LIMITS = [24, 7, 15, 20]
CHAIN, TREE = Chain(3), DynamicTree(num_nodes=7, max_depth=3, top_k=3)


@functools.cache
def target() -> e3.LoadedTarget:
    """A recurrent layer below one of attention."""
    return tiny.target(13, layers=(DELTA, *ATTENTION), norm_kind="zero-centred", seed=4)


def head(topology: Any) -> e3.LoadedDrafter:
    return tiny.eagle3(target(), topology)


def decoder(drafter: Any = None, **options: Any) -> e3.SpeculativeDecoder:
    return e3.SpeculativeDecoder(target(), drafter, stop_tokens=(), **options)


@functools.cache
def plain() -> list[list[int]]:
    return decoder().generate(PROMPTS, max_new_tokens=LIMITS).tokens


def test_a_head_drafts_trees_and_the_text_is_the_target_s_own() -> None:
    """Ragged prompts and limits: drafts are refused half-way, and rows go on beside others that have ended."""
    result = decoder(head(TREE)).generate(PROMPTS, max_new_tokens=LIMITS)
    assert result.tokens == plain()
    assert 0 < result.stats.num_accepted_tokens < result.stats.num_draft_tokens


def test_a_schedule_of_chains_writes_the_same() -> None:
    schedule = e3.SpeculationSchedule(((1, 2, 3), (3, 4, 0)))
    result = decoder(tiny.eagle3(target(), CHAIN, seed=6), schedule=schedule).generate(PROMPTS, max_new_tokens=LIMITS)
    assert result.tokens == plain()
    assert result.stats.num_accepted_tokens > 0


def test_a_stream_writes_the_same() -> None:
    chunks = decoder(head(CHAIN)).stream(PROMPTS[0], max_new_tokens=LIMITS[0])
    assert [token for chunk in chunks for token in chunk.tokens] == plain()[0]


def test_rounds_leave_the_state_of_the_text() -> None:
    model: Any = target().model
    fresh = jax.jit(
        lambda text, length: (
            model(
                target().params, text, jnp.broadcast_to(jnp.arange(24), text.shape), causal_mask(24), length=length
            ).written
        )
    )
    for one in decoder(head(TREE)).rounds(PROMPTS, max_new_tokens=10):
        state = one.state
        expected = fresh(state.tokens[:, :24], state.length - 1)[0]
        for ours, theirs in zip(*map(jax.tree.leaves, (state.cache.layers[0], expected)), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_a_draft_model_with_such_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="the state of a recurrent layer has none; give one of attention alone"):
        DraftModel(target().model)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def on_two_devices() -> dict[str, bool]:
    from test_mesh import environment

    kept = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    done = subprocess.run(
        [sys.executable, Path(__file__)], env=environment(2) | kept, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("how", ["data=2", "model=2"])
def test_two_devices_write_what_one_writes(on_two_devices: dict[str, bool], how: str) -> None:
    assert on_two_devices[how]


if __name__ == "__main__":
    found = {}
    for text in ("data=2", "model=2"):
        mesh = make_mesh(text, devices=jax.devices())
        found[text] = decoder(head(TREE), mesh=mesh).generate(PROMPTS, max_new_tokens=LIMITS).tokens == plain()
    print(json.dumps(found))
