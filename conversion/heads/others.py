"""Draft heads that are recognised and not loaded."""

from __future__ import annotations

from conversion.heads.dialects import dialect_of
from conversion.heads.head import HeadKind

DFLASH = HeadKind(
    name="dflash",
    label="DFlash",
    recognise=lambda signs: (
        "dflash_config" in signs.config
        or "DFlash" in signs.architecture
        or signs.method.startswith(("dflash", "dspark"))
    ),
    difference="a DFlash drafter, which denoises a block",
)
# "fc" mixes embeddings or features into a head; no language model has it.
EAGLE1 = HeadKind(
    name="eagle1",
    label="EAGLE-1/2",
    recognise=lambda signs: "fc.weight" in signs.names,
    difference=(
        "an EAGLE-1/2 head: its fc reads one embedding and one feature, and it has neither hidden_norm nor lm_head"
    ),
    dialect=dialect_of,
)
