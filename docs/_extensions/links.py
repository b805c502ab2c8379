"""Relative links of pages: where they lead in the repository, and where on the site."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Markdown files outside docs/ that are pages of the site.
NOTEBOOKS = "notebooks/README.md"
PAGES = ("validation/README.md", "CHANGELOG.md", "eagle3_jax/assets/README.md", NOTEBOOKS, "notebooks/gpu/README.md")

_ADDRESS = re.compile(r"(?<=\]\()(?!\w+:|#)[^)\s]+(?=\))|(?<=\]: )(?!\w+:|#)\S+$", re.MULTILINE)
_CODE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*\s*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_CODE_OR_IMAGE = re.compile(_CODE.pattern + r"|!\[[^\]]*\]\([^)\s]+\)", _CODE.flags)


def page_of(path: str) -> str | None:
    """The page of the site that shows a file of the repository, without suffix, if one does."""
    stem, suffix = posixpath.splitext(path)
    if suffix == ".md" and path.startswith("docs/"):
        return stem.removeprefix("docs/")
    if re.fullmatch(r"notebooks/(gpu/)?\d\w+\.(ipynb|py)", path):
        return stem
    return f"repository/{stem}" if path in PAGES else None


def home_of(docname: str) -> str:
    """Path of the file of a page in the repository."""
    if docname.startswith("repository/"):
        return docname.removeprefix("repository/") + ".md"
    return f"{docname}.ipynb" if docname.startswith("notebooks/") else f"docs/{docname}.md"


def prose_of(text: str) -> str:
    """A Markdown text without its code."""
    return _CODE.sub("", text)


def links_in(text: str) -> Iterator[str]:
    """The relative links of a Markdown text, outside code; images among them."""
    yield from (match[0] for match in _ADDRESS.finditer(prose_of(text)))


def rewritten(text: str, docname: str, *, warn: Callable[[str], None]) -> str:
    """A page's text with its links to the repository as links within the site.

    Args:
        text: Markdown, as it is read on GitHub.
        docname: The page.
        warn: Called for each link to a missing file.
    """
    folder = posixpath.dirname(home_of(docname))

    def within(match: re.Match[str]) -> str:
        target, _, anchor = match[0].partition("#")
        anchor = anchor and f"#{anchor}"
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            warn(f"a link to {path}, which does not exist")
            return match[0]
        page = page_of(path)
        if page is None:
            return f"repository:{path}{anchor}"
        suffix = ".ipynb" if page.startswith("notebooks/") else ".md"
        return posixpath.relpath(page + suffix, posixpath.dirname(docname) or ".") + anchor

    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    shown = _ADDRESS.sub(within, _CODE_OR_IMAGE.sub(keep, text))
    return re.sub("\0(\\d+)\0", lambda match: kept[int(match[1])], shown)
