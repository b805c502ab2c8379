"""On a narrow screen each row of a wide table becomes a block, in which a cell names its column."""

from __future__ import annotations

import html
from typing import Any

_FEWEST = 4  # columns; the words of fewer columns wrap


def setup(app: Any) -> dict[str, Any]:
    """Label the cells of tables after all references are resolved."""
    app.connect("doctree-resolved", _label)
    return {"version": "1", "parallel_read_safe": True}


def _label(app: Any, doctree: Any, docname: str) -> None:
    from docutils import nodes

    if app.builder.name != "html":
        return

    for table in doctree.findall(nodes.table):
        heads = [
            entry.astext()
            for head in table.findall(nodes.thead)
            for entry in head.findall(nodes.entry)
        ]
        if len(heads) < _FEWEST:
            continue

        table["classes"].append("by-row")
        for row in [row for body in table.findall(nodes.tbody) for row in body.findall(nodes.row)]:
            for head, entry in list(zip(heads, row.children, strict=False))[1:]:
                if entry.astext().strip():
                    # An attribute and no text, so that the search does not find the names of
                    # columns in every row.
                    label = f'<span class="column" data-name="{html.escape(head)}"></span>'
                    entry.insert(0, nodes.raw("", label, format="html"))
