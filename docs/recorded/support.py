"""The tables of families in docs/checkpoints.md, out of support.json, which runs of the tests write.

    pytest tests/models/test_families.py tests/core/test_target_contract.py --record-support docs/recorded/support.json
    PYTHONPATH=tests/helpers pytest validation -p support_record --record-support docs/recorded/support.json
    python docs/recorded/write_tables.py      # writes them between their marks

A cell names the drafts for which every recorded case of it passed, and links to the tests. A dash means that no
recorded test covers the cell. Models of images that are read as their language model have a row where a test covers
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from eagle3_jax.conversion.families import FAMILIES, WRAPPERS

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RECORD = HERE / "support.json"
PRECISIONS = ("float32", "bfloat16", "mixed", "fp8")
DRAFTS = ("plain", "chain", "tree")
LEGEND = (
    "A linked cell is covered by that test. A dash means untested."
    " A family without a row is untested in that precision."
)
WHAT = {
    "parity": "compared with transformers",
    "contract": "target contract",
    "vLLM": "compared with vLLM",
    "mesh": "on a mesh",
    "AOT": "compiled for accelerators",
}


class Cell(NamedTuple):
    """Where a case belongs."""

    family: str
    precision: str
    draft: str
    what: str


class Found(NamedTuple):
    """What is known of a cell.

    Attributes:
        passed: Whether every case of it did.
        files: The tests' files.
    """

    passed: bool
    files: frozenset[str]


def cases() -> Mapping[str, Any]:
    """The record; empty where there is none."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["cases"] if RECORD.exists() else {}


def cells(recorded: Mapping[str, Any]) -> dict[Cell, Found]:
    """What the cases say together."""
    found: dict[Cell, Found] = {}
    for name, case in recorded.items():
        for cell in (Cell(*names) for names in case["cells"]):
            before = found.get(cell, Found(True, frozenset()))
            found[cell] = Found(before.passed and case["passed"], before.files | {name.partition("::")[0]})
    return found


def text_of(found: Mapping[Cell, Found], family: str, precision: str, what: str) -> str:
    """A cell of the page."""
    known = [(draft, found[cell]) for draft in DRAFTS if (cell := Cell(family, precision, draft, what)) in found]
    if not known:
        return "–"
    files = sorted({file for _, one in known for file in one.files})
    shown = ", ".join(draft if one.passed else f"**{draft} fails**" for draft, one in known)
    more = "".join(f", [{Path(file).stem}](../{file})" for file in files[1:])
    return f"[{shown}](../{files[0]}){more}"


def lines(found: Mapping[Cell, Found]) -> Iterator[str]:
    """A table for every precision that a test covers, and a sentence on the others."""
    for precision in PRECISIONS:
        if not any(cell.precision == precision for cell in found):
            yield f"**`{precision}`**: no recorded test covers a family in it.\n"
            continue
        yield f"**`{precision}`**\n"
        yield f"| family | `model_type` | {' | '.join(WHAT.values())} |"
        yield "|---" * (2 + len(WHAT)) + "|"
        covered = {cell.family for cell in found if cell.precision == precision}
        for family in (*FAMILIES.values(), *(one for name, one in WRAPPERS.items() if name in covered)):
            if family.model_type not in covered:
                continue
            shown = " | ".join(text_of(found, family.model_type, precision, what) for what in WHAT)
            yield f"| {family.label} | `{family.model_type}` | {shown} |"
        yield ""


def text(recorded: Mapping[str, Any]) -> str:
    """What is between the marks of the page."""
    tables = "\n".join(lines(cells(recorded))).rstrip("\n")
    return f"{LEGEND}\n\n{tables}"
