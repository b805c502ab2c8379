"""Exercises: a check judges the reader's function, and an answer replaces an empty one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable)
_SHOWN = 8  # entries of an array, and of a list
_LONGEST = 110  # characters of a value


class Wrong(AssertionError):
    """A check has refused the reader's function. Jupyter shows the message without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def checked(written: Function, answer: Function, check: Callable[[Any], None]) -> Function:
    """Returns the reader's function if it passes the check, and the answer if it is not filled in.

    Args:
        written: The reader's function. An empty one raises ``NotImplementedError``.
        answer: A right function, from the folded cell.
        check: Raises ``AssertionError`` with a reason if a function is wrong.

    Raises:
        Wrong: The check refuses the function. The message has the reason, the value that the
            function returned and the value of the answer.
    """
    name = written.__name__
    calls: list[tuple[tuple, Any]] = []
    is_inside = False

    @functools.wraps(written)
    def recorded(*arguments: Any) -> Any:
        nonlocal is_inside
        is_inside = True
        value = written(*arguments)
        is_inside = False
        calls.append((arguments, value))
        return value

    try:
        check(recorded)
    except NotImplementedError:
        check(answer)
        print(f"{name}: not filled in yet, so the folded answer is used")
        return answer
    except Exception as error:
        reason = str(error)
        if not isinstance(error, AssertionError):
            # An error in the reader's own function needs its traceback.
            if is_inside:
                raise
            # The check stumbled over a value of another type.
            reason = f"the check cannot use this value ({type(error).__name__}: {error})"
        raise Wrong(f"{name}: {reason}{_difference(calls, answer)}") from None
    print(f"{name}: correct")
    return written


def _difference(calls: list[tuple[tuple, Any]], answer: Callable) -> str:
    """Returns lines with the last value that is not the answer's, and the answer's value."""
    for arguments, value in reversed(calls):
        # The answer may fail for arguments that a check traces or has changed.
        try:
            expected = answer(*arguments)
            returned = described(value, expected)
            right = described(expected, value)
        except Exception:
            return ""
        if returned != right:
            return f"\n  your function returned {returned}\n  the answer returns     {right}"
    return ""


def described(value: Any, reference: Any) -> str:
    """Returns a value in one line: of an array its shape, its type and some entries, rounded.

    A large array is shown around the first entry that differs from ``reference``.
    """
    if isinstance(value, (list, tuple)) and not all(np.isscalar(entry) for entry in value):
        entries = reference if isinstance(reference, (list, tuple)) else ()
        entries = [*entries, *[None] * len(value)]
        text = ", ".join(map(described, value, entries))
        return _cut(f"({text})")
    if not hasattr(value, "shape") or np.ndim(value) == 0:
        is_number = isinstance(value, float) or hasattr(value, "dtype")
        return f"{value:.6g}" if is_number else _cut(repr(value))

    array = np.asarray(value)
    header = f"[{' '.join(map(str, array.shape))}] {array.dtype}"
    if array.size <= _SHOWN:
        return f"{header}: {_entries(array)}"

    flat = array.ravel()
    first = 0
    if np.shape(reference) == array.shape:
        differs = ~np.isclose(flat.astype(float), np.asarray(reference).ravel().astype(float))
        first = int(differs.argmax())
    position = ", ".join(map(str, np.unravel_index(first, array.shape)))
    return f"{header}, from [{position}] on: {_entries(flat[first : first + _SHOWN])}"


def _entries(array: np.ndarray) -> str:
    return " ".join(np.array2string(array, precision=4, suppress_small=True).split())


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
