"""Exit codes, error messages of one line, and the end of the program on a signal."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import threading
from types import FrameType
from typing import Any, NamedTuple, NoReturn

_EXTRAS = {
    "torch": "convert",
    "transformers": "bench",
    "huggingface_hub": "hub",
    "outlines_core": "grammar",
    "gguf": "gguf",
    "starlette": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve",
}
_LONGEST = 600  # characters of an error line
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SMALLER = (
    "lower --max-new-tokens, --batch-size or the draft (--num-speculative-tokens, --tree), shorten"
    " the prompt, or use --dtype bfloat16"
)


class Misuse(ValueError):
    """The command line asks for something impossible; the message says what to type instead."""


class Ending(NamedTuple):
    """Exit code, and the message for the standard error; an empty message prints nothing."""

    code: int
    message: str = ""


def explain(error: BaseException) -> Ending | None:
    """Returns the ending for an exception.

    It is ``None`` for a fault of the program, whose traceback must be shown.
    """
    import typer

    # The parser has moved between packages; its exceptions are reached through typer's.
    usage_error = typer.BadParameter.__mro__[1]
    # Rich would end the program with 1.
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        return Ending(141)

    match error:
        case SystemExit():
            return Ending(error.code if isinstance(error.code, int) else 1)
        case typer.Abort() | KeyboardInterrupt():
            return Ending(130)
        case _ if isinstance(error, usage_error):
            usage: Any = error
            hint = f" (see {usage.ctx.command_path} --help)" if usage.ctx is not None else ""
            return Ending(2, f"error: {one_line(usage.format_message()).rstrip('.')}{hint}")
        case MemoryError():
            return Ending(1, f"error: out of memory; {_SMALLER}")
        case ModuleNotFoundError():
            package = (error.name or "").split(".")[0]
            if package not in _EXTRAS:
                return None
            return Ending(
                2, f"error: this needs {package}: pip install 'eagle3-jax[{_EXTRAS[package]}]'"
            )
        case ValueError() | OverflowError():
            return Ending(2, f"error: {one_line(str(error))}")
        case OSError() if error.errno in _FULL:
            return Ending(
                2, f"error: disk full: {error.filename or 'the output'} ({error.strerror})"
            )
        case OSError():
            reason = error.strerror or str(error) or type(error).__name__
            return Ending(
                2, f"error: {one_line(f'{error.filename}: {reason}' if error.filename else reason)}"
            )

    if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        if re.search(r"RESOURCE_EXHAUSTED|out of memory", str(error), re.IGNORECASE):
            return Ending(1, f"error: the device is out of memory; {_SMALLER}")
        return Ending(1, f"error: the device failed: {one_line(str(error))}")
    return None


def one_line(text: str) -> str:
    """Returns a message without line breaks, cut to a readable length."""
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 3] + "..."


def end_on_signals() -> None:
    """Makes SIGTERM and SIGHUP raise ``SystemExit``, as Ctrl-C raises ``KeyboardInterrupt``.

    Files and the terminal are then put in order. A signal that the shell ignores (``nohup``) stays
    ignored.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _exit)
    sys.unraisablehook = _repeat_interruption


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # The exit code that shells give a program that a signal ended.
    raise SystemExit(128 + number)


def _repeat_interruption(unraisable: Any) -> None:
    """Repeats a signal whose exception Python has dropped.

    It drops them in callbacks, such as JAX's garbage collector.
    """
    error = unraisable.exc_value
    if isinstance(error, KeyboardInterrupt | SystemExit):
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
    else:
        sys.__unraisablehook__(unraisable)
