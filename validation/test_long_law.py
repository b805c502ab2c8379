"""L2, over many rounds: every token of millions follows its law, whatever stood before it.

The checks are those of ``tests/test_long_law.py`` with as many tokens as half a percent takes. Tables make tokens cheap
and their law exact. Fewer tokens check what they cannot show: a decoder, a recurrent one, weights in FP8, and random
heads of every method; and ids of two digits, whose law has many cells.
"""

from __future__ import annotations

import pytest
import test_long_law as law

from validation.checks import Check
from validation.statistics import Fluctuation

pytestmark = pytest.mark.level("L2")

ROWS, DECODER_RUNS, WIDE_RUNS = 8192, 3, 8
TRUNCATED_RUNS = {"plain decoding": 48, "a chain of drawn tokens": 48, "a dynamic tree": 6}  # each sorts the vocabulary
WANTED = 0.005  # of every cell's probability, root mean square
CELLS = "setting and context"


def noted(check: Check, name: str, found: dict[str, Fluctuation]) -> None:
    """Keep what was seen and what would have been."""
    check.table(
        f"{name}: tokens beyond their expected counts, by what came before them; a deviation of the size in the last "
        f"column, root mean square over cells, would have failed with {law.POWER:.0%} power",
        ["by", "tokens", "degrees", "chi-square p", "sees (%)"],
        [
            [group, one.tokens, one.degrees, float(f"{one.p_value:.2g}"), round(100 * one.sees(law.ALPHA), 3)]
            for group, one in found.items()
        ],
    )
    total = found["all together"]
    finest = found.get(CELLS, found["context"])
    check.number(tokens=total.tokens, smallest_p=min(one.p_value for one in found.values()))
    check.sees = (
        f"{100 * finest.sees(law.ALPHA):.2f} % rms of the probabilities of {finest.degrees} free cells, "
        f"{100 * total.sees(law.ALPHA):.2f} % where all contexts are off alike"
    )


@pytest.mark.parametrize("name", law.DRAFTERS)
def test_millions_of_tokens_follow_their_law_with(check: Check, name: str) -> None:
    runs = 63 if name == "a schedule" else 42  # its rows end one after the other, and so are shorter
    found = law.check_long_law(name, rows=ROWS, runs=runs)
    noted(check, name, found)
    assert found[CELLS].sees(law.ALPHA, law.POWER) <= WANTED


@pytest.mark.parametrize("name", law.WIDE_DRAFTERS)
def test_tokens_of_two_digits_follow_their_law_with(check: Check, name: str) -> None:
    noted(check, name, law.check_long_law(name, rows=ROWS, runs=WIDE_RUNS))


@pytest.mark.parametrize("name", TRUNCATED_RUNS)
def test_truncated_tokens_follow_their_law_with(check: Check, name: str) -> None:
    runs = TRUNCATED_RUNS[name]
    noted(check, name, law.check_long_law(name, settings=law.TRUNCATIONS, rows=ROWS, runs=runs, first=100))


@pytest.mark.parametrize("name", law.HEADS)
def test_tokens_of_a_decoder_follow_their_law_with(check: Check, name: str) -> None:
    noted(check, name, law.check_long_law(name, rows=ROWS // 2, runs=DECODER_RUNS))
