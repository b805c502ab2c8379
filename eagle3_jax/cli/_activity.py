"""What a command that measures says meanwhile, on the standard error."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class Activity:
    """What is going on, and what was found.

    Attributes:
        say: Shows what is going on, where that is a terminal, until the next of it.
        tell: Writes a line that stays.
    """

    say: Callable[[str], Any]
    tell: Callable[[str], Any]


@contextlib.contextmanager
def activity() -> Iterator[Activity]:
    """Until it ends."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    tell = lambda line: console.print(line, markup=False)
    if not console.is_terminal:
        yield Activity(lambda what: None, tell)
        return
    with console.status("starting") as status:
        yield Activity(status.update, tell)
