"""Links from pages to files of the repository work on GitHub as written, and on the site lead to pages of their own.

A relative link to another page or notebook becomes a link to its page; one to any other file or folder becomes a link
to a page with its source. A link to a missing file is a warning, and so an error.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from links import ROOT, page_of, rewritten
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging

_LOG = logging.getLogger(__name__)
_LARGEST = 400_000  # characters that are shown
_SHOWN = (".py", ".md", ".toml", ".json", ".jsonl", ".jinja", ".txt", ".ipynb", "")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register what reads pages, what writes links and what makes pages of sources."""
    app.connect("source-read", _read)
    app.connect("doctree-resolved", _resolve)
    app.connect("html-collect-pages", _sources)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": False}


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    def within(text: str) -> str:
        return rewritten(text, docname, warn=lambda what: _LOG.warning(what, location=docname))

    if docname.startswith("notebooks/"):
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = within("".join(cell["source"]))
        source[0] = json.dumps(notebook)
    else:
        source[0] = within(source[0])


def _resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for node in doctree.findall(nodes.reference):
        address = node.get("refuri", "")
        if address.startswith("repository:"):
            path, mark, anchor = address.removeprefix("repository:").partition("#")
            app.env.__dict__.setdefault("repository_sources", set()).add(path)
            up = "../" * docname.count("/")
            node["refuri"] = f"{up}source/{path}.html{mark}{anchor}"


def _sources(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    pending, done = sorted(app.env.__dict__.get("repository_sources", ())), set()
    while pending:
        path = pending.pop()
        if path in done:
            continue
        done.add(path)
        if (ROOT / path).is_dir():
            inside = [
                f"{path}/{one.name}{'/' * one.is_dir()}" for one in sorted((ROOT / path).iterdir()) if _shown(one)
            ]
            pending += [one.rstrip("/") for one in inside if page_of(one) is None]
            body = f"<ul>{''.join(_entry(app, path, one) for one in inside)}</ul>"
        else:
            body = _source(ROOT / path)
        yield (
            f"source/{path}",
            {"title": path, "body": f"<h1>{html.escape(path)}</h1>{body}", "parents": []},
            "page.html",
        )


def _shown(place: Path) -> bool:
    return not place.name.startswith((".", "__pycache__")) and (place.is_dir() or place.suffix in _SHOWN)


def _entry(app: Sphinx, folder: str, path: str) -> str:
    address = app.builder.get_relative_uri(f"source/{folder}", page_of(path) or f"source/{path.rstrip('/')}")
    return f'<li><a href="{address}">{html.escape(path.removeprefix(f"{folder}/"))}</a></li>'


def _source(place: Path) -> str:
    text = place.read_text(encoding="utf-8", errors="replace")
    if len(text) > _LARGEST:
        return f"<p>{len(text):,} characters: see the file in the repository.</p>"
    try:
        lexer = get_lexer_for_filename(place.name)
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(text, lexer, HtmlFormatter(linenos="inline", lineanchors="L"))
