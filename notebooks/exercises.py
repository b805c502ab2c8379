"""Exercises: a check judges the reader's function, and an answer replaces an empty one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Function = TypeVar("Function", bound=Callable)


def checked(written: Function, answer: Function, check: Callable[[Function], None]) -> Function:
    """Returns the reader's function if it passes the check, and the answer if it is not filled in.

    Args:
        written: The reader's function. An empty one raises ``NotImplementedError``.
        answer: A right function, from the folded cell.
        check: Raises ``AssertionError`` with a reason if a function is wrong.
    """
    try:
        check(written)
    except NotImplementedError:
        check(answer)
        print(f"{written.__name__}: not filled in yet, so the folded answer is used")
        return answer
    print(f"{written.__name__}: correct")
    return written
