"""Draft heads that are recognised and not loaded."""

from __future__ import annotations

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
