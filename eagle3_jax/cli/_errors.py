"""From exceptions to exit codes and one clear line."""

from __future__ import annotations

import errno
import re
from typing import NamedTuple

import typer

# The parser behind typer has moved between packages; its exceptions are reached through the public ones.
_UsageError = typer.BadParameter.__mro__[1]

_EXTRAS = {
    "torch": "convert",
    "transformers": "bench",
    "huggingface_hub": "hub",
    "matplotlib": "plot",
    "jinja2": "plot",
    "plotly": "notebooks",
}
_LONGEST = 600  # characters of an error line
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Misuse(ValueError):
    """The command line asks for something impossible; the message says what to type instead."""


class Explained(NamedTuple):
    """How the program ends.

    Attributes:
        code: Exit code.
        message: For the standard error; empty for silence.
    """

    code: int
    message: str = ""


def explain(error: BaseException) -> Explained | None:
    """The ending that an exception stands for; ``None`` when it is a fault of the program and must be seen in full."""
    match error:
        case typer.Exit():
            return Explained(error.exit_code)
        case SystemExit():
            return Explained(error.code if isinstance(error.code, int) else 1)
        case KeyboardInterrupt() | typer.Abort():
            return Explained(130)
        case _ if isinstance(error, _UsageError):
            return Explained(2, f"error: {_usage(error)}")
        case MemoryError():
            return Explained(1, f"error: out of memory; {_SMALLER}")
        case ModuleNotFoundError():
            return _missing_module(error)
        case ValueError() | OverflowError():
            return Explained(2, f"error: {one_line(str(error))}")
        case OSError() if error.errno in _FULL:
            return Explained(2, f"error: disk full: {error.filename or 'the output'} ({error.strerror})")
        case OSError():
            return Explained(2, f"error: {_file_problem(error)}")
    if type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
        return _device_problem(error)
    return None


_SMALLER = (
    "lower --max-new-tokens, --batch-size or the draft (--num-speculative-tokens, --tree), shorten the prompt, or use "
    "--dtype bfloat16"
)


def one_line(text: str) -> str:
    """A message without line breaks, and not endless."""
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 3] + "..."


def _usage(error: BaseException) -> str:
    text = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return one_line(text).rstrip(".") + hint


def _missing_module(error: ModuleNotFoundError) -> Explained | None:
    package = (error.name or "").split(".")[0]
    extra = _EXTRAS.get(package)
    if extra is None:
        return None
    return Explained(2, f"error: this needs {package}: pip install 'eagle3-jax[{extra}]'")


def _file_problem(error: OSError) -> str:
    reason = error.strerror or str(error) or type(error).__name__
    return one_line(f"{error.filename}: {reason}" if error.filename is not None else reason)


def _device_problem(error: BaseException) -> Explained | None:
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or re.search(r"out of memory", text, re.IGNORECASE):
        return Explained(1, f"error: the device is out of memory; {_SMALLER}")
    return Explained(1, f"error: the device failed: {one_line(text)}")
