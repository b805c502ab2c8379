"""The page of `eagle3 serve` with recorded runs: a file that the page about serving shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
PAGE = DOCS.parent / "eagle3_jax" / "server" / "page" / "page.html"
RUNS = DOCS / "recorded" / "page_runs.json"
_NAME = "recorded_run.html"
_EMPTY = '<script type="application/json" id="recorded">[]</script>'
_MARKER = "<!-- recorded run -->"
_FRAME = f"""```{{raw}} html
<iframe src="_static/{_NAME}" title="Recorded runs of SmolLM2-135M-Instruct" loading="lazy"
  style="width: 100%; height: 86rem; border: 1px solid var(--pst-color-border);
  border-radius: 8px"></iframe>
<p><a href="_static/{_NAME}">The recorded runs on a page of their own</a></p>
```"""


def setup(app: Any) -> dict[str, Any]:
    """Show the runs in place of a comment of the page, and write their file after the site."""
    app.connect("source-read", _read)
    app.connect("build-finished", _write)
    return {"version": "1", "parallel_read_safe": True}


def page_with_runs() -> str:
    """Returns the page of the server with the recorded runs in it, which needs no server."""
    page = PAGE.read_text("utf-8")
    runs = json.loads(RUNS.read_text(encoding="utf-8"))["runs"]
    text = json.dumps(runs, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    replacements = {
        "/* trees.js */": PAGE.with_name("trees.js").read_text("utf-8"),
        _EMPTY: _EMPTY.replace("[]", text),
    }
    for mark, content in replacements.items():
        if page.count(mark) != 1:
            raise ValueError(f"{PAGE.name} has no single place for a recorded run: {mark}")
        page = page.replace(mark, content)
    return page


def _read(app: Any, docname: str, source: list[str]) -> None:
    if docname == "serving":
        if _MARKER not in source[0]:
            raise ValueError(f"docs/serving.md has no {_MARKER}")
        source[0] = source[0].replace(_MARKER, _FRAME)


def _write(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        (Path(app.outdir) / "_static" / _NAME).write_text(page_with_runs(), encoding="utf-8")
