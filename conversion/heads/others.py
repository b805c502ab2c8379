"""Draft heads that are recognised and not loaded."""

from __future__ import annotations

from conversion.heads.dialects import dialect_of
from conversion.heads.head import HeadKind

MEDUSA = HeadKind(
    name="medusa",
    label="Medusa",
    recognise=lambda signs: (
        "medusa_num_heads" in signs.config
        or signs.config.get("model_type") == "medusa"
        or signs.has(r"\d+\.\d+\.linear\.|blocks\.\d+\.layers\.")
    ),
    difference="a Medusa head",
)
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
PEAGLE = HeadKind(
    name="p-eagle",
    label="P-EAGLE",
    recognise=lambda signs: "mask_hidden" in signs.names or "PEagle" in signs.architecture or signs.method == "peagle",
    difference="a P-EAGLE head, which drafts all tokens in parallel from a mask token",
    dialect=dialect_of,
)
