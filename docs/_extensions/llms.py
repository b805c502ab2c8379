"""The site for language models: ``llms.txt`` lists the pages, each as Markdown next to its HTML."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

# Prose begins with none of these: headings, code, tables, lists, directives, images, HTML,
# attributes, emphasis.
_NO_PROSE = ("#", "`", "|", "-", ":", "!", "<", "(", "*")


def setup(app: Sphinx) -> dict[str, Any]:
    """Write the Markdown after the HTML."""
    app.connect("build-finished", _write)
    return {"version": "1", "parallel_read_safe": True}


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return

    # In a process of its own: two applications in one process share docutils' registry of
    # directives.
    sphinx = [sys.executable, "-m", "sphinx", "-q"]
    command = [*sphinx, "-b", "markdown", "-d", app.doctreedir, app.srcdir, app.outdir]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExtensionError(f"the pages could not be written as Markdown: {done.stderr.strip()}")

    lines = [
        "# eagle3-jax",
        "",
        f"> {app.config.html_short_title}",
        "",
        "Every page of this site is also Markdown:",
    ]
    for caption, docnames in _sections(app):
        lines += ["", f"## {caption}", ""]
        for docname in docnames:
            text = (Path(app.outdir) / f"{docname}.md").read_text(encoding="utf-8")
            lines.append(
                f"- [{app.env.titles[docname].astext()}]({docname}.md){_first_sentence(text)}"
            )

    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _sections(app: Sphinx) -> list[tuple[str, list[str]]]:
    """The pages by the captions of the table of contents; pages outside it come last."""
    sections = []
    seen = {app.config.root_doc}

    def below(docname: str) -> list[str]:
        if docname in seen or docname not in app.env.titles:
            return []
        seen.add(docname)
        return [
            docname,
            *(page for child in app.env.toctree_includes.get(docname, []) for page in below(child)),
        ]

    for tree in app.env.get_doctree(app.config.root_doc).findall(addnodes.toctree):
        pages = [page for docname in tree["includefiles"] for page in below(docname)]
        sections.append((tree.get("caption") or "Pages", pages))

    remaining = sorted(set(app.env.all_docs) - seen)
    return [*sections, ("Optional", remaining)] if remaining else sections


def _first_sentence(text: str) -> str:
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if words and not words.startswith(_NO_PROSE):
            return ": " + re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.split(r"(?<=\.)\s", words)[0])
    return ""
