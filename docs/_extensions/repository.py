"""Links from pages to files of the repository, which work on GitHub as written, work on the site.

A relative link to another page or notebook becomes a link to its page; one to any other file, or a folder, a link to a
page with its source. A link to what does not exist is a warning, and so an error.
"""

from __future__ import annotations

import html
import json
import re
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
_LARGEST = 400_000  # bytes that are shown


def setup(app: Sphinx) -> dict[str, Any]:
    """Register what reads pages, what writes links and what makes pages of sources."""
    app.connect("source-read", _read)
    app.connect("doctree-resolved", _resolve)
    app.connect("html-collect-pages", _sources)
    return {"version": "1", "parallel_read_safe": False, "parallel_write_safe": False}


def _read(app: Sphinx, docname: str, source: list[str]) -> None:
    def warn(what: str) -> None:
        _LOG.warning(what, location=docname)

    if not docname.startswith("notebooks/"):
        source[0] = rewritten(source[0], docname, warn=warn)
        return
    notebook = json.loads(source[0])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cell["source"] = rewritten("".join(cell["source"]), docname, warn=warn)
    source[0] = json.dumps(notebook)


def _resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    for node in doctree.findall(nodes.reference):
        address = node.get("refuri", "")
        if not address.startswith("repository:"):
            continue
        path, _, anchor = address.removeprefix("repository:").partition("#")
        wanted = app.env.__dict__.setdefault("repository_sources", {})
        wanted.setdefault(docname, set()).add(path)
        node["refuri"] = (
            app.builder.get_relative_uri(docname, f"source/{path}") if app.builder.format == "html" else path
        )
        if anchor:
            node["refuri"] += f"#{anchor}"


def _sources(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    wanted = set().union(*app.env.__dict__.get("repository_sources", {}).values())
    pending, done = sorted(wanted), set()
    while pending:
        path = pending.pop()
        if path in done:
            continue
        done.add(path)
        place = ROOT / path
        if place.is_dir():
            inside = [one for one in sorted(place.iterdir()) if _shown(one)]
            body = "".join(_entry(app, path, one) for one in inside)
            pending += [f"{path}/{one.name}" for one in inside if page_of(f"{path}/{one.name}") is None]
            body = f"<ul>{body}</ul>"
        else:
            body = _source(place)
        title = html.escape(path)
        yield f"source/{path}", {"title": path, "body": f"<h1>{title}</h1>{body}", "parents": []}, "page.html"


def _shown(place: Path) -> bool:
    if place.name.startswith((".", "__pycache__")):
        return False
    return place.is_dir() or place.suffix in (".py", ".md", ".toml", ".json", ".jsonl", ".jinja", ".txt", ".ipynb", "")


def _entry(app: Sphinx, folder: str, place: Path) -> str:
    path = f"{folder}/{place.name}"
    page = page_of(path) or f"source/{path}"
    address = app.builder.get_relative_uri(f"source/{folder}", page)
    return f'<li><a href="{address}">{html.escape(place.name)}{"/" if place.is_dir() else ""}</a></li>'


def _source(place: Path) -> str:
    text = place.read_text(encoding="utf-8", errors="replace")
    if len(text) > _LARGEST:
        return f"<p>{len(text):,} characters: see the file in the repository.</p>"
    try:
        lexer = get_lexer_for_filename(place.name)
    except ClassNotFound:
        lexer = TextLexer()
    shown = highlight(text, lexer, HtmlFormatter(linenos="inline", lineanchors="line", cssclass="highlight"))
    return re.sub(r'id="line-(\d+)" name="line-\d+"', r'id="L\1"', shown)
