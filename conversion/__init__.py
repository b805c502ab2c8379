"""Checkpoints in and out: Hugging Face targets, EAGLE-3 heads in every dialect, native directories.

Each name is imported when it is first used: reading a configuration needs no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3_jax.conversion.checks import Check
    from eagle3_jax.conversion.doctor import diagnose
    from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
    from eagle3_jax.conversion.families import FAMILIES, Family
    from eagle3_jax.conversion.heads.head import HeadCheckpoint
    from eagle3_jax.conversion.heads.writing import write_head
    from eagle3_jax.conversion.inspect import Description, describe
    from eagle3_jax.conversion.kinds import identify
    from eagle3_jax.conversion.native import write_native
    from eagle3_jax.conversion.reading import convert, read_head, read_target
    from eagle3_jax.conversion.targets import TargetCheckpoint, write_target

__all__ = [
    "FAMILIES",
    "Check",
    "CheckpointError",
    "Description",
    "Family",
    "HeadCheckpoint",
    "TargetCheckpoint",
    "TargetNeededError",
    "convert",
    "describe",
    "diagnose",
    "identify",
    "read_head",
    "read_target",
    "write_head",
    "write_native",
    "write_target",
]

# The imports above once more, for a running program; a test holds the two equal.
_NAMES = {
    "checks": "Check",
    "doctor": "diagnose",
    "heads.head": "HeadCheckpoint",
    "errors": "CheckpointError TargetNeededError",
    "families": "FAMILIES Family",
    "heads.writing": "write_head",
    "inspect": "Description describe",
    "kinds": "identify",
    "native": "write_native",
    "reading": "convert read_head read_target",
    "targets": "TargetCheckpoint write_target",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'eagle3_jax.conversion' has no attribute {name!r}")
    return getattr(importlib.import_module(f"eagle3_jax.conversion.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
