"""Checkpoints in and out: Hugging Face targets, EAGLE-3 heads in every dialect, native directories.

Each name is imported when it is first used: reading a configuration needs no JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from conversion.checks import Check
    from conversion.doctor import diagnose
    from conversion.errors import CheckpointError, TargetNeededError
    from conversion.families import FAMILIES, Family
    from conversion.heads.head import HeadCheckpoint
    from conversion.heads.writing import write_head
    from conversion.inspect import Description, describe
    from conversion.kinds import identify
    from conversion.native import write_native
    from conversion.reading import convert, read_head, read_target
    from conversion.targets import TargetCheckpoint, write_target

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
        raise AttributeError(f"module 'conversion' has no attribute {name!r}")
    return getattr(importlib.import_module(f"conversion.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
