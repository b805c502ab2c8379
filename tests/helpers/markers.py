"""Sets the markers `torch`, `bits` and `slow` on collected tests, so that no test file has to name its lane.

`torch`: the test needs PyTorch, or another package that the extra `test` installs and `test-light` does not. This is
read from the source: the test, or a helper, fixture or constant that it names, imports such a package.
"""

from __future__ import annotations

import ast
import collections
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PACKAGES = {
    "torch", "transformers", "accelerate", "compressed_tensors", "huggingface_hub", "jinja2", "jupytext",
    "matplotlib", "nbconvert", "nbformat", "plotly", "pyright",
}  # fmt: skip
BITS = {"test_greedy", "test_delta_decoding", "test_precision"}
# The lane with PyTorch has the jax that lowered the recorded programs; the other would skip the test.
WITH_RECORDED_JAX = {"test_fingerprints"}
# Tests whose cases together take more than ten seconds, compilation included; `pytest --durations=0` shows them.
SLOW = set((TESTS / "slow.txt").read_text(encoding="utf-8").split())


class Source:
    """The definitions and the imports of one file of tests or of the validation."""

    def __init__(self, path: Path):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        self.imported: dict[str, tuple[str, str | None]] = {}
        self.defined: dict[str, ast.stmt] = {}
        outside: list[ast.stmt] = []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.defined[node.name] = node
                continue
            outside.append(node)
            for target in node.targets if isinstance(node, ast.Assign) else []:
                self.defined |= {name.id: node for name in ast.walk(target) if isinstance(name, ast.Name)}
            if isinstance(node, ast.Import):
                self.imported |= {alias.asname or alias.name: (alias.name, None) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (node.module, alias.name)
        direct = any(package in PACKAGES for node in outside for package in _packages(node))
        self.needs_torch = direct or any(
            (source := source_of(module)) is not None and source.needs_torch for module, _ in self.imported.values()
        )


@functools.cache
def source_of(module: str) -> Source | None:
    """The source of a test, of a helper or of a module of the validation; None for other modules."""
    if module.startswith("validation."):
        path = TESTS.parent / (module.replace(".", "/") + ".py")
        return Source(path) if path.is_file() else None
    return Source(_paths()[module]) if module in _paths() else None


@functools.cache
def _paths() -> dict[str, Path]:
    return {path.stem: path for path in TESTS.rglob("*.py")}


def _packages(node: ast.AST) -> Iterator[str]:
    """The packages that a statement imports, also inside functions and by `pytest.importorskip`."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom):
            yield str(inner.module).partition(".")[0]
        elif isinstance(inner, ast.Call) and ast.unparse(inner.func) == "pytest.importorskip":
            asked = inner.args[0]
            yield str(asked.value).partition(".")[0] if isinstance(asked, ast.Constant) else "torch"


@functools.cache
def needs_torch(module: str, name: str) -> bool:
    """Whether a definition of a module imports one of `PACKAGES`, itself or through what it names."""
    return _needs_torch(module, name, set())


def _needs_torch(module: str, name: str, visited: set[tuple[str, str]]) -> bool:
    source = source_of(module)
    if source is None or (module, name) in visited:
        return False
    visited.add((module, name))
    if source.needs_torch:
        return True
    if name in source.imported:
        origin, original = source.imported[name]
        return original is not None and _needs_torch(origin, original, visited)
    if name not in source.defined:
        return False
    node = source.defined[name]
    if any(package in PACKAGES for package in _packages(node)):
        return True
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
            origin, original = source.imported.get(inner.value.id, ("", None))
            if original is None and _needs_torch(origin, inner.attr, visited):
                return True
        called = inner.id if isinstance(inner, ast.Name) else inner.arg if isinstance(inner, ast.arg) else None
        if called is not None and _needs_torch(module, called, visited):
            return True
    return False


def set_markers(items: list[pytest.Item]) -> None:
    """Mark every collected test. Of a slow test with several cases the first is not marked, so `make test` runs it."""
    names = [(item.path.stem, item.nodeid.split("::")[1].partition("[")[0]) for item in items]
    cases = collections.Counter(names)
    seen: set[tuple[str, str]] = set()
    for item, (file, test) in zip(items, names, strict=True):
        if needs_torch(file, test) or file in WITH_RECORDED_JAX:
            item.add_marker("torch")
        if file in BITS:
            item.add_marker("bits")
        if f"{file}::{test}" in SLOW and ((file, test) in seen or cases[file, test] == 1):
            item.add_marker("slow")
        seen.add((file, test))
