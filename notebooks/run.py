"""Executes notebooks from top to bottom and writes them with their outputs to build/notebooks.

``NAME.py`` is the source. Jupyter and Colab open ``NAME.ipynb``, which has no outputs; ``--sync``
writes it from ``NAME.py``. The input of a cell with ``tags=["hide-input"]`` is folded in Jupyter
and on the site; ``"answer"`` marks the answer to an exercise. The exit code is 1 if a cell raises
an error or writes to Python's stderr, or if an ``.ipynb`` differs from its ``.py``.

    python notebooks/run.py                       # all of notebooks/
    python notebooks/run.py notebooks/gpu         # the four for an H100 or H200
    python notebooks/run.py notebooks/02*.py      # some of them
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

try:
    import jupytext
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
except ModuleNotFoundError as error:
    raise SystemExit(f"{error.name} is not installed; run: pip install -e '.[notebooks]'") from None

HERE = Path(__file__).resolve().parent
TIMEOUT = 900  # seconds for one cell


def main() -> int:
    """Runs the notebooks that the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("where", nargs="*", type=Path, default=[HERE], help="notebooks (.py), or folders of them")
    output = HERE.parent / "build" / "notebooks"
    add("--output", type=Path, default=output, help="folder of the executed notebooks")
    add("--jobs", type=int, default=1, help="notebooks to run in parallel; timings need 1")
    add("--sync", action="store_true", help="write each .ipynb from its .py, without running it")
    options = parser.parse_args()

    sources = []
    for where in options.where:
        where = where.resolve()
        named = sorted(where.glob("[0-9]*.py")) if where.is_dir() else [where.with_suffix(".py")]
        sources += named

    if not sources:
        parser.error(f"no notebook in {', '.join(map(str, options.where))}: give .py files")
    if options.sync:
        for source in sources:
            source.with_suffix(".ipynb").write_text(as_ipynb(source), encoding="utf-8")
        return 0

    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        problems = list(pool.map(lambda source: run(source, options.output), sources))
    return int(any(problems))


def run(source: Path, output: Path) -> str | None:
    """Executes one notebook and prints one line; returns the problem, or ``None``."""
    start = time.perf_counter()
    name = source.relative_to(HERE) if source.is_relative_to(HERE) else Path(source.name)
    problem = execute(source, output / name.parent)
    print(f"{name!s:48} {time.perf_counter() - start:6.1f} s  {problem or 'ok'}", flush=True)
    return problem


def as_ipynb(source: Path) -> str:
    """Converts a source to an ``.ipynb`` without outputs. Cells are numbered for small diffs."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        if "hide-input" in cell.metadata.get("tags", ()):
            cell.metadata["jupyter"] = {"source_hidden": True}
        if "answer" in cell.metadata.get("tags", ()):
            cell.metadata["mystnb"] = {
                "code_prompt_show": "Show the answer",
                "code_prompt_hide": "Hide the answer",
            }

    text = jupytext.writes(notebook, fmt="ipynb")
    return json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"


def execute(source: Path, output: Path) -> str | None:
    """Executes one notebook in its own folder and writes it with outputs; returns the problem."""
    pair = source.with_suffix(".ipynb")
    if not pair.is_file() or pair.read_text(encoding="utf-8") != as_ipynb(source):
        return f"{pair.name} differs from {source.name}; run: notebooks/run.py --sync {source.name}"

    notebook = jupytext.reads(as_ipynb(source), fmt="ipynb")
    client = NotebookClient(
        notebook,
        timeout=TIMEOUT,
        startup_timeout=300,  # on a busy machine
        kernel_name="python3",
        extra_arguments=[
            "--IPKernelApp.log_level=ERROR",  # hides a warning about unencrypted connections
            # XLA and CUDA log to the file descriptor; these lines go to the terminal, not into the
            # notebook.
            "--IPKernelApp.capture_fd_output=False",
        ],
        resources={"metadata": {"path": str(source.parent)}},
    )

    problem = None
    try:
        client.execute()
    except CellTimeoutError:
        problem = f"a cell ran for more than {TIMEOUT} seconds"
    except (CellExecutionError, DeadKernelError) as error:
        problem = str(error)

    for number, cell in enumerate(notebook.cells):
        for cell_output in cell.get("outputs", ()):
            if cell_output.get("name") == "stderr":
                problem = (
                    problem or f"cell {number} wrote to stderr: {cell_output['text'].strip()[:300]}"
                )
            if alt := cell_output.get("metadata", {}).get("image/png", {}).get("alt"):
                cell.metadata["mystnb"] = {"image": {"alt": alt}}  # the site reads it from the cell

    output.mkdir(parents=True, exist_ok=True)
    jupytext.write(notebook, output / pair.name)
    return problem


if __name__ == "__main__":
    sys.exit(main())
