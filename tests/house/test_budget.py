"""The code stays readable: limits on its size, and on what a statement holds.

They fall with every change, except one that adds a capability, as the server, certificates, the
oracle, the files of what is downloaded most, the page that computes, rollouts and the check of a
release (0.5) did.

The weight of a statement is its number of expression nodes, without annotations. So neither line
lengths nor types change it, and splitting a statement hardly changes the total. A packing assigns
several values in one statement (``a, b = x, y``). A vague name is a variable or a parameter that
names no thing (``one``, ``found``, ``given``). See ``docs/design.md``, 22.
"""

from __future__ import annotations

import ast
import statistics
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent.parent
READING_PATH = (
    "types",
    "state",
    "loop",
    "acceptance",
    "tree",
    "cache",
    "sampling",
    "drafters/eagle3",
    "drafters/grow",
)
VAGUE_NAMES = """
    one other own found given asked wanted whole rest said told kept made each place how what of
    alike apart alone mine beside going left ends
"""
VAGUE = frozenset(VAGUE_NAMES.split())
SIMPLE = (ast.Assign, ast.Return, ast.Expr, ast.AugAssign, ast.AnnAssign, ast.Assert)


class Counts(NamedTuple):
    """What is limited; a folder may have less of each."""

    weight: int
    median_weight: int
    packings: int
    vague_names: int


LIMITS = {
    "eagle3_jax": Counts(87_000, 8, 0, 0),
    "conversion": Counts(24_720, 7, 0, 0),
    "validation": Counts(23_420, 8, 0, 0),
    "tests": Counts(113_570, 9, 0, 0),
    "notebooks": Counts(14_340, 9, 0, 0),
    "examples": Counts(16_410, 8, 0, 0),
    "docs": Counts(9_950, 10, 0, 0),
}


class Reader:
    """Counts of the files that it has read."""

    def __init__(self, files: list[Path]) -> None:
        self.weights: list[int] = []
        self.packings = 0
        self.vague_names = 0
        for file in files:
            self.read(ast.parse(file.read_text(encoding="utf-8")), in_function=False)

    def read(self, node: ast.AST, *, in_function: bool) -> int:
        """Returns the number of expression nodes below a node."""
        in_function = in_function or isinstance(node, ast.FunctionDef)
        weight = 0
        for name, field in ast.iter_fields(node):
            for child in field if isinstance(field, list) else [field]:
                if isinstance(child, ast.AST) and name not in ("annotation", "returns"):
                    weight += isinstance(child, ast.expr) + self.read(
                        child, in_function=in_function
                    )

        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if in_function and isinstance(node, SIMPLE) and not is_docstring:
            self.weights.append(weight)
        self.packings += is_packing(node)
        self.vague_names += name_bound_by(node) in VAGUE
        return weight

    @property
    def counts(self) -> Counts:
        median = round(statistics.median(self.weights))
        return Counts(sum(self.weights), median, self.packings, self.vague_names)


def is_packing(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and {*map(ast.unparse, node.targets[0].elts)}
        != {*map(ast.unparse, node.value.elts)}  # a swap
    )


def name_bound_by(node: ast.AST) -> str:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    return node.arg if isinstance(node, ast.arg) else ""


def files_of(folder: str) -> list[Path]:
    """Python files of a folder; ``eagle3_jax/conversion`` is a link to a folder of its own."""
    files = (ROOT / folder).rglob("*.py")
    return [
        file
        for file in files
        if "_build" not in file.parts and (ROOT / folder / "conversion") not in file.parents
    ]


@pytest.mark.parametrize("folder", LIMITS)
def test_a_folder_keeps_its_limits(folder: str) -> None:
    check(folder, Reader(files_of(folder)).counts, LIMITS[folder])


def check(folder: str, counts: Counts, limits: Counts) -> None:
    for name, count, limit in zip(Counts._fields, counts, limits, strict=True):
        assert count <= limit, (
            f"{folder}: {count} {name}, more than {limit}; docs/design.md, 22, says why there are"
            " limits"
        )


def test_the_algorithm_is_read_in_nine_files() -> None:
    files = [ROOT / "eagle3_jax" / f"{name}.py" for name in READING_PATH]
    check(
        "the reading path",
        Reader(files).counts,
        Counts(weight=4_570, median_weight=8, packings=0, vague_names=0),
    )
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    places = [readme.index(f"`{name.split('/')[-1]}.py`") for name in READING_PATH]
    assert places == sorted(places), "the README names these files in reading order"


def test_the_file_for_students_is_short() -> None:
    counts = Reader([ROOT / "examples" / "nano_eagle3.py"]).counts
    check(
        "nano_eagle3.py", counts, Counts(weight=2_110, median_weight=8, packings=0, vague_names=0)
    )


def test_the_root_of_the_package_has_seventeen_files() -> None:
    assert len(list((ROOT / "eagle3_jax").glob("*.py"))) <= 17
