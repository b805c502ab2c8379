"""Texts that end in a loop, as small models write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LONGEST = 64  #: Tokens of the longest n-gram.
TIMES = 4  #: Times in a row that an n-gram must come.
FEWEST = 64  #: Tokens that these repetitions must have together.


class Repetition(NamedTuple):
    """The end of a text: the same n-gram several times in a row."""

    length: int  #: Tokens of the n-gram.
    times: int  #: Times that it comes.

    def __str__(self) -> str:
        words = "token" if self.length == 1 else f"{self.length} tokens"
        return f"the last {words} came {self.times} times in a row"


def repetition_of(tokens: Sequence[int]) -> Repetition | None:
    """Returns the shortest n-gram that the newest tokens repeat; ``None`` without a loop.

    The newest tokens are exactly the same n-gram of at most ``LONGEST`` tokens, at least ``TIMES``
    times in a row and over at least ``FEWEST`` tokens. A shorter loop would be found in lists of
    equal numbers and in rows of a table.
    """
    for length in range(1, min(LONGEST, len(tokens) // TIMES) + 1):
        times = max(TIMES, -(-FEWEST // length))
        end = list(tokens[-length * times :])
        if end == end[:length] * times:
            return Repetition(length, times)
    return None
