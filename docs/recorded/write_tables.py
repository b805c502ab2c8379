"""Writes the tables and records on the pages between their marks: ``python docs/recorded/write_tables.py``.

A test compares the pages with what this writes. The other files of this folder make the tables.
"""

from __future__ import annotations

from pathlib import Path

import chat_model
import expected
import gpu
import methods
import options
import speeds
import support
import validated

ROOT = Path(__file__).resolve().parent.parent.parent


def tables() -> dict[str, dict[str, str]]:
    """For each page, the texts by the names of their marks."""
    found: dict[str, dict[str, str]] = {
        "docs/checkpoints.md": {"families": support.text()},
        "docs/validation.md": {"record": validated.text()},
    }
    for parts in (
        methods.parts(methods.record()),
        speeds.parts(),
        expected.parts(),
        options.parts(),
        chat_model.parts(),
        gpu.parts(),
    ):
        for page, named in parts.items():
            found.setdefault(page, {}).update(named)
    return found


def filled(text: str, named: dict[str, str]) -> str:
    """A page with its tables in their places.

    Raises:
        ValueError: A mark is missing.
    """
    for name, part in named.items():
        begin = f"<!-- {name}: written by docs/recorded/write_tables.py -->"
        end = f"<!-- end of {name} -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not opened or not closed:
            raise ValueError(f"there is no place for {name!r}: put {begin} and {end} around it")
        text = f"{before}{begin}\n\n{part}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for page, named in tables().items():
        place = ROOT / page
        place.write_text(filled(place.read_text(encoding="utf-8"), named), encoding="utf-8")
