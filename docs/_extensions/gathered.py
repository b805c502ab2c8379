"""Copies the pages that are kept outside docs/: executed notebooks, and some Markdown files of the repository.

The copies go to ``docs/notebooks`` and ``docs/repository``, which are not under version control. A notebook that
``make notebooks`` has not executed is shown as written, with a note.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import nbformat
from links import NOTEBOOKS, PAGES, ROOT
from sphinx.application import Sphinx

_LIST = "repository/" + NOTEBOOKS.removesuffix(".md")
_CLAIMS = "repository/notebooks/claims"
_NOT_EXECUTED = (
    "```{note}\n"
    "This page shows the notebook as it is written: it was not executed before the site was built. "
    "`make notebooks` executes it.\n"
    "```"
)


def setup(app: Sphinx) -> dict[str, Any]:
    """Copy before anything is read."""
    app.connect("builder-inited", _gather)
    app.connect("source-read", _list, priority=100)  # before links are rewritten
    # The list depends on which notebooks exist.
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: [_LIST])
    return {"version": "1", "parallel_read_safe": True}


def notebooks() -> list[Path]:
    """Paths of the notebooks, relative to the root of the repository, in the order of their numbers."""
    found = [path for folder in ("", "gpu") for path in sorted((ROOT / "notebooks" / folder).glob("[0-9]*.ipynb"))]
    return [path.relative_to(ROOT) for path in found]


def _gather(app: Sphinx) -> None:
    if app.builder.name != "html":  # which has copied them
        return
    docs = Path(app.srcdir)
    for folder in ("notebooks", "repository"):
        shutil.rmtree(docs / folder, ignore_errors=True)
    for path in PAGES:
        _write(docs / "repository" / path, (ROOT / path).read_text(encoding="utf-8"))
    for path in notebooks():
        executed = ROOT / "build" / path
        notebook = nbformat.read(executed if executed.exists() else ROOT / path, as_version=4)
        if not executed.exists():
            notebook.cells.insert(1, nbformat.v4.new_markdown_cell(_NOT_EXECUTED, id="not-executed"))
        _write(docs / path, nbformat.writes(notebook))
    _write(docs / f"{_CLAIMS}.md", claims())


def claims() -> str:
    """A page with the list of claims at the end of every notebook."""
    page = (
        "# What the notebooks assert\n\n"
        "Every claim below is an assertion in the notebook that makes it; if one did not hold, `make notebooks` or "
        "`make gpu-notebooks` would fail.\n"
    )
    for path in notebooks():
        cells = nbformat.read(ROOT / path, as_version=4).cells
        prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        found = re.search(r"^## What was claimed and checked\n\n((?:(?:- |  ).*\n?)+)", prose, re.MULTILINE)
        if found is None:
            raise ValueError(f"{path} has no list 'What was claimed and checked'")
        title = prose.splitlines()[0].removeprefix("# ")
        page += f"\n## [{title}]({path.relative_to('notebooks').as_posix()})\n\n{found[1].strip()}\n"
    return page


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def _list(app: Sphinx, docname: str, source: list[str]) -> None:
    """The notebooks' place in the table of contents, below the page that lists them."""
    if docname == _LIST:
        pages = [path.with_suffix("") for path in notebooks()] + ["repository/notebooks/gpu/README", _CLAIMS]
        source[0] += "\n```{toctree}\n:hidden:\n:maxdepth: 1\n\n" + "".join(f"/{page}\n" for page in pages) + "```\n"
