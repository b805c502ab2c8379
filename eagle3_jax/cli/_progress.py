"""Spinners and progress bars on the standard error; they appear only where that is a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Activity(NamedTuple):
    """Two ways to report progress."""

    say: Callable[[str], Any]  #: Shows the current step until the next one, in a terminal only.
    tell: Callable[[str], Any]  #: Writes a line that stays, such as a result.


@contextlib.contextmanager
def spinner(text: str, *, quiet: bool = False) -> Iterator[Activity]:
    """Shows a spinner until the context ends.

    It takes the line that the cursor is on, so everything printed before must have ended its line.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def tell(line: str) -> None:
        console.print(line, markup=False)

    if quiet or not console.is_terminal:
        yield Activity(lambda step: None, tell)
        return
    try:
        with console.status(text) as status:
            yield Activity(status.update, tell)
    finally:
        # Ctrl-C while the spinner starts leaves it hidden.
        console.show_cursor()


@dataclasses.dataclass
class _Counter:
    """The number of the current step, and an estimate of the remaining time."""

    activity: Activity
    total: int
    start: float
    begun: int = 0

    def say(self, step: str) -> None:
        self.begun += 1
        self.activity.say(self._line(step, done=self.begun - 1))

    def tell(self, result: str) -> None:
        self.activity.tell(self._line(result, done=self.begun))

    def _line(self, text: str, *, done: int) -> str:
        seconds = (time.monotonic() - self.start) / done * (self.total - done) if done else 0
        remaining = f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
        estimate = f", about {remaining} left" if round(seconds) else ""
        return f"{self.begun} of {self.total}{estimate}: {text}"


def counted(now: Activity, total: int) -> Activity:
    """Adds the number of the step and an estimate of the remaining time to every line.

    Each ``say`` begins a step. The estimate assumes that the remaining steps take as long as the
    mean of the others.
    """
    counter = _Counter(now, total, time.monotonic())
    return Activity(counter.say, counter.tell)


@contextlib.contextmanager
def progress_bar(
    text: str, total: int, done: int = 0, *, with_output: bool = False
) -> Iterator[tuple[Progress, TaskID]]:
    """Shows a progress bar until the context ends.

    Args:
        text: Description.
        total: Number of steps.
        done: Steps that an earlier run has done.
        with_output: Whether the command writes to the standard output meanwhile. The bar then
            appears only if that is not the terminal, and disappears at the end.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    off = not console.is_terminal or (with_output and (sys.stdout.isatty() or total == 1))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )

    # Rich would print a redirected standard output where the bar is: on the standard error.
    redirect: dict[str, Any] = {
        "redirect_stdout": not with_output,
        "redirect_stderr": not with_output,
    }
    with Progress(
        *columns, console=console, disable=off, transient=with_output, **redirect
    ) as progress:
        yield progress, progress.add_task(text, total=total, completed=done)
