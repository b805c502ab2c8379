"""What `h200.py` measures, a part in each process, in the order of what a first contact must know."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h200_device as apart  # these lie beside this file
import h200_rounds as rounds
from h200_setting import FULL, REHEARSAL, Record, Setting

from eagle3_jax.reporting.gpu import gpu_problem
from eagle3_jax.rivals.memory import share_memory

NO_GPU = 3  # the exit code
Part = Callable[[Setting, Record], None]

# Seconds for each. What stands in one of these fits into one command.
FIRST: dict[str, tuple[int, Part]] = {
    "device": (70, apart.device),
    "text": (50, apart.text),
    "round": (220, rounds.round_parts),
    "floor": (30, apart.floor),
    "verify": (90, rounds.verify),
    "variants": (110, rounds.variants),
}
SECOND: dict[str, tuple[int, Part]] = {
    "batches": (200, rounds.batches),
    "profile": (60, apart.profile),
    "contexts": (80, rounds.contexts),
    "attention": (60, apart.attention),
    # Each of these has a process of its own and a cache directory that only they use, filled by the first.
    "compilation, nothing kept": (70, rounds.compilation),
    "compilation, autotuning kept": (60, rounds.compilation),
    "compilation, programs kept": (40, rounds.compilation),
}
PARTS = FIRST | SECOND


def clocks() -> str | None:
    """What the driver says of the GPU's clocks, heat and limits; ``None`` without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = "clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def main() -> int:
    """Measure one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("output", type=Path, help="The file of the whole run, which `h200.py` has begun.")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--rehearse", action="store_true")
    given = parser.parse_args()
    if given.part == "floor":
        share_memory(beside_vllm=False)  # PyTorch needs it
    problem = None if given.rehearse else gpu_problem(wanted=True)
    if problem is not None:
        print(f"{problem}; --rehearse tries tiny shapes on any device", file=sys.stderr)
        return NO_GPU
    setting, record = REHEARSAL if given.rehearse else FULL, Record(given.output, given.part, given.seconds)
    before = clocks()
    PARTS[given.part][1](setting, record)
    record.add("clocks", {"before": before, "after": clocks()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
