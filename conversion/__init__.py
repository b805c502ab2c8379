"""Reads and writes checkpoints: Hugging Face targets, heads in every dialect, native ones."""

from eagle3_jax.conversion.doctor import diagnose
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
from eagle3_jax.conversion.families import FAMILIES, Family
from eagle3_jax.conversion.heads import HeadCheckpoint, write_head
from eagle3_jax.conversion.heads.head import Check
from eagle3_jax.conversion.inspect import Description, describe
from eagle3_jax.conversion.native import write_native
from eagle3_jax.conversion.reading import convert, identify, read_head, read_target
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
