"""The table of model families in docs/checkpoints.md: those compared with vLLM, those compiled."""

from __future__ import annotations

import sys

from page_tables import ROOT, table

from eagle3_jax.conversion.families import FAMILIES

sys.path.insert(0, str(ROOT))
from validation import families
from validation.aot.programs import SERVED

# The shipped pair and the 8B shape are Llamas; they have levels of their own.
IN_VLLM = {"llama": "float32 and bfloat16, EAGLE-3"}
for compared in families.FAMILIES.values():
    drafts = "EAGLE-3" if compared.with_heads else "n-grams"
    IN_VLLM[compared.recipe.model_type] = f"{compared.dtype}, {drafts}"

COMPILED = {"llama": "Llama-3.1-8B"} | {
    name: f"{target}, {mesh}" for name, (target, mesh) in SERVED.items()
}


def families_of_targets() -> str:
    """Writes every family."""
    rows = [
        [family.label, f"`{name}`", IN_VLLM.get(name, "–"), COMPILED.get(name, "–")]
        for name, family in FAMILIES.items()
    ]
    columns = ["family", "`model_type`", "compared with vLLM in, drafts", "compiled for H200s"]
    return table(columns, rows)
