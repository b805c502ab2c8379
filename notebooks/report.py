"""Joins the executed notebooks of build/notebooks/gpu to one page, build/gpu-notebooks.html.

The page needs no network. It starts with one table of verdicts. The code is folded.

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

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build"
TITLE = "EAGLE-3 in JAX on this machine"
# Each verdict with the notebook that finds it, in the order of the table.
VERDICTS = {
    "greedy": "02_equality_with_vllm",
    "sampling": "02_equality_with_vllm",
    "acceptance": "02_equality_with_vllm",
    "speed-up": "03_speed_and_tuning",
    "share of roofline": "03_speed_and_tuning",
    "best K by batch": "03_speed_and_tuning",
    "cost": "04_cost_and_claims",
}
# Scripts that nbconvert's page loads from the network. The page needs none of them.
_SCRIPTS = re.compile(
    r"<script[^>]*\bsrc=\"https?://[^>]*>\s*</script>|<script type=\"module\">.*?</script>",
    re.DOTALL,
)
_RESULT = re.compile(r"<tr class='eagle3-result'><td><b>(.*?)</b>.*?</tr>", re.DOTALL)
_BANNER = re.compile(r"<div class='eagle3-banner'.*?</div>", re.DOTALL)
_ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#\s]+)\)")
_STYLE = """<style>
 body { max-width: 62rem; margin: 0 auto !important; padding: 0 1rem; }
 nav.contents { border-left: 6px solid #9aa0a6; padding: .2em 1em; margin: 1em 0; }
 nav.contents li { margin: .15em 0; } .stderr, .error { border-left: 6px solid #c05a8e; }
 body:not(:has(#code:checked)) .jp-CodeCell .jp-Cell-inputWrapper { display: none; }
</style>"""


def main() -> int:
    """Writes the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "executed",
        nargs="?",
        type=Path,
        default=BUILD / "notebooks" / "gpu",
        help="a folder of .ipynb",
    )
    add("--output", type=Path, default=BUILD / "gpu-notebooks.html")

    options = parser.parse_args()
    try:
        text = page(
            options.executed,
            expected=sorted(path.stem for path in (HERE / "gpu").glob("[0-9]*.py")),
        )
    except ModuleNotFoundError as error:
        parser.error(
            f"{error.name} is not installed; install it with: pip install -e '.[notebooks]'"
        )
    except ValueError as error:
        parser.error(str(error))

    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(f"{options.output}: {len(text) / 1e6:.1f} MB")
    return 0


def page(folder: Path, *, expected: Sequence[str] = ()) -> str:
    """Makes the page from all executed notebooks of a folder.

    Args:
        folder: Folder of executed notebooks.
        expected: Names of notebooks that the contents list, executed or not.

    Raises:
        ValueError: The folder has no executed notebook.
    """
    import nbformat
    from nbconvert import HTMLExporter

    notebooks = {
        file.stem: nbformat.read(file, as_version=4) for file in sorted(folder.glob("[0-9]*.ipynb"))
    }
    if not notebooks:
        raise ValueError(
            f"no executed notebook in {folder}; run them first: python notebooks/run.py"
            " notebooks/gpu"
        )

    def within(link: re.Match[str]) -> str:
        """Replaces a link to a notebook by its anchor, and a link to another file by its text."""
        text = link[1]
        name = Path(link[2]).stem
        return f"[{text}](#{name})" if name in notebooks else text

    markdown = nbformat.v4.new_markdown_cell

    cells = [markdown(_top(notebooks, [*dict.fromkeys([*expected, *notebooks])]))]
    for name, notebook in notebooks.items():
        cells.append(markdown(f'<a id="{name}"></a>'))
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = _LINK.sub(within, cell.source)
            cells.append(cell)
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"

    joined = nbformat.v4.new_notebook(cells=cells, metadata={"title": TITLE})
    exporter = HTMLExporter(
        template_name="lab", exclude_input_prompt=True, exclude_output_prompt=True
    )
    body, _ = exporter.from_notebook_node(joined)
    return _SCRIPTS.sub("", body).replace("</head>", f"{_STYLE}</head>", 1)


def _top(notebooks: dict[str, Any], names: list[str]) -> str:
    """Title, verdicts, banner and contents."""
    lines = []
    for name in names:
        if name not in notebooks:
            lines.append(f"<li>{html.escape(name)}: not executed</li>")
            continue

        cells = notebooks[name].cells
        title = next((cell.source for cell in cells if cell.cell_type == "markdown"), "").partition(
            "\n"
        )[0]
        title = title.lstrip("# ") if title.startswith("# ") else name

        failed = any(
            output.output_type == "error" for cell in cells for output in cell.get("outputs", ())
        )
        mark = " (stopped at an error)" if failed else ""
        lines.append(f'<li><a href="#{name}">{html.escape(title)}</a>{mark}</li>')

    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    return (
        f"# {TITLE}\n\n{_results(notebooks)}\n\n{_banner(notebooks)}\n\n"
        '<label><input type="checkbox" id="code"> Show the code</label>\n\n'
        f"Joined on {when} from executed notebooks.\n\n"
        f'<nav class="contents"><ul>{"".join(lines)}</ul></nav>'
    )


def _shown(notebooks: dict[str, Any]) -> list[str]:
    """All outputs in HTML."""
    cells = [cell for notebook in notebooks.values() for cell in notebook.cells]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return [output.get("data", {}).get("text/html", "") for output in outputs]


def _results(notebooks: dict[str, Any]) -> str:
    """One table of all verdicts. A missing one has a row with the notebook that should find it."""
    rows_by_name = {row[1]: row[0] for text in _shown(notebooks) for row in _RESULT.finditer(text)}
    head = "<tr><th>verdict</th><th>result</th><th>source</th></tr>"
    missing = (
        "<tr><td><b>{0}</b></td><td>no result: see notebook {1}</td><td>not measured</td></tr>"
    )
    rows = [
        rows_by_name.pop(name, missing.format(name, notebook))
        for name, notebook in VERDICTS.items()
    ]
    return f"<table>{head}{''.join([*rows, *rows_by_name.values()])}</table>"


def _banner(notebooks: dict[str, Any]) -> str:
    """Rows of all banners without repetition: real parts and stand-ins."""
    banners = [banner for text in _shown(notebooks) for banner in _BANNER.findall(text)]
    rows = list(dict.fromkeys(row for banner in banners for row in _ROW.findall(banner)))
    if not rows:
        return "**No banner was found, so stand-ins are unknown. Do not quote these numbers.**"

    stand_ins = sum("stand-in" in row for row in rows)
    edge = "#d97634" if stand_ins else "#2a9d74"
    message = (
        f"{stand_ins} of {len(rows)} parts are stand-ins. Do not quote their numbers as"
        " measurements of the real parts."
        if stand_ins
        else "All parts are real: these numbers are measurements of this machine."
    )
    return (
        f"<div style='border-left:6px solid {edge};padding:.4em"
        f" 1em;background:{edge}14'><b>{message}</b><table>{''.join(rows)}</table></div>"
    )


if __name__ == "__main__":
    sys.exit(main())
