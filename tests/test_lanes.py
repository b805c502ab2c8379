"""Every test runs in a lane of continuous integration: no file is left out of both."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parent
IGNORE = re.compile(r"--ignore(?:-glob)?=(\S*?\.py|\S*\*)")


def test_no_test_file_is_ignored_by_both_lanes() -> None:
    text = (TESTS.parent / ".ci" / "run").read_text(encoding="utf-8")
    newest, first = text.split('\nonce="')
    first = first.split('"\n')[0]
    files = [f"tests/{path.name}" for path in TESTS.glob("test_*.py")]
    ignored = [
        {name for name in files for glob in IGNORE.findall(lane) if fnmatch(name, glob)} for lane in (newest, first)
    ]
    assert min(map(len, ignored)) > 20, "the lists of .ci/run were not found"
    assert not ignored[0] & ignored[1]
