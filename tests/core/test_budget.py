"""The project stays small: the files to read for the algorithm, and each folder, have a budget in lines of Python.

A budget grows only with a decision in ``docs/design.md``, which says what the lines are for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
READING_PATH = ("types", "state", "loop", "acceptance", "tree", "cache", "sampling", "drafters/eagle3", "drafters/grow")


def count_lines(*paths: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def test_the_algorithm_is_read_in_nine_files() -> None:
    assert count_lines(*(ROOT / "eagle3_jax" / f"{name}.py" for name in READING_PATH)) <= 1600
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    places = [readme.index(f"`{name.split('/')[-1]}.py`") for name in READING_PATH]
    assert places == sorted(places), "the README names these files in reading order"


@pytest.mark.parametrize(
    ("folder", "most"),
    [
        ("eagle3_jax", 27_070),
        ("conversion", 8_150),
        ("validation", 7_200),
        ("tests", 28_220),
        ("notebooks", 8_650),
        ("examples", 1_995),
        ("docs", 1_590),
    ],
)
def test_each_folder_keeps_its_budget(folder: str, most: int) -> None:
    files = [path for path in (ROOT / folder).rglob("*.py") if "_build" not in path.parts and not path.is_symlink()]
    if folder == "eagle3_jax":
        files = [path for path in files if "conversion" not in path.relative_to(ROOT / folder).parts]
    assert count_lines(*files) <= most, f"{folder} has grown; say why in docs/design.md, or make it smaller"
