"""Spinners and progress bars on the standard error; they appear only where that is a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Activity(NamedTuple):
    """Two ways to report progress."""

    say: Callable[[str], Any]  #: Shows the current step until the next one; only a terminal shows it.
    tell: Callable[[str], Any]  #: Writes a line that stays, such as a result.


@contextlib.contextmanager
def spinner(text: str, *, quiet: bool = False) -> Iterator[Activity]:
    """Shows a spinner until the context ends.

    It takes the line that the cursor is on, so everything printed before must have ended its line.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    tell = lambda line: console.print(line, markup=False)
    if quiet or not console.is_terminal:
        yield Activity(lambda what: None, tell)
        return
    with console.status(text) as status:
        yield Activity(status.update, tell)


def counted(now: Activity, total: int) -> Activity:
    """Puts in front of every line which step it is of ``total``, and an estimate of the time that is left.

    Each ``say`` begins a step. The estimate takes the steps that are left to be as long as the mean of those done.
    """
    start = time.monotonic()
    begun = 0

    def place(done: int) -> str:
        left = (time.monotonic() - start) / done * (total - done) if done else 0
        unit, length = ("min", 60) if left >= 90 else ("s", 1)
        return f"{begun} of {total}" + (f", about {left / length:.0f} {unit} left" if round(left) else "")

    def say(what: str) -> None:
        nonlocal begun
        begun += 1
        now.say(f"{place(begun - 1)}: {what}")

    return Activity(say, lambda what: now.tell(f"{place(begun)}: {what}"))


@contextlib.contextmanager
def progress_bar(
    text: str, total: int, done: int = 0, *, beside_output: bool = False
) -> Iterator[tuple[Progress, TaskID]]:
    """Shows a progress bar until the context ends.

    Args:
        text: Description.
        total: Number of steps.
        done: Steps that an earlier run has done.
        beside_output: Whether the standard output is written meanwhile: the bar then appears only if that goes
            elsewhere than the terminal, and disappears at the end.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    off = not console.is_terminal or (beside_output and (sys.stdout.isatty() or total == 1))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Rich would print a redirected standard output where the bar is: on the standard error.
    redirect: dict[str, Any] = {"redirect_stdout": not beside_output, "redirect_stderr": not beside_output}
    with Progress(*columns, console=console, disable=off, transient=beside_output, **redirect) as progress:
        yield progress, progress.add_task(text, total=total, completed=done)
