"""Directions of imports, from the source; the library needs no PyTorch and prints nothing."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent.parent
LIBRARY = ROOT / "eagle3_jax"
# ``eagle3_jax/conversion`` is a link, which is not followed from above.
FILES = sorted([*LIBRARY.rglob("*.py"), *(LIBRARY / "conversion").rglob("*.py")])
FILES.remove(LIBRARY / "__init__.py")

# A package, or a file at the root, may import those of the floors below its own.
FLOORS = (
    ("files",),
    ("devices",),
    ("cache", "topology"),
    ("types",),
    ("checks", "text", "tree", "sampling", "stats"),
    ("acceptance", "loaded", "results", "state"),
    ("models", "prompts", "verifiers"),
    ("drafters", "processors"),
    ("conversion", "loop", "theory"),
    ("load", "schedule"),
    ("decode",),
    ("chat", "engine", "measure"),
    ("bench", "server", "testing", "training"),
    ("certify", "oracle", "tunix"),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MAY_IMPORT_CONVERSION = {"cli", "load", "oracle"}
# Modules of drafters that other drafters may import.
SHARED = {"base", "dflash", "eagle3", "grow", "parallel", "static_tree", "text"}


def name_of(path: Path) -> str:
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Yields every imported module with its statement; a submodule's name counts as that module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = ROOT / f"{node.module}.{alias.name}".replace(".", "/")
                exists = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
                yield (f"{node.module}.{alias.name}" if exists else str(node.module)), node


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}


def room_of(module: str) -> str:
    """Returns the package or the file at the root that a module belongs to."""
    return module.removeprefix("eagle3_jax").lstrip(".").split(".")[0]


def test_no_import_runs_up() -> None:
    rooms = {room_of(name_of(path)) for path in TREES}
    assert rooms == set(FLOOR_OF), "every package and every file at the root has a floor"

    for path, tree in TREES.items():
        room = room_of(name_of(path))
        for imported, node in imports(tree):
            is_ours = imported.split(".")[0] == "eagle3_jax"
            if not is_ours or ast.unparse(node) == "from eagle3_jax import __version__":
                continue
            lower = room_of(imported)
            # The public API.
            if not lower:
                assert room == "cli", f"{name_of(path)} imports the whole package"
                continue

            is_below = FLOOR_OF[lower] < FLOOR_OF[room]
            assert lower == room or is_below, (
                f"{name_of(path)} imports {imported}, which is not below it"
            )


def test_a_method_imports_no_other_method() -> None:
    for path, tree in TREES.items():
        if path.parent.name != "drafters" or path.stem in ("__init__", "named"):
            continue
        for imported, _ in imports(tree):
            if imported.startswith("eagle3_jax.drafters"):
                assert imported.rpartition(".")[2] in SHARED, f"{name_of(path)} imports {imported}"


def test_conversion_is_imported_by_loading_and_the_command_line_inside_functions() -> None:
    for path, tree in TREES.items():
        at_top = {id(node) for node in tree.body}
        for imported, node in imports(tree):
            if (
                imported.startswith("eagle3_jax.conversion")
                and room_of(name_of(path)) != "conversion"
            ):
                assert name_of(path).split(".")[0] in MAY_IMPORT_CONVERSION, name_of(path)
                assert id(node) not in at_top, (
                    f"{name_of(path)}: import conversion inside the function that needs it"
                )


def test_the_library_needs_no_torch_prints_nothing_and_reads_no_environment_variable() -> None:
    # These modules may read variables: the place of caches (docs/design.md, 9), the share of a
    # GPU's memory that JAX takes, a switch for GPUs on which the kernel fails (docs/design.md, 21),
    # and a server's key.
    reads = ("files.writing", "measure.memory", "models.flash", "certify.command")

    for path, tree in TREES.items():
        layer = name_of(path).split(".")[0]
        # The check of the oracle is a program.
        may_print = layer == "cli" or name_of(path) == "oracle.check"
        at_top = {id(node) for node in tree.body}

        for imported, node in imports(tree):
            if imported.split(".")[0] in ("torch", "transformers", "vllm"):
                where = f"{name_of(path)}:{node.lineno} imports {imported}"
                may = layer in ("cli", "conversion") or name_of(path) == "bench.transformers"
                assert may and id(node) not in at_top, where

        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not may_print:
                assert node.func.id != "print", f"{name_of(path)}:{node.lineno} prints"
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
                assert name_of(path) in reads, (
                    f"{name_of(path)}:{node.lineno} reads the environment"
                )


def test_imports_have_no_circle() -> None:
    """Imports inside functions and for type checkers count too."""
    modules = {}
    # rglob follows no link.
    for package in ("eagle3_jax", "eagle3_jax/conversion", "validation"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts).removesuffix(".__init__")
            modules[name] = path

    imported = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text())
        imported[name] = {
            module for module, _ in imports(tree) if module in modules and module != name
        }

    graph = graphlib.TopologicalSorter(imported)
    graph.prepare()  # a CycleError names the modules
