"""Pages that are kept outside docs/, and links that work both on GitHub and on the site.

Executed notebooks and some Markdown files of the repository are copied to ``docs/notebooks`` and
``docs/repository``, which are not under version control. A notebook that ``make notebooks`` has not
executed is shown as written, with a note. A relative link to a page or notebook becomes a link to
its page. A link to any other file becomes a download. A link to a missing file is a warning, and so
an error.
"""

from __future__ import annotations

import json
import posixpath
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIST = "notebooks/README.md"
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", LIST, "notebooks/gpu/README.md")
_CLAIMS = "repository/notebooks/claims"
_NOT_EXECUTED = (
    "```{note}\n"
    "This page shows the notebook as it is written: it was not executed before the site was built. "
    "`make notebooks` executes it.\n"
    "```"
)
_CODE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*\s*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_IMAGE = r"!\[[^\]]*\]\([^)\s]+\)"
_ADDRESS = r"(?P<address>(?<=\]\()(?!\w+:|#)[^)\s]+(?=\))|(?<=\]: )(?!\w+:|#)\S+$)"
_CODE_IMAGE_OR_ADDRESS = re.compile(f"{_CODE.pattern}|{_IMAGE}|{_ADDRESS}", _CODE.flags)


def setup(app: Any) -> dict[str, Any]:
    """Copy pages before anything is read, and rewrite links while pages are read."""
    app.connect("builder-inited", _copy)
    app.connect("source-read", _read)
    # The list of notebooks depends on which notebooks exist.
    app.connect(
        "env-get-outdated",
        lambda app, env, added, changed, removed: ["repository/notebooks/README"],
    )
    return {"version": "1", "parallel_read_safe": True}


# ---------------------------------------------------------------- copies


def notebooks() -> list[Path]:
    """Paths of the notebooks in the order of their numbers, relative to the root."""
    paths = [
        path
        for folder in ("", "gpu")
        for path in sorted((ROOT / "notebooks" / folder).glob("[0-9]*.ipynb"))
    ]
    return [path.relative_to(ROOT) for path in paths]


def _copy(app: Any) -> None:
    if app.builder.name != "html":  # another builder reads the copies of this one
        return

    docs = Path(app.srcdir)
    for folder in ("notebooks", "repository"):
        shutil.rmtree(docs / folder, ignore_errors=True)

    texts = {f"repository/{path}": (ROOT / path).read_text(encoding="utf-8") for path in PAGES}
    for path in notebooks():
        executed = ROOT / "build" / path
        notebook = json.loads(
            (executed if executed.exists() else ROOT / path).read_text(encoding="utf-8")
        )
        if not executed.exists():
            note = {
                "cell_type": "markdown",
                "id": "not-executed",
                "metadata": {},
                "source": _NOT_EXECUTED,
            }
            notebook["cells"].insert(1, note)
        texts[str(path)] = json.dumps(notebook)

    for path, text in (texts | {f"{_CLAIMS}.md": claims()}).items():
        (docs / path).parent.mkdir(parents=True, exist_ok=True)
        (docs / path).write_text(text, encoding="utf-8")


def claims() -> str:
    """A page with the list of claims at the end of every notebook."""
    page = (
        "# What the notebooks assert\n\nEvery claim below is an assertion in the notebook that"
        " makes it; if one did not hold, `make notebooks` or `make gpu-notebooks` would fail.\n"
    )

    for path in notebooks():
        cells = json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]
        prose = "\n".join(
            "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
        )
        claim_list = re.search(r"^## Checked claims\n\n((?:(?:- |  ).*\n?)+)", prose, re.MULTILINE)
        if claim_list is None:
            raise ValueError(f"{path} has no list 'Checked claims'")

        title = prose.splitlines()[0].removeprefix("# ")
        address = path.relative_to("notebooks").as_posix()
        page += f"\n## [{title}]({address})\n\n{claim_list[1].strip()}\n"

    return page


# ---------------------------------------------------------------- links


def prose_of(text: str) -> str:
    """A Markdown text without its code."""
    return _CODE.sub("", text)


def page_of(path: str) -> str | None:
    """The page of the site that shows a file of the repository, with its suffix, if one does."""
    stem, suffix = posixpath.splitext(path)
    if suffix == ".md" and path.startswith("docs/"):
        return path.removeprefix("docs/")
    if re.fullmatch(r"notebooks/(gpu/)?\d\w+\.(ipynb|py)", path):
        return f"{stem}.ipynb"
    return f"repository/{path}" if path in PAGES else None


def _read(app: Any, docname: str, source: list[str]) -> None:
    from sphinx.util import logging

    warn = partial(logging.getLogger(__name__).warning, location=docname)
    if docname.startswith("notebooks/"):
        notebook = json.loads(source[0])
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = rewritten("".join(cell["source"]), docname, warn=warn)
        source[0] = json.dumps(notebook)
        return

    source[0] = rewritten(source[0], docname, warn=warn)
    if docname == "repository/notebooks/README":
        # The page that lists the notebooks has them below it in the table of contents.
        entries = "".join(f"/{path.with_suffix('')}\n" for path in notebooks())
        entries += f"/repository/notebooks/gpu/README\n/{_CLAIMS}\n"
        source[0] += f"\n```{{toctree}}\n:hidden:\n:maxdepth: 1\n\n{entries}```\n"


def rewritten(text: str, docname: str, *, warn: Callable[[str], None]) -> str:
    """The text of a page, with its links to the repository as links within the site."""
    home = (
        docname.removeprefix("repository/")
        if docname.startswith(("repository/", "notebooks/"))
        else f"docs/{docname}"
    )

    def within(match: re.Match[str]) -> str:
        if match["address"] is None:
            return match[0]

        target, mark, anchor = match[0].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), target))
        if not (ROOT / path).is_file():
            warn(f"a link to {path}, which is not a file")
            return match[0]

        page = page_of(path)
        here = posixpath.dirname(docname) or "."
        if page is None:
            return "path:" + posixpath.relpath(f"../{path}", here)
        return posixpath.relpath(page, here) + mark + anchor

    return _CODE_IMAGE_OR_ADDRESS.sub(within, text)
