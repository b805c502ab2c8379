"""The command `eagle3`; it sits on top of everything and is imported by nothing.

Misuse ends with exit code 2 and one line on the standard error; nothing has been written then. This module loads next
to nothing, so that an interruption while the rest is imported is met by :func:`main` already.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from eagle3_jax.cli import _signals


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: Without the program's name; those of the process when left out.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given in ([], ["train"], ["plan"]):
        given.append("--help")
    try:
        from eagle3_jax.cli._commands import parser

        code = parser()(given, prog_name="eagle3", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except BrokenPipeError:
        _drop_output()
        return 141
    except BaseException as error:  # every ending of the program is decided in this one place
        if _signals.received:
            return _signals.exit_code()
        if isinstance(error, KeyboardInterrupt):
            return 130
        if isinstance(error.__context__, BrokenPipeError):  # rich ends the program with 1
            return 141
        return _explained(error, given)


def _explained(error: BaseException, given: Sequence[str]) -> int:
    try:
        from eagle3_jax.cli._errors import explain
    except ModuleNotFoundError as missing:  # a checkout beside a Python that has no typer
        print(f"error: the command line needs {missing.name}: pip install typer rich", file=sys.stderr)
        return 2
    try:
        sys.stdout.flush()
    except OSError:
        _drop_output()
    explained = explain(error)
    if explained is None or (explained.message and "--traceback" in given):
        raise error
    if explained.message:
        with contextlib.suppress(OSError):
            # A file name may hold bytes that are no text.
            print(explained.message.encode(errors="backslashreplace").decode(), file=sys.stderr)
    return explained.code


def _drop_output() -> None:
    """Nobody can read what is still to be written; Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point of the command."""
    _signals.end_on_signals()
    _prepare_streams()
    code = run()
    if _signals.received:
        _signals.leave()
    sys.exit(code)


def _prepare_streams() -> None:
    """Streams that take whatever is written: a closed one is dropped, and what its encoding lacks is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # for the whole process
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
