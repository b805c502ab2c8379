"""Tables of docs/expectations.md: the upper bound of the hardware, and programs that were compiled for an H200."""

from __future__ import annotations

import sys

from methods import ROOT, table

sys.path.insert(0, str(ROOT))

from eagle3_jax.models.config import usual_head
from eagle3_jax.theory.accelerators import accelerator_named
from eagle3_jax.theory.bounds import round_bound
from eagle3_jax.theory.known_models import KNOWN_MODELS
from eagle3_jax.theory.memory import Deployment
from eagle3_jax.theory.speedup import speedup, tau_from_conditional_rate
from validation.aot.measure import load
from validation.aot.table import tabulate_models

K = 4
ALPHA = 0.7
CONTEXT = 1024
MODELS = (("Llama-3.1-8B", "bfloat16", ("H100", "H200")), ("Llama-3.3-70B", "fp8", ("H200",)))


def bound() -> str:
    """Plain tokens/s, v, c and speed-up that the datasheets of an H100 and of an H200 allow."""
    tau = tau_from_conditional_rate(ALPHA, K)
    rows = []
    for name, weights, gpus in MODELS:
        target = KNOWN_MODELS[name]
        for gpu in gpus:
            one = Deployment(
                target=target, head=usual_head(target), accelerator=accelerator_named(gpu), weights=weights
            )
            for batch in (1, 8, 64, 128):
                found = round_bound(one, batch=batch, context=CONTEXT, num_draft_tokens=K)
                plain = found.plain_seconds
                v = found.verify_seconds / plain
                c = found.draft_seconds / K / plain
                gain = speedup(tau, num_draft_tokens=K, verify_cost=v, draft_cost=c)
                numbers = [f"{batch}", f"{batch / plain:,.0f}", f"{v:.2f}", f"{c:.3f}", f"{gain:.2f}"]
                rows.append([f"{name}, {weights}", gpu, *numbers])
    columns = ["target", "GPU", "batch", "plain tokens/s, at most", "v", "c", f"S at τ = {tau:.2f}"]
    return table(columns, rows) + f"\n\nK = {K}, α = {ALPHA}, {CONTEXT:,} tokens of context, one GPU, from datasheets."


def compiled() -> str:
    """Launches, memory and compile time of whole generations for an H200."""
    return tabulate_models(load(ROOT / "validation" / "results" / "aot.json"), "cuda:h200").strip()


def parts() -> dict[str, dict[str, str]]:
    """The text between the marks of the page."""
    return {"docs/expectations.md": {"bound": bound(), "compiled": compiled()}}
