"""What pyproject.toml promises of dependencies and extras, read against every import of the package."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from eagle3_jax.cli import _errors

ROOT = Path(__file__).parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"eagle3_jax", "conversion"}
FILES = sorted(path for name in OURS for path in (ROOT / name).rglob("*.py"))
# Programs of their own, started in the environment of the rival that they import.
FOREIGN = {ROOT / "eagle3_jax" / "engines" / "vllm" / f"{name}.py" for name in ("worker", "bridge", "synthetic")}


class Import(NamedTuple):
    """A module of somebody else."""

    path: Path
    line: int
    module: str
    lazy: bool


def distribution(module: str) -> str:
    return {"orbax": "orbax-checkpoint"}.get(module, module).replace("_", "-").lower()


def named(requirements: list[str]) -> set[str]:
    """Distributions of a list of requirements."""
    return {re.split(r"[\[<>=!~ ;]", requirement)[0].replace("_", "-").lower() for requirement in requirements}


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    lazy = {
        id(inner) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.If) for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module)]
        for name in names:
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top not in OURS:
                yield Import(path, node.lineno, top, id(node) in lazy)


ALL = [one for path in FILES if path not in FOREIGN for one in imports_of(path)]
REQUIRED = named(PROJECT["dependencies"])
EXTRAS = {name: named(requirements) for name, requirements in PROJECT["optional-dependencies"].items()}


def test_every_import_is_declared() -> None:
    assert len(ALL) > 100
    declared = REQUIRED.union(*EXTRAS.values())
    missing = {f"{one.path.name}:{one.line} {one.module}" for one in ALL if distribution(one.module) not in declared}
    assert not missing


def test_what_an_extra_brings_is_imported_where_it_is_used_and_its_absence_names_it() -> None:
    beyond = [one for one in ALL if distribution(one.module) not in REQUIRED]
    assert {one.module for one in beyond} >= {"torch", "transformers", "huggingface_hub"}
    for one in beyond:
        assert one.lazy, f"{one.path.name}:{one.line} imports {one.module} too early"
        assert distribution(one.module) in EXTRAS[_errors._EXTRAS[one.module]], one


def test_every_dependency_is_imported() -> None:
    by_jax = {"filelock"}  # when it prunes its compilation cache
    assert {distribution(one.module) for one in ALL} | by_jax >= REQUIRED
