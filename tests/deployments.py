"""Deployments that several tests plan for."""

from __future__ import annotations

from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.shapes import KNOWN_MODELS, HeadShape, ModelShape, usual_head

SMALL = ModelShape(
    name="small", vocab_size=10, width=4, mlp_width=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2
)
SMALL_HEAD = HeadShape(
    name="head", width=4, mlp_width=8, num_heads=2, num_kv_heads=1, head_dim=2, draft_vocab_size=5, target_width=4
)


def served(
    model: str = "llama-3.3-70b", gpu: str = "H200", weights: str = "fp8", num_accelerators: int = 1
) -> Deployment:
    target = KNOWN_MODELS[model]
    return Deployment(
        target=target,
        head=usual_head(target),
        accelerator=accelerator_named(gpu),
        weights=weights,
        num_accelerators=num_accelerators,
    )
