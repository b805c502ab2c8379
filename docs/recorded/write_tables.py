"""Writes the tables on the pages between their marks: ``python docs/recorded/write_tables.py``.

A test compares the pages with what this writes. The other files of this folder make the tables. Numbers in prose are
quotations: ``tests/docs/test_records.py`` compares them with the records.
"""

from __future__ import annotations

import certificates
import chat_model
import expected
import gpu
import loads
import methods
import options
import speeds
import support
import validated
from page_tables import ROOT


def tables() -> dict[str, dict[str, str]]:
    """Returns the tables of each page by the names of their marks."""
    pages: dict[str, dict[str, str]] = {}
    for module in (methods, speeds, expected, options, chat_model, gpu, support, validated, certificates, loads):
        for page, marked in module.parts().items():
            pages.setdefault(page, {}).update(marked)
    return pages


def filled(text: str, marked: dict[str, str]) -> str:
    """Returns a page with its tables in their places.

    Raises:
        ValueError: A mark is missing.
    """
    for name, part in marked.items():
        begin = f"<!-- {name}: written by docs/recorded/write_tables.py -->"
        end = f"<!-- end of {name} -->"
        before, opened, remaining = text.partition(begin)
        _, closed, after = remaining.partition(end)
        if not opened or not closed:
            raise ValueError(f"there is no place for {name!r}: put {begin} and {end} around it")
        text = f"{before}{begin}\n\n{part}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    for page, marked in tables().items():
        path = ROOT / page
        path.write_text(filled(path.read_text(encoding="utf-8"), marked), encoding="utf-8")
