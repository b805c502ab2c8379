"""Execute notebooks from top to bottom, as a reader would, and keep them with their outputs.

The sources hold no outputs: ``NAME.py`` is what is edited, ``NAME.ipynb`` what Jupyter and Colab open, and ``--sync``
writes the second from the first. Any error, anything that Python writes to stderr and any pair out of step ends the run
with exit code 1.

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

HERE = Path(__file__).resolve().parent
SECONDS_ALLOWED = 900  # of one notebook; a hung kernel must end


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "where", nargs="*", type=Path, default=[HERE], help="notebooks (.py), or folders of them"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=HERE.parent / "build" / "notebooks",
        help="where they go, executed",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many at a time; the times that they print suffer"
    )
    parser.add_argument(
        "--sync", action="store_true", help="write each .ipynb from its .py, and run nothing"
    )
    options = parser.parse_args()
    try:
        import jupytext  # noqa: F401
        import nbclient  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"{error.name} is not installed; install it with: pip install -e '.[notebooks]'",
            file=sys.stderr,
        )
        return 2
    sources = [source for where in options.where for source in _sources(where)]
    if not sources:
        print(
            f"no notebook in {', '.join(map(str, options.where))}: give .py files of notebooks/",
            file=sys.stderr,
        )
        return 2
    if options.sync:
        for source in sources:
            source.with_suffix(".ipynb").write_text(as_ipynb(source), encoding="utf-8")
        return 0
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        problems = list(pool.map(lambda source: judged(source, options.output), sources))
    return int(any(problems))


def judged(source: Path, output: Path) -> str | None:
    """Run one notebook, and say how that went."""
    start = time.perf_counter()
    name = source.relative_to(HERE) if source.is_relative_to(HERE) else Path(source.name)
    problem = execute(source, output / name.parent)
    print(f"{name!s:48} {time.perf_counter() - start:6.1f} s  {problem or 'ok'}", flush=True)
    return problem


def _sources(where: Path) -> list[Path]:
    where = where.resolve()
    return sorted(where.glob("[0-9]*.py")) if where.is_dir() else [where.with_suffix(".py")]


def as_ipynb(source: Path) -> str:
    """A source as the ``.ipynb`` beside it: no outputs, and numbered cells, so that a change stays small."""
    import jupytext

    notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"
    text = jupytext.writes(notebook, fmt="ipynb")
    return json.dumps(json.loads(text), indent=1, ensure_ascii=False) + "\n"


def execute(source: Path, output: Path) -> str | None:
    """Run one notebook in its own folder and write it there with its outputs; what was wrong, or ``None``."""
    import jupytext
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    pair = source.with_suffix(".ipynb")
    if not pair.is_file() or pair.read_text(encoding="utf-8") != as_ipynb(source):
        return f"{pair.name} is not what {source.name} says; write it with: python notebooks/run.py --sync {source.name}"
    notebook = jupytext.read(source)
    client = NotebookClient(
        notebook,
        timeout=SECONDS_ALLOWED,
        startup_timeout=300,  # of a kernel, on a machine that has other things to do
        kernel_name="python3",
        extra_arguments=[
            "--IPKernelApp.log_level=ERROR",  # its advice on encryption is for networks
            # What XLA and CUDA log goes to the terminal: lines of C++ on the descriptor, not of Python on sys.stderr.
            "--IPKernelApp.capture_fd_output=False",
        ],
        resources={"metadata": {"path": str(source.parent)}},
    )
    try:
        client.execute()
        problem = _spoken(notebook)
    except CellTimeoutError:
        problem = f"a cell ran for more than {SECONDS_ALLOWED} seconds"
    except (CellExecutionError, DeadKernelError) as error:
        problem = str(error)
    output.mkdir(parents=True, exist_ok=True)
    jupytext.write(notebook, output / pair.name)
    return problem


def _spoken(notebook: dict) -> str | None:
    """Warnings and logs: a reader would have to wonder whether they matter."""
    for number, cell in enumerate(notebook["cells"]):
        for found in cell.get("outputs", ()):
            if found.get("name") == "stderr":
                return f"cell {number} wrote to stderr: {found['text'].strip()[:300]}"
    return None


if __name__ == "__main__":
    sys.exit(main())
