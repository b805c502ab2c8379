"""Mutation tests: its check must catch every injected bug, and must pass without a bug."""

from __future__ import annotations

import pytest
from injected_bugs import BUGS


@pytest.mark.parametrize("bug", BUGS)
def test_the_suite_catches_that(bug: str) -> None:
    mutant = BUGS[bug]
    mutant.run_without_bug()
    with mutant.injected(), pytest.raises(AssertionError):
        mutant.run()
