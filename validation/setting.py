"""What a run of ``pytest validation`` was asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is validated, and where.

    Attributes:
        gpu: A run with ``--gpu``.
        rehearsal: ``--gpu`` without a GPU: the flow, not the figures.
        quick: One case of every check, and few speeds.
        target: Directory or hub id; ``None`` for the default.
        drafter: Directory or hub id; ``None`` for the default.
        prompt_files: JSONL files; empty for the default.
        price_per_hour: Of the machine.
    """

    gpu: bool
    rehearsal: bool
    quick: bool
    target: str | None
    drafter: str | None
    prompt_files: tuple[Path, ...]
    price_per_hour: float | None
