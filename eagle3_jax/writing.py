"""Files and directories that appear under their name only when they are complete.

What is being written lies in a locked sibling. A process that is killed leaves it behind unlocked, and whoever writes
the same name next removes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How safetensors (Rust), TensorStore (C++) and numpy say the same without an error number.
_SAYS_FULL = re.compile(r"No space left|os error 28|os_error_code='28'|quota exceeded|File too large|requested and \d")


class WriteError(ValueError):
    """Something cannot be written as asked: where, why, and what to do."""


@contextlib.contextmanager
def whole_directory(final: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary sibling that takes the final name when the block ends without an error.

    Args:
        final: A name that nothing has yet; missing parents are created.

    Raises:
        WriteError: Something has that name already, it cannot be created, or the disk is full. Nothing is left then.
    """
    final = Path(final).absolute()
    if final.exists() or final.is_symlink():
        raise WriteError(f"{final} exists already; give a new directory, or remove that one first")
    with _sibling(final) as temporary:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        # mkdtemp, and the writer of safetensors, make what only the owner can read.
        temporary.chmod(0o777 & ~umask)
        for path in temporary.rglob("*"):
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        if final.exists():
            raise WriteError(f"{final} appeared while it was being written; nothing was changed there")
        temporary.rename(final)


@contextlib.contextmanager
def whole_file(final: str | os.PathLike[str]) -> Iterator[Path]:
    """A path of the same file name that replaces the final one when the block ends without an error.

    A link is followed. What is no file, such as ``/dev/stdout``, is written to as it is.

    Raises:
        WriteError: It cannot be created, or the disk is full. What was there before is still there.
    """
    final = Path(os.path.realpath(final))
    if final.exists() and not final.is_file():
        yield final
        return
    with _sibling(final) as temporary:
        yield temporary / final.name
        (temporary / final.name).replace(final)


@contextlib.contextmanager
def disk_full_named(final: str | os.PathLike[str]) -> Iterator[None]:
    """Every library's way of saying that there is no space left, as one :class:`WriteError`."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:  # safetensors, Orbax and numpy each have their own type
        full = isinstance(error, OSError) and error.errno in _FULL
        if not full and not _SAYS_FULL.search(str(error)):
            raise
        raise WriteError(f"disk full: {final}; nothing was left there. Free some space, or write elsewhere") from None


@contextlib.contextmanager
def orbax_quiet() -> Iterator[None]:
    """Orbax logs, with tracebacks of its threads, what it raises as well; the exception is enough."""
    logger, hook = logging.getLogger("absl"), sys.unraisablehook
    level = logger.level

    def without_late_writes(unraisable: Any) -> None:
        if "Event loop is closed" not in str(unraisable.exc_value):
            hook(unraisable)

    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = without_late_writes
    try:
        yield
    except BaseException:
        time.sleep(0.3)  # TensorStore's threads report their own failures to a loop that is gone
        raise
    finally:
        logger.setLevel(level)
        sys.unraisablehook = hook


def check_free(final: Path, num_bytes: int) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        WriteError: The file system of ``final`` has fewer bytes free.
    """
    place = next(parent for parent in (final, *final.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise WriteError(
            f"disk full: {final} needs {num_bytes:,} bytes and {free:,} are free. Free some, or write elsewhere"
        )


def remove_tree(directory: Path) -> None:
    """Remove a directory that threads of a failed writer may still be writing into."""
    for _ in range(40):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        time.sleep(0.05)


@contextlib.contextmanager
def _sibling(final: Path) -> Iterator[Path]:
    """A locked directory beside the final name, removed at the end whatever happens."""
    prefix, suffix = f".{final.name}.", ".partial"
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        for path in final.parent.iterdir():
            if path.name.startswith(prefix) and path.name.endswith(suffix):
                _remove_if_abandoned(path)
    except OSError as error:
        raise _uncreatable(final, error) from None
    with disk_full_named(final), contextlib.ExitStack() as stack:
        try:
            temporary = Path(tempfile.mkdtemp(prefix=prefix, suffix=suffix, dir=final.parent))
        except OSError as error:
            if error.errno in _FULL:
                raise
            raise _uncreatable(final, error) from None
        stack.callback(remove_tree, temporary)
        stack.enter_context(_locked(temporary))
        yield temporary


def _uncreatable(final: Path, error: OSError) -> WriteError:
    return WriteError(f"{final} cannot be created ({error.strerror}); give a place that can be written")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold a directory for as long as this process lives; says whether it was free."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except OSError:  # somebody writes there, or the file system has no locks
            free = False
        yield free
    finally:
        os.close(handle)


def _remove_if_abandoned(directory: Path) -> None:
    with contextlib.suppress(OSError), _locked(directory) as free:
        if free:
            remove_tree(directory)


__all__ = ["WriteError", "check_free", "disk_full_named", "orbax_quiet", "remove_tree", "whole_directory", "whole_file"]
