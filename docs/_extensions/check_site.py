"""Check a built site: every link within it leads to a page and an anchor, and nothing is loaded from elsewhere.

    python docs/_extensions/check_site.py docs/_build/html

Links to other sites are listed in ``external_links.txt`` and not fetched.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

from bs4 import BeautifulSoup

_LOADS = "script[src], img[src], iframe[src], source[src], video[src], link[rel~=stylesheet], link[rel~=icon]"
_REMOTE_STYLE = re.compile(r"url\(\s*['\"]?(https?:)?//|@import\s+['\"](https?:)?//")


def problems(site: Path) -> tuple[list[str], set[str]]:
    """What is wrong, and the addresses of other sites."""
    site = site.resolve()
    files = [path for path in sorted(site.rglob("*.html")) if "_static" not in path.relative_to(site).parts]
    pages = {path: BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser") for path in files}
    anchors = {
        path: {tag.get(key) for tag in page.find_all(True) for key in ("id", "name")} for path, page in pages.items()
    }
    wrong, elsewhere = [], set()
    for path, page in pages.items():
        here = path.relative_to(site)
        for address in [tag.get("src") or tag["href"] for tag in page.select(_LOADS)]:
            if re.match(r"(https?:)?//", address):
                wrong.append(f"{here} loads {address}")
            elif not address.startswith("data:") and not _file(path, address).exists():
                wrong.append(f"{here} loads {address}, which is not there")
        for address in [tag["href"] for tag in page.select("a[href]")]:
            parts, target = urlsplit(address), _file(path, address)
            if parts.scheme or address.startswith("//"):
                elsewhere.add(address)
            elif parts.path.startswith("/"):
                wrong.append(f"{here} links to {address}, which depends on where the site lies")
            elif not target.exists():
                wrong.append(f"{here} links to {address}, which is not there")
            elif parts.fragment and unquote(parts.fragment) not in anchors.get(target, {unquote(parts.fragment)}):
                wrong.append(f"{here} links to {address}, which has no such anchor")
    styles = [path for path in site.rglob("*.css") if _REMOTE_STYLE.search(path.read_text(encoding="utf-8"))]
    return wrong + [f"{path.relative_to(site)} loads from elsewhere" for path in styles], elsewhere


def _file(page: Path, address: str) -> Path:
    path = (page.parent / unquote(urlsplit(address).path)).resolve() if urlsplit(address).path else page
    return path / "index.html" if path.is_dir() else path


def main(site: Path) -> int:
    """Print what is wrong, and write the list of other sites."""
    wrong, elsewhere = problems(site)
    (site / "external_links.txt").write_text("".join(f"{link}\n" for link in sorted(elsewhere)), encoding="utf-8")
    print("\n".join(sorted(set(wrong))), file=sys.stderr, end="\n" if wrong else "")
    print(f"{len(wrong)} broken links, {len(elsewhere)} links to other sites (not fetched)")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
