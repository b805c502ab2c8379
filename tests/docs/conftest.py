"""Puts the modules that notebooks share, and the site's extensions, on the path."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "notebooks"), str(ROOT / "docs" / "_extensions")]
