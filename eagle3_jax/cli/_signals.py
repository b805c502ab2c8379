"""What Ctrl-C and its relatives do: the program ends at once and quietly, and nothing half written stays behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
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


def _unwind(number: int, frame: Any) -> NoReturn:
    if received:
        leave()  # asked twice
    received.append(number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _unraisable(unraisable: Any) -> None:
    """Python drops what is raised in a callback of its own; an interruption must not be lost there."""
    if received:
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
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        if sys.stderr.isatty():
            if "rich.console" in sys.modules:
                sys.modules["rich.console"].Console(stderr=True).show_cursor()  # a spinner hides it
            sys.stderr.write("\n")  # behind the ^C of the terminal
        sys.stderr.flush()
    os._exit(exit_code())
