"""The table of model families in docs/checkpoints.md: which run in vLLM's comparisons, and which are compiled."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3_jax.conversion.families import FAMILIES

sys.path.insert(0, str(Path(__file__).parents[2]))
from validation import families
from validation.aot.programs import SERVED

# Of Llama are the shipped pair and the 8B shape, which have levels of their own.
IN_VLLM = {"llama": "float32 and bfloat16, EAGLE-3"} | {
    one.recipe.model_type: f"{one.dtype}, {'EAGLE-3' if one.with_heads else 'n-grams'}"
    for one in families.FAMILIES.values()
}
COMPILED = {"llama": "Llama-3.1-8B"} | {name: f"{target}, {mesh}" for name, (target, mesh) in SERVED.items()}


def text() -> str:
    """What is between the marks of the page."""
    rows = ["| family | `model_type` | compared with vLLM in, drafts | compiled for H200s |", "|---|---|---|---|"]
    for name, family in FAMILIES.items():
        rows.append(f"| {family.label} | `{name}` | {IN_VLLM.get(name, '–')} | {COMPILED.get(name, '–')} |")
    return "\n".join(rows)
