"""Deployments that several tests plan for."""

from __future__ import annotations

from eagle3_jax.models.config import (
    DecoderConfig,
    Eagle3Config,
    GatedMLP,
    GroupedQuery,
    uniform,
    usual_head,
)
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment

_LAYERS = uniform(1, GroupedQuery(num_heads=2, num_kv_heads=1, head_dim=2), GatedMLP(width=8))
SMALL = DecoderConfig(vocab_size=10, width=4, layers=_LAYERS)
SMALL_HEAD = Eagle3Config(
    vocab_size=10, width=4, layers=_LAYERS, draft_vocab_size=5, target_width=4, aux_layers=(0, 1, 2)
)


def served(
    model: str = "Llama-3.3-70B", gpu: str = "H200", weights: str = "fp8", num_accelerators: int = 1
) -> Deployment:
    target = KNOWN_MODELS[model]
    return Deployment(
        target=target,
        head=usual_head(target),
        accelerator=accelerator_named(gpu),
        weights=weights,
        num_accelerators=num_accelerators,
        target_name=model,
    )
