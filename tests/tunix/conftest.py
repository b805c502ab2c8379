"""Tests of the engine for Tunix; `make tunix` runs them where it is installed."""

from __future__ import annotations

import importlib.util

import jax
import pytest

# Where Tunix is not installed, this folder is found in its place: a package without a file.
SPEC = importlib.util.find_spec("tunix")
collect_ignore_glob = [] if SPEC and SPEC.origin else ["test_*.py"]


@pytest.fixture(autouse=True)
def _as_tunix_promotes():
    """Tunix's models mix types and numbers of axes, in threads too."""
    options = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
