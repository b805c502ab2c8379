"""Pages that lie elsewhere: executed notebooks, and some Markdown files of the repository.

They are copied into folders of docs/ that are not under version control. A notebook that was not executed yet is shown
as it is written, and says so; `make notebooks` executes them all.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

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
    # Whatever notebooks there were in an earlier build.
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: [_LIST])
    return {"version": "1", "parallel_read_safe": True}


def notebooks() -> list[Path]:
    """The notebooks, paths from the root of the repository, in the order of their numbers."""
    found = sorted((ROOT / "notebooks").rglob("*.ipynb"), key=lambda path: (len(path.parts), path))
    return [
        path.relative_to(ROOT) for path in found if path.stem[0].isdigit() and ".ipynb_checkpoints" not in path.parts
    ]


def _gather(app: Sphinx) -> None:
    docs = Path(app.srcdir)
    for folder in ("notebooks", "repository"):
        shutil.rmtree(docs / folder, ignore_errors=True)
    for path in PAGES:
        if (ROOT / path).exists():
            _write(docs / "repository" / path, (ROOT / path).read_text(encoding="utf-8"))
    for path in notebooks():
        executed = ROOT / "build" / path
        written = (executed if executed.exists() else ROOT / path).read_text(encoding="utf-8")
        notebook = json.loads(written)
        # Each cell needs an id; and a page's own metadata are not to ask for execution.
        for number, cell in enumerate(notebook["cells"]):
            cell.setdefault("id", f"cell-{number}")
        if not executed.exists():
            note = {"cell_type": "markdown", "id": "not-executed", "metadata": {}, "source": _NOT_EXECUTED}
            notebook["cells"].insert(1, note)
        notebook |= {"nbformat": 4, "nbformat_minor": 5}
        _write(docs / path, json.dumps(notebook))

    _write(docs / f"{_CLAIMS}.md", claims())


def claims() -> str:
    """A page of what every notebook says at its end that it asserted."""
    page = [
        "# What the notebooks assert",
        "",
        "Every claim below is an assertion in the notebook that makes it; if one did not hold, `make notebooks` or "
        "`make gpu-notebooks` would fail.",
    ]
    for path in notebooks():
        cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
        prose = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        title = prose.splitlines()[0].removeprefix("# ")
        said = re.search(r"^## What was claimed and checked\n\n((?:(?:- |  ).*\n?)+)", prose, re.MULTILINE)
        if said is None:
            raise ValueError(f"{path} does not say what was claimed and checked")
        page += ["", f"## [{title}]({path.relative_to('notebooks').as_posix()})", "", said[1].strip()]
    return "\n".join(page) + "\n"


def _write(place: Path, text: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def _list(app: Sphinx, docname: str, source: list[str]) -> None:
    """The notebooks' place in the table of contents, below the page that lists them."""
    if docname != _LIST:
        return
    pages = [path.with_suffix("").as_posix() for path in notebooks()]
    if (ROOT / "notebooks/gpu/README.md").exists():
        pages.append("repository/notebooks/gpu/README")
    pages.append(_CLAIMS)
    source[0] += "\n".join(
        ["", "```{toctree}", ":hidden:", ":maxdepth: 1", "", *(f"/{page}" for page in pages), "```", ""]
    )
