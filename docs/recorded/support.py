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
from typing import Any

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


Cell = tuple[str, str, str, str]  # family, precision, draft, what


def cases() -> Mapping[str, Any]:
    """The record; empty where there is none."""
    return json.loads(RECORD.read_text(encoding="utf-8"))["cases"] if RECORD.exists() else {}


def cells(recorded: Mapping[str, Any]) -> dict[Cell, tuple[bool, set[str]]]:
    """For each cell, whether all its cases passed, and the files of their tests."""
    found: dict[Cell, tuple[bool, set[str]]] = {}
    for name, case in recorded.items():
        for cell in map(tuple, case["cells"]):
            passed, files = found.get(cell, (True, set()))
            found[cell] = passed and case["passed"], files | {name.partition("::")[0]}
    return found


def text_of(found: Mapping[Cell, tuple[bool, set[str]]], family: str, precision: str, what: str) -> str:
    """A cell of the page."""
    known = [(draft, found[cell]) for draft in DRAFTS if (cell := (family, precision, draft, what)) in found]
    if not known:
        return "–"
    first, *others = sorted(set().union(*(files for _, (_, files) in known)))
    shown = ", ".join(draft if passed else f"**{draft} fails**" for draft, (passed, _) in known)
    return f"[{shown}](../{first})" + "".join(f", [{Path(file).stem}](../{file})" for file in others)


def lines(found: Mapping[Cell, tuple[bool, set[str]]]) -> Iterator[str]:
    """A table for every precision that a test covers, and a sentence on the others."""
    for precision in PRECISIONS:
        covered = {family for family, known, _, _ in found if known == precision}
        if not covered:
            yield f"**`{precision}`**: no recorded test covers a family in it.\n"
            continue
        yield f"**`{precision}`**\n"
        yield f"| family | `model_type` | {' | '.join(WHAT.values())} |"
        yield "|---" * (2 + len(WHAT)) + "|"
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
