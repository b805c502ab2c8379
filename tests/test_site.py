"""What the site makes of links, and what its checker finds in pages that are broken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTENSIONS = ROOT / "docs" / "_extensions"
sys.path.append(str(EXTENSIONS))
from check_site import problems  # noqa: E402
from links import links_in, rewritten  # noqa: E402


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("idea", "[a](numbers.md#x)", "[a](numbers.md#x)"),
        ("idea", "[`a`](../eagle3_jax/acceptance.py)", "[`a`](repository:eagle3_jax/acceptance.py)"),
        ("idea", "[a](../validation/README.md#reports)", "[a](repository/validation/README.md#reports)"),
        ("repository/validation/README", "[a](../docs/accelerators.md)", "[a](../../accelerators.md)"),
        ("decisions/0001-write-then-commit", "[a](../speed.md)", "[a](../speed.md)"),
        ("notebooks/01_x", "[a](../docs/speed.md)", "[a](../speed.md)"),
        ("support", "[t]: ../tests/test_docs.py", "[t]: repository:tests/test_docs.py"),
        ("idea", "`[a](../nothing)`", "`[a](../nothing)`"),
        ("idea", "```python\n[a](../nothing)\n```", "```python\n[a](../nothing)\n```"),
        ("idea", "![a](pictures/tree.svg)", "![a](pictures/tree.svg)"),
        ("idea", "[a](https://x.org/y) [b](#c)", "[a](https://x.org/y) [b](#c)"),
    ],
)
def test_a_link_leads_to_its_page_or_its_source(page: str, written: str, shown: str) -> None:
    def warn(what: str) -> None:
        raise AssertionError(what)

    assert rewritten(written, page, warn=warn) == shown


def test_a_link_to_nothing_is_told() -> None:
    told: list[str] = []
    rewritten("[a](../eagle3_jax/nothing.py)", "idea", warn=told.append)
    assert told == ["a link to eagle3_jax/nothing.py, which does not exist"]
    assert list(links_in("[a](x.md) `[b](y.md)` [c](https://z.org)\n\n[d]: w.md")) == ["x.md", "w.md"]


WHOLE = '<h1 id="a">A</h1><a href="b/c.html#d">x</a><img src="p.svg"><a href="https://x.org">y</a>'


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ('<a href="b/nothing.html">', "b/nothing.html, which is not there"),
        ('<a href="b/c.html#nothing">', "has no such anchor"),
        ('<a href="#nothing">', "has no such anchor"),
        ('<a href="/b/c.html">', "depends on where the site lies"),
        ('<img src="nothing.svg">', "nothing.svg, which is not there"),
        ('<script src="https://cdn.example.org/x.js"></script>', "loads https://cdn.example.org/x.js"),
        ('<link rel="stylesheet" href="//fonts.example.org/x.css">', "loads //fonts.example.org/x.css"),
    ],
)
def test_a_broken_page_is_found(tmp_path: Path, broken: str, said: str) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.html").write_text('<h2 id="d">D</h2><a href="../index.html">up</a>')
    (tmp_path / "p.svg").write_text("<svg/>")
    index = tmp_path / "index.html"
    index.write_text(WHOLE)
    assert problems(tmp_path) == ([], {"https://x.org"})
    index.write_text(WHOLE + broken)
    wrong, _ = problems(tmp_path)
    assert len(wrong) == 1 and said in wrong[0]
    checked = subprocess.run([sys.executable, EXTENSIONS / "check_site.py", tmp_path], capture_output=True, check=False)
    assert checked.returncode == 1


def test_a_style_that_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "site.css").write_text("@import url('https://fonts.example.org/x.css');")
    assert problems(tmp_path)[0] == ["site.css loads from elsewhere"]
