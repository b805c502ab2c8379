"""The command ``eagle3``.

Misuse ends with exit code 2 and one line on the standard error, before anything is written.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence

from eagle3_jax.cli import _errors


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (default: that of the process) and returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in ([], ["train"], ["plan"]):
        words.append("--help")
    try:
        from eagle3_jax.cli._commands import parser

        code = parser()(words, prog_name="eagle3", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    # Every ending of the program is decided in this one place.
    except BaseException as error:
        return _report(error, words)


def _report(error: BaseException, words: Sequence[str]) -> int:
    try:
        sys.stdout.flush()
    except OSError:
        # Discards unwritten output, whose error Python would otherwise print again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    try:
        ending = _errors.explain(error)
    # A checkout may have a Python that has no typer.
    except ModuleNotFoundError as missing:
        print(
            f"error: the command line needs {missing.name}: pip install typer rich", file=sys.stderr
        )
        return 2

    if ending is None or (ending.message and "--traceback" in words):
        raise error
    if ending.message:
        with contextlib.suppress(OSError):
            # A file name may hold bytes that are not text.
            print(ending.message.encode(errors="backslashreplace").decode(), file=sys.stderr)
    return ending.code


def main() -> None:
    """Entry point of the command."""
    _errors.end_on_signals()
    for name in ("stdout", "stderr"):
        # The caller may have closed a stream. Its replacement stays open for the whole process.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    # Its encoding may lack some characters.
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(run())
