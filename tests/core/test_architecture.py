"""The direction of every import, and what the library never does, read from the source itself."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from eagle3_jax.cli._errors import _EXTRAS

ROOT = Path(__file__).parent.parent.parent
LIBRARY = ROOT / "eagle3_jax"
FILES = sorted(path for path in LIBRARY.rglob("*.py") if path != LIBRARY / "__init__.py")

# A module may import what stands on its own line (with exceptions below) or above.
LAYERS = (
    ("devices", "files.writing"),
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
    ("chat", "files", "cli", "__main__"),
)
MAY_IMPORT_CONVERSION = {"cli", "load"}
# What drafters may import of each other: shared parts, and the head of EAGLE-3.
SHARED = {"base", "eagle3", "grow", "parallel", "static_tree", "text"}


def name_of(path: Path) -> str:
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    matches = [
        (len(name), rank) for rank, names in enumerate(LAYERS) for name in names if f"{module}.".startswith(f"{name}.")
    ]
    assert matches, f"{module} has no layer; give it one in {Path(__file__).name}"
    return max(matches)[1]


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Every module imported, a name imported from a package counted as its submodule where there is one."""
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
            if not imported.startswith("eagle3_jax") or imported.startswith("eagle3_jax.conversion"):
                continue
            if ast.unparse(node) == "from eagle3_jax import __version__":
                continue
            other = imported.removeprefix("eagle3_jax").lstrip(".")
            if not other:  # the public API as a whole: only what stands on top of everything may use it
                assert module.split(".")[0] == "cli", f"{module} imports the whole package"
                continue
            assert layer_of(other) <= layer_of(module), f"{module} imports {other}, which stands above it"


def test_only_reading_and_the_command_line_import_conversion_and_only_where_they_use_it() -> None:
    for path, tree in TREES.items():
        at_top = {id(node) for node in tree.body}
        for imported, node in imports(tree):
            if imported.startswith("eagle3_jax.conversion"):
                assert name_of(path).split(".")[0] in MAY_IMPORT_CONVERSION, name_of(path)
                assert id(node) not in at_top, f"{name_of(path)}: import conversion inside the function that needs it"


def test_the_library_needs_no_torch_prints_nothing_and_reads_no_environment_variable() -> None:
    # These may read variables. Where users keep caches is decided in one place (docs/design.md, 9). JAX reads from a
    # variable how it takes a GPU's memory. Every command must work on a GPU whose kernel fails (docs/design.md, 21).
    reads = ("files.writing", "bench.memory", "models.flash")
    for path, tree in TREES.items():
        layer = name_of(path).split(".")[0]
        at_top = {id(node) for node in tree.body}
        for imported, node in imports(tree):
            if imported.split(".")[0] in ("torch", "transformers", "vllm"):
                where = f"{name_of(path)}:{node.lineno} imports {imported}"
                may = layer == "cli" or name_of(path) == "bench.transformers"
                assert may and id(node) not in at_top, where
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and layer != "cli":
                assert node.func.id != "print", f"{name_of(path)}:{node.lineno} prints"
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv"):
                assert name_of(path) in reads, f"{name_of(path)}:{node.lineno} reads the environment"


def test_no_module_imports_what_imports_it() -> None:
    """Directly or through others, at the top, in a function or for type checkers."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ("eagle3_jax", "eagle3_jax/conversion", "validation")  # rglob follows no link
        for path in (ROOT / package).rglob("*.py")
    }
    imported = {
        name: {other for other, _ in imports(ast.parse(path.read_text())) if other in modules} - {name}
        for name, path in modules.items()
    }
    graph = graphlib.TopologicalSorter(imported)
    graph.prepare()  # a CycleError names the modules


def test_every_import_is_of_a_required_package_or_is_lazy_and_its_extra_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = lambda lines: {re.split(r"[\[<>=!~ ;]", line)[0].replace("_", "-").lower() for line in lines}
    required = packages(project["dependencies"])
    extras = {name: packages(lines) for name, lines in project["optional-dependencies"].items()}
    imported = {"filelock"}  # by JAX, when it prunes its compilation cache
    for path in (*FILES, *(ROOT / "conversion").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lazy = (ast.FunctionDef, ast.If)
        inner = {id(one) for node in ast.walk(tree) if isinstance(node, lazy) for one in ast.walk(node)}
        for module, node in imports(tree):
            top = module.split(".")[0]
            package = {"orbax": "orbax-checkpoint"}.get(top, top).replace("_", "-").lower()
            if top in sys.stdlib_module_names or top in ("eagle3_jax", "conversion"):
                continue
            imported.add(package)
            if package not in required:
                assert id(node) in inner, f"{path}:{node.lineno} imports {top} too early"
                assert package in extras[_EXTRAS[top]], f"no extra brings {top}, which {path} imports"
    assert imported >= required
