"""The kinds of draft heads, in the order in which a checkpoint is asked. Recognising one needs no JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eagle3_jax.conversion.heads import dflash, eagle1, eagle3, medusa, mtp, p_eagle
from eagle3_jax.conversion.heads.head import HeadCheckpoint, HeadKind, Layout, Signs, Stored

if TYPE_CHECKING:
    from eagle3_jax.conversion.checks import Check


def _write_eagle3(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    from eagle3_jax.conversion.heads.eagle3_export import layout

    return layout(checkpoint, dialect)


def _examine_eagle3(target: Any, head: HeadCheckpoint) -> list[Check]:
    from eagle3_jax.conversion.heads.eagle3_checks import examine

    return examine(target, head)


HEADS: dict[str, HeadKind] = {
    kind.name: kind
    for kind in (
        medusa.KIND,
        mtp.KIND,
        dflash.KIND,
        p_eagle.KIND,
        eagle1.KIND,
        eagle3.KIND._replace(write=_write_eagle3, examine=_examine_eagle3),
    )
}


def kind_of(config: Any) -> HeadKind:
    """The kind of head that a configuration describes: variants of a method, as DSpark of DFlash, have one."""
    return next(kind for kind in HEADS.values() if kind.classes and type(config) is kind.classes()[0])


LOADABLE = ", ".join(kind.label for kind in HEADS.values() if kind.read is not None)

__all__ = ["HEADS", "LOADABLE", "HeadCheckpoint", "HeadKind", "Layout", "Signs", "Stored", "kind_of"]
