"""Checkpoints in and out: Hugging Face targets, EAGLE-3 heads in every dialect, native directories."""

from conversion.doctor import Check, diagnose
from conversion.eagle3 import HeadCheckpoint
from conversion.errors import CheckpointError, TargetNeededError
from conversion.export import write_head
from conversion.inspect import Description, describe
from conversion.kinds import identify
from conversion.llama import TargetCheckpoint, write_target
from conversion.native import write_native
from conversion.reading import convert, read_head, read_target

__all__ = [
    "Check",
    "CheckpointError",
    "Description",
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
