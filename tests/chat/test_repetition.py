"""Loops at the end of a text are found exactly, and what only looks like one is not."""

from __future__ import annotations

import random
import re

import pytest

from eagle3_jax.chat.repetition import Repetition, repetition_of

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("tokens", "repetition"),
    [
        ([7] * 64, Repetition(1, 64)),
        ([7] * 63, None),
        ([1, 2, 3] * 22, Repetition(3, 22)),
        # The beginning does not matter, nor where in the n-gram the text ends.
        ([9, 9, 8, *[1, 2, 3] * 22, 1], Repetition(3, 22)),
        ([*[1, 2, 3] * 22, 4], None),
        ([*range(20)] * 4, Repetition(20, 4)),
        # A chorus of three times, rows that count, and a longer n-gram than is compared.
        ([*range(20)] * 3, None),
        ([token for row in range(30) for token in (5, 6, row, 7, 8)], None),
        ([*range(65)] * 5, None),
        ([], None),
    ],
)
def test_a_loop_is_found(tokens: list[int], repetition: Repetition | None) -> None:
    assert repetition_of(tokens) == repetition


def test_a_loop_is_what_a_regular_expression_finds() -> None:
    generator = random.Random(0)
    for _ in range(200):
        unit = [generator.randrange(2) for _ in range(generator.randint(1, 70))]
        tokens = [0, 1, *unit * generator.randint(1, 70), *unit[: generator.randint(0, 1)]]
        text = "".join(map(str, tokens))
        matches = [
            (length, times)
            for length in range(1, 65)
            for times in [max(4, -(-64 // length))]
            if re.search(rf"(.{{{length}}})\1{{{times - 1}}}$", text)
        ]
        assert repetition_of(tokens) == (matches[0] if matches else None)


def test_it_is_said_in_words() -> None:
    assert str(Repetition(1, 64)) == "the last token came 64 times in a row"
    assert str(Repetition(12, 6)) == "the last 12 tokens came 6 times in a row"
