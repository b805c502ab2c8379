"""The version of the code that runs."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent


def git() -> dict[str, Any] | str:
    """Returns the commit, and whether files differ from it."""
    try:
        # An archive may be unpacked inside some other repository.
        if _git("rev-parse", "--show-prefix"):
            return "not a checkout"
        return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return "not a checkout"


def _git(*arguments: str) -> str:
    command = ("git", "-C", str(ROOT), *arguments)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()
