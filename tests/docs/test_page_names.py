"""What pages and notebooks teach is public, and the programs of the pages are clean for a type checker."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import DOCS, ROOT, blocks_of, code_of, text_of, with_code

import eagle3_jax

REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "api").glob("*.md"))
PROGRAMS = {page: "\n".join(code_of(block) for block in blocks_of(page, "python")) for page in with_code()}
NOTEBOOKS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("[01]*.py")}


def is_public(module: str, name: str) -> bool:
    """Whether the reference documents a name, its whole module, or the place that it comes from."""
    value = getattr(importlib.import_module(module), name, None) or importlib.import_module(f"{module}.{name}")
    if getattr(eagle3_jax, name, None) is value:
        return name in eagle3_jax.__all__
    homes = {module, getattr(value, "__module__", module)}
    paths = [re.escape(f"{home}.{name}") + r"\b" for home in homes] + [
        re.escape(home) + r"\n(?!\s+:no-m)" for home in homes
    ]
    return not name.startswith("_") and any(re.search(rf":: (?:{path})", REFERENCE) for path in paths)


def test_what_pages_and_notebooks_import_is_in_the_reference() -> None:
    seen = {
        (node.module, alias.name, where)
        for where, program in {**PROGRAMS, **NOTEBOOKS}.items()
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eagle3_jax.")
        for alias in node.names
    }
    assert len(seen) > 100
    assert not [one for one in sorted(seen) if not is_public(*one[:2])]


def test_every_name_of_the_reference_exists() -> None:
    for path in re.findall(r"^\.\. auto(?:function|class|data):: ([\w.]+)$", REFERENCE, re.MULTILINE):
        module, name = path.rsplit(".", 1)
        assert hasattr(importlib.import_module(module), name), path


def test_the_programs_of_the_pages_type_check(tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="make types brings it")
    for page in PROGRAMS:
        lines = [""] * text_of(page).count("\n")  # an error names the line of the page
        for block in blocks_of(page, "python"):
            above, written = text_of(page)[: block.start(2)].count("\n"), code_of(block).splitlines()
            lines[above : above + len(written)] = written
        (tmp_path / f"{re.sub(r'[^a-z0-9]', '_', page.lower())}.py").write_text("\n".join(lines), encoding="utf-8")
    settings = {"pythonVersion": "3.11", "typeCheckingMode": "basic", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "-p", str(tmp_path), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
