"""Notebooks: each equals its pair, a problem in one is fatal, what they share says what is real.

That they run is checked by running them: ``make notebooks``.
"""

from __future__ import annotations

import dataclasses
import html
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext", reason="the extra `notebooks` is not installed")
# ruff: noqa: E402

import machine
import report
from pictures.strips import tokens_of
from pictures.style import ACCEPTED, BONUS, CORRECTED
from pictures.trees import statuses

import eagle3_jax as e3
from eagle3_jax.measure.trace import record

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py")) + sorted((FOLDER / "gpu").glob("[0-9]*.py"))
IDS = [source.stem for source in SOURCES]


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_the_pair_is_what_the_source_says_without_outputs(source: Path) -> None:
    pair = json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))
    ours = jupytext.read(source).cells
    assert [(cell["cell_type"], "".join(cell["source"])) for cell in pair["cells"]] == [
        (cell["cell_type"], cell["source"]) for cell in ours
    ], f"write it with: python notebooks/run.py --sync {source.name}"
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in pair["cells"])


@pytest.mark.parametrize("source", SOURCES, ids=IDS)
def test_another_environment_is_told_what_to_install(source: Path) -> None:
    """The first code cell, where the package cannot be imported: one line, no traceback."""
    first = next(
        cell["source"] for cell in jupytext.read(source).cells if cell["cell_type"] == "code"
    )

    done = subprocess.run(
        [sys.executable, "-E", "-S", "-c", first],
        capture_output=True,
        text=True,
        check=False,
        cwd=source.parent,
    )

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("assert 1 == 2, 'the claim'", "the claim"),
        ("import sys\nprint('a warning', file=sys.stderr)", "wrote to stderr: a warning"),
        # As XLA logs, past Python's stderr.
        (
            (
                "import os\nprint('fine', os.write(2, b'W0000 00:00:1 cuda_timer.cc:88] Delay"
                " kernel timed out\\n'))"
            ),
            None,
        ),
    ],
)
def test_errors_and_warnings_of_a_notebook_are_fatal(
    code: str, problem: str | None, tmp_path: Path
) -> None:
    def runner(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, FOLDER / "run.py", *map(str, arguments)]
        return subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )

    source = tmp_path / "99_of_a_test.py"
    source.write_text(f"# %% [markdown]\n# # 99\n\n# %%\n{code}\n")
    unpaired = runner(source)
    assert unpaired.returncode == 1
    assert "--sync" in unpaired.stdout
    assert runner("--sync", source).returncode == 0
    done = runner(source, "--output", tmp_path / "executed")
    assert done.returncode == int(problem is not None), done.stdout + done.stderr
    assert (problem or "ok") in done.stdout
    executed = (tmp_path / "executed" / "99_of_a_test.ipynb").read_text()
    assert json.loads(executed)["cells"][-1]["outputs"], "the outputs are kept, errors too"


# ---------------------------------------------------------------- the notebooks for GPUs


def test_the_report_starts_with_the_verdicts_and_names_stand_ins(tmp_path: Path) -> None:
    import nbformat

    here = machine.start()
    banner = here.banner("vLLM", "price")
    assert [part.name for part in banner.missing] == ["device", "pair", "vLLM", "price"]
    for words in ("no GPU: CPU: ", "the shipped pair", "committed record of 20"):
        assert words in html.unescape(banner._repr_html_())
    results = [
        here.verdict("greedy", "no <b> disagreement"),
        here.verdict("cost", "half", needs="price"),
    ]
    cells = [nbformat.v4.new_markdown_cell("# 01 \u00b7 A notebook, see [02](02_other.ipynb)")]
    for result in (here.banner(), *results):
        output = nbformat.v4.new_output("display_data", {"text/html": result._repr_html_()})
        cells.append(nbformat.v4.new_code_cell("show_me()", outputs=[output]))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "01_one.ipynb")
    text = report.page(tmp_path, expected=["01_one", "02_other"])
    assert text.count("rehearsal with stand-ins") == 4, (
        "in the table of verdicts, and where they were found"
    )
    table = text.index("no &lt;b&gt; disagreement")
    assert table < text.index("2 of 2 parts are stand-ins") < text.index("show_me")
    assert text.count("no result: see notebook") == 5, "verdicts that no notebook found"
    assert "02_other: not executed" in text


def test_a_report_of_a_gpu_is_real_but_for_the_shipped_pair_and_vllm_for_cpus() -> None:
    here = machine.start()
    here.report.gpu = True
    here.report.environment[machine.PRICE] = 2.0
    banner = dataclasses.replace(here, is_own_report=True).banner("vLLM", "price")
    assert [part.name for part in banner.missing] == ["pair", "vLLM"]
    assert here.price_named == "at 2 per hour"


# ---------------------------------------------------------------- pictures


@pytest.mark.parametrize(
    ("path", "expected"),
    [([1, 4], "rauraur"), ([], "rrruuuu")],
)
def test_a_picture_says_what_became_of_each_node(path: list[int], expected: str) -> None:
    """0 -> 1 -> 3 -> 5, 0 -> 2, 1 -> 4 -> 6 by first letters.

    ``u`` is for never visited, and the root is one more ``r``.
    """
    letters = [status[0].replace("n", "u") for status in statuses([-1, 0, 0, 1, 1, 3, 4], path)]
    assert "".join(letters) == expected


def test_the_kinds_of_a_strip_are_counted_as_the_loop_counts_them() -> None:
    """``num_accepted_tokens`` accepted, and one of the target's own for every round."""
    target = e3.load_target()
    tree = e3.DynamicTree(num_nodes=8, max_depth=4, top_k=2)
    decoder = e3.SpeculativeDecoder(
        target, e3.load_drafter(target=target), stop_tokens=(), tree=tree
    )
    prompts = ["def read_config(filename, encoding=None):\n"]
    trace = record(decoder, prompts, max_new_tokens=[40], sampling=e3.SamplingParams(), seed=0)
    kinds = [token.kind for token in tokens_of(trace.prompts[0], decoder.target.tokenizer)]
    stats = trace.result.stats
    assert kinds.count(ACCEPTED) == stats.num_accepted_tokens
    assert kinds.count(CORRECTED) + kinds.count(BONUS) == stats.num_drafts
