"""Notebooks: each is whole, equal to its pair, and tells another environment what to install.

That they run is checked by running them: ``make notebooks``.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="the extra `notebooks` is not installed")

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py")) + sorted((FOLDER / "gpu").glob("[0-9]*.py"))
IDS = [str(source.relative_to(FOLDER)) for source in SOURCES]


def runner(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / "run.py", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)


def cells(source: Path, kind: str) -> list[str]:
    return [cell["source"] for cell in jupytext.read(source).cells if cell["cell_type"] == kind]


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_the_pair_is_what_the_source_says_without_outputs(source: Path) -> None:
    pair = json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))
    ours = jupytext.read(source).cells
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in pair["cells"]] == [
        (cell["cell_type"], cell["source"]) for cell in ours
    ], f"write it with: python notebooks/run.py --sync {source.name}"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in pair["cells"])


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_a_notebook_teaches_checks_and_asks(source: Path) -> None:
    prose, code = "\n".join(cells(source, "markdown")), "\n".join(cells(source, "code"))
    assert prose.startswith("# "), "no title"
    assert not re.search(r"(from|import) \S*\._|import _", code), "private names"
    for cell in jupytext.read(source).cells:
        if cell["cell_type"] == "code" and "hide-input" not in cell["metadata"].get("tags", ()):
            assert not re.search(r"^(from|import) eagle3_jax\.", cell["source"], re.MULTILINE), (
                "a module that is not folded"
            )
            assert "plt." not in cell["source"], "a plot that is not folded"
    assert sum(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code))) >= 4, "claims without assertions"
    assert "\n## Common mistakes\n" in prose
    assert prose.count("<summary>") >= (2 if source.parent.name == "gpu" else 3), "exercises with folded answers"
    assert "\n## Checked claims\n\n- " in prose, "the list that the site gathers"
    assert prose.count("<details>") == prose.count("</details>") == prose.count("<summary>")


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_another_environment_is_told_what_to_install(source: Path) -> None:
    """The first code cell, where the package cannot be imported: one line, no traceback."""
    first = cells(source, "code")[0]
    done = subprocess.run(
        [sys.executable, "-E", "-S", "-c", first], capture_output=True, text=True, check=False, cwd=source.parent
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "pip install" in done.stderr and "Traceback" not in done.stderr


def test_what_a_notebook_misses_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    import first_cell

    with pytest.raises(SystemExit, match=r"nothing_like_it: not installed .*pip install -e '.*\[notebooks\]'"):
        first_cell.start(also=("nothing_like_it",))


HEADER = "# %% [markdown]\n# # 99\n\n# %%\n"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("assert 1 == 2, 'the claim'", "the claim"),
        ("import sys\nprint('a warning', file=sys.stderr)", "wrote to stderr: a warning"),
        ("print('fine')", None),
        # As XLA logs; no word of Python's.
        ("import os\nprint('fine', os.write(2, b'W0000 00:00:1 cuda_timer.cc:88] Delay kernel timed out\\n'))", None),
    ],
)
def test_errors_and_warnings_of_a_notebook_are_fatal(code: str, problem: str | None, tmp_path: Path) -> None:
    source = tmp_path / "99_of_a_test.py"
    source.write_text(HEADER + code + "\n")
    unpaired = runner(source)
    assert unpaired.returncode == 1 and "--sync" in unpaired.stdout
    assert runner("--sync", source).returncode == 0
    done = runner(source, "--output", tmp_path / "executed")
    assert done.returncode == int(problem is not None), done.stdout + done.stderr
    assert (problem or "ok") in done.stdout
    executed = json.loads((tmp_path / "executed" / "99_of_a_test.ipynb").read_text())
    assert executed["cells"][-1]["outputs"], "the outputs are kept, errors too"


def test_a_folder_without_notebooks_is_refused(tmp_path: Path) -> None:
    done = runner(tmp_path)
    assert done.returncode == 2 and "no notebook in" in done.stderr
