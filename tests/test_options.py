"""Values of options that several commands take."""

from __future__ import annotations

import pytest

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.cli._options import parse_numbers


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", [3]), ("1-4", [1, 2, 3, 4]), ("5,1,5", [1, 5]), ("1-3, 8", [1, 2, 3, 8]), ("100000", [100000])],
)
def test_numbers_are_ranges_and_lists(text, numbers):
    assert parse_numbers(text, "--chains") == numbers


@pytest.mark.parametrize(
    "text", ["", "0", "0-3", "3-1", "-1", "1-", "1,,2", "1-2-3", "1.5", "many", "none", "100001", "1-999999999999"]
)
def test_other_numbers_are_one_line(text):
    with pytest.raises(Misuse, match=r"--chains .* expected whole numbers from 1 to 100000, such as '1-7' or '1,3,5'$"):
        parse_numbers(text, "--chains")


def test_none_and_zero_only_where_they_mean_something():
    assert parse_numbers("none", "--ngram", or_none=True) == []
    assert parse_numbers("0,3", "--vllm-chains", least=0) == [0, 3]
    with pytest.raises(Misuse, match="from 1 to 16,"):
        parse_numbers("17", "--batch-sizes", most=16)
    with pytest.raises(Misuse, match=r"or 'none'$"):
        parse_numbers("0", "--ngram", or_none=True)
