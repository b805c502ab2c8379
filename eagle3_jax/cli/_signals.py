"""What Ctrl-C and its relatives do: the program ends at once and quietly, and nothing half written stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, NoReturn

_GRACE = 0.5  # seconds that Python gets to react before the process is ended from beside it

received: list[int] = []


def end_on_signals() -> None:
    """Answer signals that end a program by unwinding it, so that every file and the terminal are put in order."""
    # Where a shell has told the program to ignore one (`nohup`, a job in the background), that holds.
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, _unwind)
    sys.unraisablehook = _unraisable
    # A device program or a compilation does not return to Python until it is done, and only then would `_unwind` be
    # called. The byte that C writes for every signal is seen at once by another thread.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, frozenset(numbers)), daemon=True).start()


def _unwind(number: int, frame: FrameType | None) -> NoReturn:
    if received:
        leave()  # asked twice
    received.append(number)
    if _is_importing(frame):
        leave()  # some modules written in C would print what is raised, and go on
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _unraisable(unraisable: Any) -> None:
    """Python drops what is raised in a callback of its own; an interruption must not be lost there."""
    if received and isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
        leave()
    sys.__unraisablehook__(unraisable)


def _watch(reader: int, numbers: frozenset[int]) -> None:
    while True:
        number = os.read(reader, 1)[0]
        if number not in numbers:
            continue
        threading.Event().wait(_GRACE)
        if not received:
            received.append(number)
            leave()


def exit_code() -> int:
    """Of a program that a signal has ended, by the convention of shells."""
    return 128 + received[0]


def leave() -> NoReturn:
    """End the process now: what runs on the device is not waited for."""
    # The streams themselves: a spinner puts itself between.
    out, error = sys.__stdout__, sys.__stderr__
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        out.flush()  # type: ignore[union-attr]
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        if error.isatty():  # type: ignore[union-attr]
            if "rich.console" in sys.modules:
                sys.modules["rich.console"].Console(file=error).show_cursor()  # which the spinner hides
            error.write("\n")  # type: ignore[union-attr]  # behind the ^C of the terminal
        error.flush()  # type: ignore[union-attr]
    os._exit(exit_code())
