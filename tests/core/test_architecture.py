"""Reads the direction of every import from the source, and that the library needs no PyTorch and prints nothing."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIBRARY = ROOT / "eagle3_jax"
FILES = sorted(path for path in LIBRARY.rglob("*.py") if path != LIBRARY / "__init__.py")

# A module may import modules of its own line (with exceptions below) or of a line above.
LAYERS = (
    ("certify.frequencies", "devices", "files.versions", "files.writing"),
    ("cache", "chat.template", "files.jsonl", "files.published", "models.config"),
    ("types",),
    ("tree", "topology", "sampling"),
    ("acceptance", "checks", "loaded", "results", "state", "stats", "verifiers"),
    ("models",),
    ("drafters",),
    ("loop", "theory"),
    ("files.sources", "schedule"),
    ("decode",),
    ("chat.conversation", "serving", "testing", "load", "training", "bench", "files.prompts"),
    ("certify", "oracle"),
    ("chat", "files", "cli", "certify.__main__", "__main__"),
)
MAY_IMPORT_CONVERSION = {"cli", "load", "oracle"}
# Modules of drafters that other drafters may import.
SHARED = {"base", "eagle3", "grow", "parallel", "static_tree", "text"}


def name_of(path: Path) -> str:
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    ranks = {name: rank for rank, names in enumerate(LAYERS) for name in names}
    prefixes = [name for name in ranks if f"{module}.".startswith(f"{name}.")]
    assert prefixes, f"{module} has no layer; give it one in {Path(__file__).name}"
    longest = max(prefixes, key=len)
    return ranks[longest]


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Yields every imported module with its statement; a name that is a submodule counts as that module."""
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


def test_imports_point_downward() -> None:
    for path, tree in TREES.items():
        module = name_of(path)
        is_method = path.parent.name == "drafters" and path.stem != "__init__"
        for imported, node in imports(tree):
            if is_method and imported.startswith("eagle3_jax.drafters"):
                assert imported.rpartition(".")[2] in SHARED, f"{module} imports {imported}"
            if not imported.startswith("eagle3_jax") or imported.startswith(
                "eagle3_jax.conversion"
            ):
                continue
            if ast.unparse(node) == "from eagle3_jax import __version__":
                continue
            lower = imported.removeprefix("eagle3_jax").lstrip(".")
            if not lower:  # the whole public API
                assert module.split(".")[0] == "cli", f"{module} imports the whole package"
                continue
            assert layer_of(lower) <= layer_of(module), (
                f"{module} imports {lower}, which is a layer above it"
            )


def test_conversion_is_imported_by_loading_and_the_command_line_inside_functions() -> None:
    for path, tree in TREES.items():
        at_top = {id(node) for node in tree.body}
        for imported, node in imports(tree):
            if imported.startswith("eagle3_jax.conversion"):
                assert name_of(path).split(".")[0] in MAY_IMPORT_CONVERSION, name_of(path)
                assert id(node) not in at_top, (
                    f"{name_of(path)}: import conversion inside the function that needs it"
                )


def test_the_library_needs_no_torch_prints_nothing_and_reads_no_environment_variable() -> None:
    # These modules may read variables: the place of caches (docs/design.md, 9), the share of a
    # GPU's memory that JAX takes, a switch for GPUs on which the kernel fails (docs/design.md, 21),
    # and a server's key.
    reads = ("files.writing", "bench.memory", "models.flash", "cli._certifying")
    for path, tree in TREES.items():
        layer = name_of(path).split(".")[0]
        may_print = layer == "cli" or name_of(path) == "oracle.check"  # a program of its own
        at_top = {id(node) for node in tree.body}
        for imported, node in imports(tree):
            if imported.split(".")[0] in ("torch", "transformers", "vllm"):
                where = f"{name_of(path)}:{node.lineno} imports {imported}"
                may = layer == "cli" or name_of(path) == "bench.transformers"
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
    for package in ("eagle3_jax", "eagle3_jax/conversion", "validation"):  # rglob follows no link
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
