"""What the support matrix knows: which cells of it a test covers, and whether it passed.

    pytest tests/models/test_families.py --record-support docs/recorded/support.json

A test says ``@pytest.mark.covers(what="parity", draft=("chain", "tree"), family="qwen3")``; a family, a precision or a
draft may come from its parameters instead, by a function of them: ``family=lambda name: RECIPES[name].model_type``. The
record has one entry a case, so that a run of some tests leaves what it knows of the others.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

WHAT = ("parity", "contract", "vLLM", "mesh", "AOT")
PRECISIONS = ("float32", "bfloat16", "mixed", "fp8")
DRAFTS = ("plain", "chain", "tree")
_MARK = (
    "covers(what, family, precision='float32', draft='plain'): cells of the support matrix that the test fills "
    "(tests/helpers/support_record.py)"
)
_OPTION = "--record-support"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that names the record."""
    with contextlib.suppress(ValueError):  # tests and validation in one run both ask for it
        parser.getgroup("support").addoption(_OPTION, metavar="FILE", help="Add what passed to the support matrix.")


def pytest_configure(config: pytest.Config) -> None:
    """The marker, and what listens to results when a record is asked for."""
    config.addinivalue_line("markers", _MARK)
    place = config.getoption(_OPTION, default=None)
    if place and not config.pluginmanager.has_plugin("support-record"):
        config.pluginmanager.register(Recorder(Path(place)), "support-record")


def cells_of(item: Any) -> list[list[str]]:
    """``[family, precision, draft, what]`` of every cell that a test covers; only those that the matrix has."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    cells = []
    for mark in item.iter_markers("covers"):
        said = {"precision": "float32", "draft": "plain", **mark.kwargs}
        values = {name: _values(value, parameters) for name, value in said.items()}
        for name, known in (("what", WHAT), ("precision", PRECISIONS), ("draft", DRAFTS)):
            if unknown := set(values[name]) - set(known):
                raise ValueError(f"{item.nodeid} covers {name} {sorted(unknown)}; expected some of {', '.join(known)}")
        cells += itertools.product(values["family"], values["precision"], values["draft"], values["what"])
    return [list(cell) for cell in cells]


def _values(said: Any, parameters: dict[str, Any]) -> tuple[str, ...]:
    """One value, several, or what a function of the test's parameters gives; none for ``None``."""
    if callable(said):
        said = said(**{name: parameters[name] for name in inspect.signature(said).parameters})
    if said is None:
        return ()
    return (said,) if isinstance(said, str) else tuple(said)


class Recorder:
    """Adds the results of a run to a record, whose file need not be there."""

    def __init__(self, place: Path):
        self.place = place
        self.cells: dict[str, list[list[str]]] = {}
        self.passed: dict[str, bool] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """What every test covers."""
        self.cells |= {item.nodeid: found for item in items if (found := cells_of(item))}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test passed when its call did and nothing around it failed; one that is skipped says nothing."""
        if report.nodeid in self.cells and not report.skipped and (report.when == "call" or report.failed):
            self.passed[report.nodeid] = report.passed and self.passed.get(report.nodeid, True)

    def pytest_sessionfinish(self) -> None:
        """Write them into the record, beside what other runs found."""
        old = json.loads(self.place.read_text(encoding="utf-8"))["cases"] if self.place.exists() else {}
        new = {name: {"passed": passed, "cells": self.cells[name]} for name, passed in self.passed.items()}
        cases = dict(sorted((old | new).items()))
        lines = (f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
        self.place.write_text('{"cases": {\n' + ",\n".join(lines) + "\n}}\n", encoding="utf-8")
