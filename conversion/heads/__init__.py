"""The kinds of draft heads, in the order in which a checkpoint is asked. Recognising one needs no JAX."""

from __future__ import annotations

from conversion.heads import dflash, eagle1, eagle3, medusa, mtp, p_eagle
from conversion.heads.head import HeadCheckpoint, HeadKind, Layout, Signs, Stored


def _write_eagle3(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    from conversion.heads.eagle3_export import layout

    return layout(checkpoint, dialect)


HEADS: dict[str, HeadKind] = {
    kind.name: kind
    for kind in (
        medusa.KIND,
        mtp.KIND,
        dflash.KIND,
        p_eagle.KIND,
        eagle1.KIND,
        eagle3.KIND._replace(write=_write_eagle3),
    )
}
LOADABLE = ", ".join(kind.label for kind in HEADS.values() if kind.read is not None)

__all__ = ["HEADS", "LOADABLE", "HeadCheckpoint", "HeadKind", "Layout", "Signs", "Stored"]
