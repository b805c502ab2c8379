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

_LINK = re.compile(r"\]\((?!\w+:|#)([^)\s]+)\)")
_NAMED = re.compile(r"^(\[[^\]^]+\]: )(?!\w+:|#)(\S+)$", re.MULTILINE)
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)\s]+\)")
_FENCE = re.compile(r"^(`{3,})[^\n]*\n.*?^\1`*\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")


def page_of(path: str) -> str | None:
    """The page of the site that shows a file of the repository, without suffix, if one does."""
    stem, suffix = posixpath.splitext(path)
    if suffix == ".md" and path.startswith("docs/"):
        return stem.removeprefix("docs/")
    if path.startswith("notebooks/") and suffix in (".ipynb", ".py") and path != "notebooks/run.py":
        return stem
    return f"repository/{stem}" if path in PAGES else None


def home_of(docname: str) -> str:
    """Where the file of a page lies in the repository."""
    if docname.startswith("repository/"):
        return docname.removeprefix("repository/") + ".md"
    return f"{docname}.ipynb" if docname.startswith("notebooks/") else f"docs/{docname}.md"


def prose_of(text: str) -> str:
    """A Markdown text without its code."""
    return _CODE.sub("", _FENCE.sub("", text))


def links_in(text: str) -> Iterator[str]:
    """The relative links of a Markdown text, outside code; images among them."""
    prose = prose_of(text)
    yield from (match[1] for match in _LINK.finditer(prose))
    yield from (match[2] for match in _NAMED.finditer(prose))


def rewritten(text: str, docname: str, *, warn: Callable[[str], None]) -> str:
    """A page's text with its links to the repository as links within the site.

    Args:
        text: Markdown, as it is read on GitHub.
        docname: The page.
        warn: Told of links to what does not exist.
    """
    folder = posixpath.dirname(home_of(docname))
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(match[0])
        return f"\0{len(kept) - 1}\0"

    def within(address: str) -> str:
        target, _, anchor = address.partition("#")
        anchor = anchor and f"#{anchor}"
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            warn(f"a link to {path}, which does not exist")
            return address
        page = page_of(path)
        if page is None:
            return f"repository:{path}{anchor}"
        suffix = ".ipynb" if page.startswith("notebooks/") else ".md"
        return posixpath.relpath(page + suffix, posixpath.dirname(docname) or ".") + anchor

    # What is code or an image stays as it is; a link's text may hold either.
    shown = _IMAGE.sub(keep, _CODE.sub(keep, _FENCE.sub(keep, text)))
    shown = _LINK.sub(lambda match: f"]({within(match[1])})", shown)
    shown = _NAMED.sub(lambda match: match[1] + within(match[2]), shown)
    while "\0" in shown:
        shown = re.sub("\0(\\d+)\0", lambda match: kept[int(match[1])], shown)
    return shown
