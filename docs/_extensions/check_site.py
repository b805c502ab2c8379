"""Look at a built site as a browser would: every link within it, and everything that it would load.

    python docs/_extensions/check_site.py docs/_build/html

Internal links must lead to a page and an anchor that exist, and nothing may be loaded from elsewhere. Links to other
sites are listed in ``external_links.txt`` and not fetched.
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src"}
_INLINED = re.compile(r"url\(\s*['\"]?(https?:)?//|@import\s+['\"](https?:)?//")


class _Page(HTMLParser):
    """Anchors, links and what is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """One element."""
        found = {name: value for name, value in attrs if value is not None}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if tag == "link" and found.get("rel") in ("stylesheet", "preload", "icon", "shortcut icon"):
            self.loaded.append(found.get("href", ""))
        if tag in _LOADED and _LOADED[tag] in found:
            self.loaded.append(found[_LOADED[tag]])


def problems(site: Path) -> tuple[list[str], set[str]]:
    """What is wrong, and the addresses of other sites."""
    pages: dict[Path, _Page] = {}
    for path in sorted(site.rglob("*.html")):
        if "_static" in path.relative_to(site).parts:
            continue
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    wrong, elsewhere = [], set()
    for path, page in pages.items():
        here = path.relative_to(site.resolve())
        for address in page.loaded:
            if re.match(r"(https?:)?//", address):
                wrong.append(f"{here} loads {address}")
            elif not address.startswith("data:") and not _file(path, address).exists():
                wrong.append(f"{here} loads {address}, which is not there")
        for address in page.links:
            parts = urlsplit(address)
            if parts.scheme or address.startswith("//"):
                elsewhere.add(address)
                continue
            if address in ("", "#"):
                continue
            if parts.path.startswith("/"):
                wrong.append(f"{here} links to {address}, which depends on where the site lies")
                continue
            target = _file(path, parts.path) if parts.path else path
            if not target.exists():
                wrong.append(f"{here} links to {address}, which is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                wrong.append(f"{here} links to {address}, which has no such anchor")
    wrong += [
        f"{path.relative_to(site)} loads from elsewhere"
        for path in site.rglob("*.css")
        if _INLINED.search(path.read_text(encoding="utf-8"))
    ]
    return wrong, elsewhere


def _file(page: Path, address: str) -> Path:
    path = (page.parent / unquote(urlsplit(address).path)).resolve()
    return path / "index.html" if path.is_dir() else path


def main(site: Path) -> int:
    """Report, and write the list."""
    wrong, elsewhere = problems(site)
    (site / "external_links.txt").write_text("".join(f"{link}\n" for link in sorted(elsewhere)), encoding="utf-8")
    for line in sorted(set(wrong)):
        print(line, file=sys.stderr)
    pages = sum(1 for _ in site.rglob("*.html"))
    print(f"{pages} pages, {len(wrong)} broken links, {len(elsewhere)} links to other sites (not fetched)")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
