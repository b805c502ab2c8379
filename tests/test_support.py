"""The support matrix: what runs record, and that the page says what the record says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "docs" / "recorded"))
import support  # noqa: E402
import support_record  # noqa: E402

from eagle3_jax.conversion.families import FAMILIES, WRAPPERS  # noqa: E402


def test_the_page_is_its_record() -> None:
    text = support.PAGE.read_text(encoding="utf-8")
    assert text == support.filled(text, support.cases()), "run python docs/recorded/support.py"


def test_what_is_recorded_is_of_the_matrix_and_of_tests_that_are_there() -> None:
    assert support.PRECISIONS == support_record.PRECISIONS
    assert support.DRAFTS == support_record.DRAFTS
    assert tuple(support.WHAT) == support_record.WHAT
    for name, case in support.cases().items():
        file, _, test = name.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(encoding="utf-8"), name
        for family, precision, draft, what in case["cells"]:
            assert family in {*FAMILIES, *WRAPPERS} and precision in support.PRECISIONS, name
            assert draft in support.DRAFTS and what in support.WHAT, name
    assert all(case["passed"] for case in support.cases().values())


def test_a_family_whose_texts_are_recorded_was_drafted_for_by_chains_and_trees() -> None:
    found = support.cells(support.cases())
    for family in {cell.family for cell in found if cell[1:] == ("float32", "plain", "parity")}:
        for draft in support.DRAFTS:
            assert found[support.Cell(family, "float32", draft, "parity")].passed, (family, draft)


def test_the_page_says_what_a_dash_means() -> None:
    text = support.PAGE.read_text(encoding="utf-8")
    assert "A linked cell is covered by that test. A dash means untested." in " ".join(text.split())
    assert "A cell without a link is not supported" not in text


def test_a_cell_needs_all_of_its_cases() -> None:
    def case(passed: bool, *drafts: str) -> dict[str, object]:
        return {"passed": passed, "cells": [["llama", "float32", draft, "parity"] for draft in drafts]}

    recorded = {"tests/a.py::one": case(True, "plain", "chain"), "tests/b.py::two[x]": case(False, "chain")}
    found = support.cells(recorded)
    assert support.text_of(found, "llama", "float32", "parity") == (
        "[plain, **chain fails**](../tests/a.py), [b](../tests/b.py)"
    )
    assert support.text_of(found, "llama", "fp8", "parity") == "–"
    page = support.filled(f"above {support.BEGIN} old {support.END} below", recorded)
    assert page.startswith("above <") and page.endswith("> below") and "old" not in page
    assert "| `llama` | [plain, **chain fails**](../tests/a.py), [b](../tests/b.py) | – |" in page
    assert "**`fp8`**: no recorded test covers a family in it." in page
    assert "`mistral3`" not in page  # what another model is part of has a row only where a test covers it
    of_a_whole = {"tests/a.py::one": {"passed": True, "cells": [["mistral3", "fp8", "plain", "parity"]]}}
    row = "| Mistral Small 3.1, 3.2; Ministral 3 | `mistral3` | [plain](../tests/a.py) | – |"
    assert support.filled(page, of_a_whole).count(row) == 1
    with pytest.raises(ValueError, match="no place for the tables"):
        support.filled("", recorded)


TESTS = """
import pytest
from support_record import pytest_addoption, pytest_configure

MARK = pytest.mark.covers(what="parity", family=lambda name: name, draft=("plain", "tree"))

@MARK
@pytest.mark.parametrize("name", ["llama", "qwen3", "none"])
def test_some(name):
    assert name != "qwen3"
    if name == "none":
        pytest.skip()

@pytest.mark.covers(what="contract", family=lambda: None)
def test_of_no_family():
    pass

@pytest.mark.covers(what="mesh", family="llama", precision="fp8")
def test_other():
    pass

@pytest.mark.covers(what="parity", family="llama")
def test_that_does_not_start(request):
    request.getfixturevalue("nothing")
"""


def test_a_run_adds_its_cases_to_a_record(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from support_record import pytest_addoption, pytest_configure\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    place = tmp_path / "support.json"
    kept = {"passed": True, "cells": [["gemma", "float32", "plain", "parity"]]}
    place.write_text(json.dumps({"cases": {"test_else.py::one": kept}}))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(tmp_path),
        "--rootdir",
        str(tmp_path),
    ]
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PATH": ""}
    run = subprocess.run(
        [*command, "--record-support", str(place)], capture_output=True, text=True, env=environment, check=False
    )
    assert "2 failed" in run.stdout or "1 failed" in run.stdout, run.stdout + run.stderr
    cases = json.loads(place.read_text())["cases"]
    both = [[name, "float32", draft, "parity"] for name in ("llama",) for draft in ("plain", "tree")]
    assert cases.pop("test_else.py::one") == kept
    assert cases.pop("test_it.py::test_some[llama]") == {"passed": True, "cells": both}
    assert not cases.pop("test_it.py::test_some[qwen3]")["passed"]
    assert cases.pop("test_it.py::test_other")["cells"] == [["llama", "fp8", "plain", "mesh"]]
    assert not cases.pop("test_it.py::test_that_does_not_start")["passed"]
    assert cases == {}
    wrong = TESTS.replace('what="mesh"', 'what="mess"')
    (tmp_path / "test_it.py").write_text(wrong)
    run = subprocess.run(
        [*command, "--record-support", str(place)], capture_output=True, text=True, env=environment, check=False
    )
    assert "covers what ['mess']; expected some of parity" in run.stdout + run.stderr
