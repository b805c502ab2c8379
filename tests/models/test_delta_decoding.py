"""Tree drafts for a target with gated delta nets, compiled as users compile it."""

from __future__ import annotations

import functools

import pytest
import tiny

import eagle3_jax as e3
from eagle3_jax.drafters.draft_model import DraftModel
from eagle3_jax.models.config import GatedDelta, GatedMLP, LayerConfig
from eagle3_jax.topology import DynamicTree

pytestmark = pytest.mark.bits

DELTA = LayerConfig(
    mixer=GatedDelta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6),
    mlp=GatedMLP(width=24),
)
ATTENTION = tiny.layers(1, head_dim=8, qk_norm=True, output_gate=True)
PROMPTS = [[1, 2, 3, 1, 2, 3, 1], [4], [0, 1, 0, 1, 0], [2, 2]]
LIMITS = [24, 7, 15, 20]
TREE = DynamicTree(num_nodes=7, max_depth=3, top_k=3)


@functools.cache
def target() -> e3.LoadedTarget:
    """Returns a target with a recurrent layer below one of attention."""
    return tiny.target(13, layers=(DELTA, *ATTENTION), norm_kind="zero-centred", seed=4)


def test_a_head_drafts_trees_and_the_text_is_the_target_s_own() -> None:
    """Ragged prompts and limits: drafts are refused half-way, and rows outlive others."""
    result = tiny.check_same_text(
        target(), tiny.eagle3(target(), TREE), PROMPTS, max_new_tokens=LIMITS
    )
    assert 0 < result.stats.num_accepted_tokens < result.stats.num_draft_tokens


def test_a_draft_model_with_such_layers_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="the state of a recurrent layer has no length; give a model with attention",
    ):
        DraftModel(target().model)  # type: ignore[arg-type]
