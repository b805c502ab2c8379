"""Tables of docs/expectations.md: upper bounds of the hardware, and programs for an H200."""

from __future__ import annotations

import sys

from page_tables import ROOT, table

sys.path.insert(0, str(ROOT))

from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.bounds import round_bound
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.speedup import tau_from_conditional_rate
from validation.aot.table import tabulate_models

K = 4
ALPHA = 0.7
TAU = tau_from_conditional_rate(ALPHA, K)
CONTEXT = 1024
BATCHES = (1, 8, 64, 128)
MODELS = (
    ("Llama-3.1-8B", "bfloat16", "H100"),
    ("Llama-3.1-8B", "bfloat16", "H200"),
    ("Llama-3.3-70B", "fp8", "H200"),
)


def bound() -> str:
    """Writes plain tokens/s, v, c and the speed-up that the datasheets of the GPUs allow."""
    rows = []
    for name, weights, gpu in MODELS:
        target = KNOWN_MODELS[name]
        accelerator = accelerator_named(gpu)
        deployment = Deployment(
            target=target, head=usual_head(target), accelerator=accelerator, weights=weights
        )
        for batch in BATCHES:
            limit = round_bound(deployment, batch=batch, context=CONTEXT, num_draft_tokens=K)
            speed = f"{batch / limit.plain_seconds:,.0f}"
            costs = [f"{limit.verify_cost:.2f}", f"{limit.draft_cost:.3f}"]
            rows.append(
                [f"{name}, {weights}", gpu, f"{batch}", speed, *costs, f"{limit.speedup(TAU):.2f}"]
            )

    columns = ["target", "GPU", "batch", "plain tokens/s, at most", "v", "c", f"S at τ = {TAU:.2f}"]
    return (
        table(columns, rows)
        + f"\n\nK = {K}, α = {ALPHA}, {CONTEXT:,} tokens of context, one GPU, from datasheets."
    )


def compiled() -> str:
    """Writes the programs of complete models."""
    return tabulate_models("cuda:h200")
