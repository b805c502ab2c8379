"""Every block of Python on the pages that teach by code runs as it stands."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest
import tiny

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", ["stepping.md", "drafters.md"])
def test_the_blocks_of_a_page_run_in_order(
    page: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / page).read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 3, "the fences of this page are written otherwise"
    module = types.ModuleType("page")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "page", module)
    with tiny.unchecked():  # as users run them
        for block in blocks:
            above = text[: block.start(1)].count("\n")  # a failure names the line of the page
            exec(compile("\n" * above + block[1], str(DOCS / page), "exec"), vars(module))
    shown = capsys.readouterr().out
    assert {"stepping.md": "consumed by the step before", "drafters.md": "15 passed, 0 failed, 0 not run"}[
        page
    ] in shown
