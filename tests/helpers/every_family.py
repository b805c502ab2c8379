"""Which families a run tries: one for each kind of layer, or all of them with ``--every-family``."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable

import pytest

_OPTION = "--every-family"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option."""
    with contextlib.suppress(ValueError):  # tests and validation in one run both ask for it
        parser.getgroup("support").addoption(
            _OPTION, action="store_true", help="Try every family of targets, not one for each kind of layer."
        )


def parametrize(metafunc: pytest.Metafunc, names: Iterable[str], few: Collection[str]) -> None:
    """Give a test its families, in the argument ``name``."""
    every = metafunc.config.getoption(_OPTION)
    marks = {name: () if name in few else pytest.mark.slow for name in names if every or name in few}
    metafunc.parametrize("name", [pytest.param(name, marks=mark) for name, mark in marks.items()])
