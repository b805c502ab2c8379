"""Draft heads that are recognised and not loaded."""

from __future__ import annotations

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
