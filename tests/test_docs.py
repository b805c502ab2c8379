"""Every block of Python on the pages that teach by code runs as it stands, and so do their commands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest
import tiny

from eagle3_jax.cli import run

DOCS = Path(__file__).parent.parent / "docs"
SHOWN = {
    "stepping.md": "consumed by the step before",
    "drafters.md": "16 passed, 0 failed, 0 not run",
    "extending.md": "0 failed",
}


def blocks_of(page: str, language: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", SHOWN)
def test_the_blocks_of_a_page_run_in_order(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then its commands, beside a file ``mine.py`` of the blocks that say so."""
    text, blocks = (DOCS / page).read_text(), blocks_of(page, "python")
    assert len(blocks) >= 3, "the fences of this page are written otherwise"
    module = types.ModuleType("page")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "page", module)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)  # where a page writes files
    Path("mine.py").write_text("\n".join(block[1] for block in blocks if block[1].startswith("# mine.py")))
    with tiny.unchecked():  # as users run them
        for block in blocks:
            above = text[: block.start(1)].count("\n")  # a failure names the line of the page
            exec(compile("\n" * above + block[1], str(DOCS / page), "exec"), vars(module))
        assert SHOWN[page] in capsys.readouterr().out
        for command in "".join(block[1] for block in blocks_of(page, "bash")).splitlines():
            program, *arguments = shlex.split(command, comments=True)
            assert program == "eagle3" and run(arguments) == 0, command


def test_the_page_about_meshes_runs_on_virtual_devices(tmp_path: Path) -> None:
    """In a process of its own: how many devices there are is settled when JAX starts."""
    text, above = (DOCS / "mesh.md").read_text(), 0
    page = tmp_path / "page.py"
    lines = [""] * text.count("\n")
    for block in blocks_of("mesh.md", "python"):
        above = text[: block.start(1)].count("\n")
        written = block[1].splitlines()
        lines[above : above + len(written)] = written  # a failure names the line of the page
    assert above, "the fences of this page are written otherwise"
    page.write_text("\n".join(lines))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(DOCS.parent)}
    done = subprocess.run([sys.executable, page], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == "a mesh of model=8,data=1 does not divide 2 key/value heads: model can be 1, 2\n"
