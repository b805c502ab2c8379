"""The gate: every planted bug must be caught by its check, and every check is first seen to pass without a bug."""

from __future__ import annotations

import pytest
from mutants import ENTRY, Mutant
from planted_bugs import MUTANTS, zero_mass

from eagle3_jax.sampling import draw


@pytest.mark.parametrize("bug", MUTANTS)
def test_the_suite_catches_that(bug: str) -> None:
    mutant = MUTANTS[bug]
    mutant.seen_green()
    with mutant.bug(), pytest.raises(AssertionError):
        mutant.run()


def test_a_check_that_always_fails_catches_nothing() -> None:
    def broken() -> None:
        raise AssertionError("always")

    with pytest.raises(AssertionError, match="always"):
        Mutant(draw, ENTRY, "pass", broken).seen_green()


def test_a_mutant_of_source_that_has_changed_is_stale() -> None:
    with pytest.raises(AssertionError, match="gone stale"), Mutant(draw, "no such line", "", zero_mass).bug():
        pass
