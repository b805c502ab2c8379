"""Suffix decoding against counts over all suffixes, written with lists."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from lookups import propose

from eagle3_jax.drafters import Suffix

pytestmark = pytest.mark.core


def continued(text: list[int], drafter: Suffix) -> list[int]:
    """Returns the continuation with the largest expected number of accepted tokens.

    Of equals, that of the longest suffix.
    """
    best = 0.0
    drafted = []

    for size in range(min(drafter.max_suffix, len(text) - 1), 0, -1):
        occurrences = [
            end for end in range(size, len(text)) if text[end - size : end] == text[-size:]
        ]

        # The longest common suffix first, then the latest: of equal counts the first decides.
        occurrences.sort(key=lambda end: (-common(text, end, drafter.max_suffix), -end))

        total = len(occurrences)
        path = []
        score = 0.0

        while occurrences and len(path) < drafter.num_speculative_tokens:
            following = [
                text[end + len(path)] for end in occurrences if end + len(path) < len(text)
            ]
            if not following:
                break

            # Of equals, the first that was met.
            token, count = max(Counter(following).items(), key=lambda item: item[1])
            if count / total < drafter.min_probability:
                break

            score += count / total
            occurrences = [
                end for end in occurrences if text[end + len(path) : end + len(path) + 1] == [token]
            ]
            path.append(token)

        if round(score, 4) > best:
            best = round(score, 4)
            drafted = path

    return drafted


def common(text: list[int], end: int, most: int) -> int:
    size = 0
    while size < min(most, end) and text[end - 1 - size] == text[-1 - size]:
        size += 1
    return size


@pytest.mark.parametrize("options", [{}, {"max_suffix": 2}, {"min_probability": 0.6}], ids=str)
def test_it_proposes_what_most_often_followed(options: dict) -> None:
    drafter = Suffix(4, max_matches=24, **options)
    rng = np.random.default_rng(0)
    rows = [
        rng.integers(0, rng.integers(2, 4), size=rng.integers(2, 24)).tolist() for _ in range(300)
    ]
    draft = propose(drafter, rows)

    lengths = set()
    for row, tokens, valid in zip(rows, draft.tokens.tolist(), draft.valid.tolist(), strict=True):
        expected = continued(row, drafter)
        assert tokens[0] == row[-1]
        assert valid == [True] + [node < len(expected) for node in range(4)], (row, expected)
        assert tokens[1 : 1 + len(expected)] == expected, row
        lengths.add(len(expected))

    assert lengths == {0, 1, 2, 3, 4}, "a comparison of drafts of one length would show little"


def test_of_more_matches_than_are_counted_the_longest_and_latest_are() -> None:
    # After 1 2 comes 3 twice and then 4 once; two matches are counted, and the latest decides a tie.
    text = [9, 2, 7, 1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    (counted,), (all_of_them,) = (
        propose(Suffix(1, max_matches=most), [text]).tokens.tolist() for most in (2, 24)
    )
    assert counted[1] == 4
    assert all_of_them[1] == 3
