"""Execute notebooks from top to bottom and keep them with their outputs in build/notebooks.

``NAME.py`` is the source; ``NAME.ipynb``, without outputs, is what Jupyter and Colab open, and ``--sync`` writes it from
``NAME.py``. A cell with ``tags=["hide-input"]`` is folded in Jupyter and on the site. An error, a line on Python's
stderr, or an ``.ipynb`` that differs from its ``.py`` ends the run with exit code 1.

    python notebooks/run.py                       # all of notebooks/
    python notebooks/run.py notebooks/gpu         # those for an H100 or H200
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
    """Run the notebooks of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("where", nargs="*", type=Path, default=[HERE], help="notebooks (.py), or folders of them")
    output = HERE.parent / "build" / "notebooks"
    add("--output", type=Path, default=output, help="folder of the executed notebooks")
    add("--jobs", type=int, default=1, help="notebooks at a time; more than 1 disturbs their times")
    add("--sync", action="store_true", help="write each .ipynb from its .py, and run nothing")
    options = parser.parse_args()
    sources = []
    for where in options.where:
        where = where.resolve()
        found = sorted(where.glob("[0-9]*.py")) if where.is_dir() else [where.with_suffix(".py")]
        sources += found
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
    """Execute one notebook and print the result in one line; returns the problem, or ``None``."""
    start = time.perf_counter()
    name = source.relative_to(HERE) if source.is_relative_to(HERE) else Path(source.name)
    problem = execute(source, output / name.parent)
    print(f"{name!s:48} {time.perf_counter() - start:6.1f} s  {problem or 'ok'}", flush=True)
    return problem


def as_ipynb(source: Path) -> str:
    """The ``.ipynb`` of a source: without outputs, and with numbered cells, so that diffs are small."""
    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
        if "hide-input" in cell.metadata.get("tags", ()):
            cell.metadata["jupyter"] = {"source_hidden": True}
    text = jupytext.writes(notebook, fmt="ipynb")
    return json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"


def execute(source: Path, output: Path) -> str | None:
    """Execute one notebook in its own folder and write it with its outputs; returns the problem, or ``None``."""
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
            "--IPKernelApp.log_level=ERROR",  # its advice on encryption is for networks
            # XLA and CUDA log to the file descriptor; these lines go to the terminal, not into the notebook.
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
    output.mkdir(parents=True, exist_ok=True)
    jupytext.write(notebook, output / pair.name)
    for number, cell in enumerate(notebook.cells):
        for found in cell.get("outputs", ()):
            if found.get("name") == "stderr":
                problem = problem or f"cell {number} wrote to stderr: {found['text'].strip()[:300]}"
    return problem


if __name__ == "__main__":
    sys.exit(main())
