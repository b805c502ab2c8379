"""Puts the modules that notebooks share on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "notebooks"))
