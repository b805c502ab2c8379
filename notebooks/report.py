"""Join executed notebooks into one page that needs no network: what a machine did, from its check to its costs.

Nothing is executed here. ``notebooks/run.py`` leaves executed copies in ``build/notebooks``; this reads those of
``build/notebooks/gpu`` and writes ``build/gpu-notebooks.html``.

    python notebooks/run.py notebooks/gpu
    python notebooks/report.py
"""

from __future__ import annotations

import argparse
import datetime
import html
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BUILD = Path(__file__).resolve().parent.parent / "build"
SOURCES = Path(__file__).resolve().parent / "gpu"
TITLE = "EAGLE-3 in JAX on this machine"
# nbconvert's page asks the network for these; nothing here needs them.
_REMOTE = re.compile(r"<script[^>]*\bsrc=\"https?://[^\"]*\"[^>]*>\s*</script>", re.DOTALL)
_MODULES = re.compile(r"<script type=\"module\">.*?</script>", re.DOTALL)
_BANNER = re.compile(r"<div class='eagle3-banner'.*?</div>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)\)")
_STYLE = """<style>
 body { max-width: 62rem; margin: 0 auto !important; padding: 0 1rem; }
 nav.contents { border-left: 6px solid #9aa0a6; padding: .2em 1em; margin: 1em 0; }
 nav.contents li { margin: .15em 0; } .stderr, .error { border-left: 6px solid #c05a8e; }
</style>"""


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "executed",
        nargs="?",
        type=Path,
        default=BUILD / "notebooks" / "gpu",
        help="a folder of .ipynb",
    )
    parser.add_argument("--output", type=Path, default=BUILD / "gpu-notebooks.html")
    options = parser.parse_args()
    try:
        text = page(
            options.executed, expected=[source.stem for source in sorted(SOURCES.glob("[0-9]*.py"))]
        )
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is not installed; install it with: pip install -e '.[notebooks]'",
            file=sys.stderr,
        )
        return 2
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: {len(text) / 1e6:.1f} MB")
    return 0


def page(folder: Path, *, expected: Sequence[str] = ()) -> str:
    """The page, from all executed notebooks of a folder.

    Args:
        folder: Where they lie.
        expected: Names that the contents list, executed or not.

    Raises:
        ValueError: There is none.
    """
    import nbformat
    from nbconvert import HTMLExporter

    files = {file.stem: file for file in sorted(folder.glob("[0-9]*.ipynb"))}
    if not files:
        raise ValueError(
            f"no executed notebook in {folder}; run them first: python notebooks/run.py notebooks/gpu"
        )
    notebooks = {name: nbformat.read(file, as_version=4) for name, file in files.items()}
    cells = [nbformat.v4.new_markdown_cell(_top(notebooks, [*dict.fromkeys([*expected, *files])]))]
    for name, notebook in notebooks.items():
        cells.append(nbformat.v4.new_markdown_cell(f'<a id="{name}"></a>'))
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = _LINK.sub(lambda link: _within(link, files), cell.source)
            cells.append(cell)
    whole = nbformat.v4.new_notebook(cells=cells, metadata={"title": TITLE})
    for number, cell in enumerate(whole.cells):
        cell["id"] = f"cell-{number}"
    exporter = HTMLExporter(
        template_name="lab", exclude_input_prompt=True, exclude_output_prompt=True
    )
    body, _ = exporter.from_notebook_node(whole)
    body = _MODULES.sub("", _REMOTE.sub("", body))
    return body.replace("</head>", f"{_STYLE}</head>", 1)


def _top(notebooks: dict[str, Any], names: list[str]) -> str:
    """Title, what is real on this machine, and the contents."""
    lines = []
    for name in names:
        if name in notebooks:
            mark = " (stopped at an error)" if _failed(notebooks[name]) else ""
            lines.append(
                f'<li><a href="#{name}">{html.escape(_title(notebooks[name], name))}</a>{mark}</li>'
            )
        else:
            lines.append(f"<li>{html.escape(name)}: not executed</li>")
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return (
        f"# {TITLE}\n\n{_banner(notebooks)}\n\nJoined on {when} from notebooks executed from top to bottom.\n\n"
        f'<nav class="contents"><ul>{"".join(lines)}</ul></nav>'
    )


def _title(notebook: Any, name: str) -> str:
    first = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), "")
    return first.splitlines()[0].lstrip("# ") if first.startswith("# ") else name


def _failed(notebook: Any) -> bool:
    return any(
        output.output_type == "error"
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    )


def _banner(notebooks: dict[str, Any]) -> str:
    """The parts of all banners, each once: what is real in the whole report, and what stands in."""
    found = [
        banner
        for notebook in notebooks.values()
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        for banner in _BANNER.findall(output.get("data", {}).get("text/html", ""))
    ]
    rows = list(dict.fromkeys(row for banner in found for row in _ROW.findall(banner)))
    if not rows:
        return (
            "**No banner was found: nothing says what is real here. Do not quote these numbers.**"
        )
    stand_ins = sum("stand-in" in row for row in rows)
    edge = "#d97634" if stand_ins else "#2a9d74"
    told = (
        f"{stand_ins} of {len(rows)} parts are stand-ins. No number of theirs may be quoted as one of the real thing."
        if stand_ins
        else "Everything here is real: these numbers are this machine's own."
    )
    return (
        f"<div style='border-left:6px solid {edge};padding:.4em 1em;background:{edge}14'><b>{told}</b>"
        f"<table>{''.join(rows)}</table></div>"
    )


def _within(link: re.Match[str], files: dict[str, Path]) -> str:
    """A link to a notebook of the page leads to its place; one to another file of the repository is only its text."""
    text, target = link.groups()
    if re.match(r"https?:", target):
        return link[0]
    name = Path(target).stem
    return f"[{text}](#{name})" if name in files else text


if __name__ == "__main__":
    sys.exit(main())
