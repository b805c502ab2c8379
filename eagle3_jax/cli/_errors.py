"""The endings of the program: one line and an exit code for an error, and a quiet end on Ctrl-C and its relatives.

Importing this module is cheap, so that an interruption while the other modules are imported is met by it already.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple, NoReturn

_EXTRAS = {
    "torch": "convert",
    "transformers": "bench",
    "huggingface_hub": "hub",
    "outlines_core": "grammar",
    "gguf": "gguf",
}
_LONGEST = 600  # characters of an error line
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SMALLER = (
    "lower --max-new-tokens, --batch-size or the draft (--num-speculative-tokens, --tree), shorten the prompt, or use "
    "--dtype bfloat16"
)
_GRACE = 0.5  # seconds that Python gets to react to a signal before the process ends without it

received: list[int] = []  # the signal that ends the program
_steps: list[bool] = []  # inside `after_the_step`: not empty
_heard: list[float] = []  # inside `interruptible`: the last time that Ctrl-C raised, zero at first; otherwise empty


class Misuse(ValueError):
    """The command line asks for something impossible; the message says what to type instead."""


class Ending(NamedTuple):
    """Exit code, and the message for the standard error; an empty message prints nothing."""

    code: int
    message: str = ""


def explain(error: BaseException) -> Ending | None:
    """The ending for an exception; ``None`` for a fault of the program, whose traceback must be shown."""
    import typer

    # The parser behind typer has moved between packages; its exceptions are reached through the public ones.
    usage_error = typer.BadParameter.__mro__[1]
    match error:
        case typer.Exit():
            return Ending(error.exit_code)
        case SystemExit():
            return Ending(error.code if isinstance(error.code, int) else 1)
        case KeyboardInterrupt() | typer.Abort():
            return Ending(130)
        case _ if isinstance(error, usage_error):
            text = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
            context = getattr(error, "ctx", None)
            hint = f" (see {context.command_path} --help)" if context is not None else ""
            return Ending(2, f"error: {one_line(text).rstrip('.')}{hint}")
        case MemoryError():
            return Ending(1, f"error: out of memory; {_SMALLER}")
        case ModuleNotFoundError():
            package = (error.name or "").split(".")[0]
            if package not in _EXTRAS:
                return None
            return Ending(2, f"error: this needs {package}: pip install 'eagle3-jax[{_EXTRAS[package]}]'")
        case ValueError() | OverflowError():
            return Ending(2, f"error: {one_line(str(error))}")
        case OSError() if error.errno in _FULL:
            return Ending(2, f"error: disk full: {error.filename or 'the output'} ({error.strerror})")
        case OSError():
            reason = error.strerror or str(error) or type(error).__name__
            return Ending(2, f"error: {one_line(f'{error.filename}: {reason}' if error.filename else reason)}")
    if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        if re.search(r"RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE):
            return Ending(1, f"error: the device is out of memory; {_SMALLER}")
        return Ending(1, f"error: the device failed: {one_line(str(error))}")
    return None


def one_line(text: str) -> str:
    """A message without line breaks, cut to a readable length."""
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 3] + "..."


def end_on_signals() -> None:
    """Answers signals that end a program by raising, so that files and the terminal are put in order."""
    # A signal that the shell has told the program to ignore stays ignored (`nohup`, a job in the background).
    numbers = [one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN]
    for number in numbers:
        signal.signal(number, _unwind)
    sys.unraisablehook = _unraisable
    # A device program or a compilation does not return to Python until it is done, and only then is `_unwind` called.
    # Another thread sees the byte that C writes for every signal at once.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, frozenset(numbers)), daemon=True).start()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C raise ``KeyboardInterrupt`` without ending the program.

    If Python does not react, because the device is busy or a program is being compiled, the second Ctrl-C ends it.
    """
    _heard.append(0.0)
    try:
        yield
    finally:
        _heard.clear()


@contextlib.contextmanager
def after_the_step() -> Iterator[Callable[[], None]]:
    """Lets a step end before a signal ends the program; a second signal ends it at once.

    Yields:
        A function to call after every step. It raises if a signal has come.
    """
    _steps.append(True)

    def leave_if_asked() -> None:
        if received:
            raise KeyboardInterrupt if received[0] == signal.SIGINT else SystemExit(signal_code())

    try:
        yield leave_if_asked
    finally:
        _steps.clear()


def _unwind(number: int, frame: FrameType | None) -> None:
    if _steps:
        return  # `_watch` has seen it
    if received:
        leave()  # the second signal
    if number == signal.SIGINT and _heard:
        _heard[0] = time.monotonic()
        raise KeyboardInterrupt
    received.append(number)
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is not None:
        leave()  # during an import: some modules written in C would print the exception, and go on
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def _unraisable(unraisable: Any) -> None:
    """Ends the program where Python drops an interruption that was raised in a callback."""
    if received and isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
        leave()
    if _heard and isinstance(unraisable.exc_value, KeyboardInterrupt):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()  # again, outside the callback
        return
    sys.__unraisablehook__(unraisable)


def _watch(reader: int, numbers: frozenset[int]) -> None:
    unheard = 0
    while True:
        number = os.read(reader, 1)[0]
        if number not in numbers:
            continue
        if _steps:
            if received:
                leave()
            received.append(number)
            os.write(2, b"\nthis step ends first; another signal ends the program now\n")
            continue
        threading.Event().wait(_GRACE)
        if number == signal.SIGINT and _heard:
            unheard = 0 if time.monotonic() - _heard[0] < 2 * _GRACE else unheard + 1
            if unheard == 1:
                os.write(2, b"\nwaiting for the device; Ctrl-C again ends the program\n")
            if unheard < 2:
                continue
        if not received:
            received.append(number)
            leave()


def signal_code() -> int:
    """Exit code of a program that a signal has ended, by the convention of shells."""
    return 128 + received[0]


def leave() -> NoReturn:
    """Ends the process now, without waiting for the device."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        sys.__stdout__.flush()  # type: ignore[union-attr]  # a spinner replaces sys.stdout
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\x1b[?25h\n")  # the cursor, which a spinner hides, and a new line after ^C
    os._exit(signal_code())
