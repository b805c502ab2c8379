"""Puts the modules that notebooks share, and the site's extensions, on the path."""

import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "notebooks"), str(ROOT / "docs" / "_extensions")]


@pytest.fixture(autouse=True)
def _ranks_promote() -> Iterator[None]:
    """Code of pages, notebooks and examples is written for readers, without every new axis."""
    with jax.numpy_rank_promotion("allow"):
        yield
