"""Files and directories that appear under their name only when they are complete.

A write goes to a locked directory next to the final name. If the process is killed, that directory
remains without its lock, and the next write of the same name removes it.
"""

from __future__ import annotations

import contextlib
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

# The messages of the system, safetensors (Rust), TensorStore (C++) and numpy for a full disk.
_DISK_FULL = re.compile(
    r"No space left|os error 28|os_error_code='28'|quota exceeded|File too large|requested and \d",
    re.IGNORECASE,
)


class WriteError(ValueError):
    """A file cannot be written. The message gives the path, the reason and the remedy."""


@contextlib.contextmanager
def whole_directory(final: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary directory that takes the final name when the block ends without an error.

    Args:
        final: A path that does not exist yet; missing parents are created.

    Raises:
        WriteError: The path exists already, it cannot be created, or the disk is full. Nothing is
            left then.
    """
    final = Path(final).absolute()
    if final.exists() or final.is_symlink():
        raise WriteError(f"{final} exists already; give a new directory, or remove that one first")

    with _sibling(final) as temporary:
        yield temporary

        _apply_umask(temporary)
        if final.exists():
            raise WriteError(
                f"{final} appeared while it was being written; nothing was changed there"
            )
        temporary.rename(final)


@contextlib.contextmanager
def whole_file(final: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a path that replaces the final file when the block ends without an error.

    A link is followed. A device or a pipe, such as ``/dev/stdout``, is written to directly.

    Raises:
        WriteError: The file cannot be created, or the disk is full. An existing file remains
            unchanged then.
    """
    final = Path(os.path.realpath(final))
    if final.exists() and not final.is_file():
        yield final
        return

    with _sibling(final) as temporary:
        yield temporary / final.name
        os.replace(temporary / final.name, final)


@contextlib.contextmanager
def disk_full_named(final: str | os.PathLike[str]) -> Iterator[None]:
    """Turns every library's error for a full disk into one :class:`WriteError`."""
    try:
        yield
    except Exception as error:  # safetensors, Orbax and numpy raise different types
        if not _DISK_FULL.search(str(error)):
            raise
        raise WriteError(
            f"disk full: {final}; nothing was left there. Free some space, or write elsewhere"
        ) from None


@contextlib.contextmanager
def orbax_quiet() -> Iterator[None]:
    """Silences the log of Orbax, which repeats its errors with the tracebacks of its threads."""
    logger = logging.getLogger("absl")
    level = logger.level
    hook = sys.unraisablehook

    # TensorStore's threads report their failures late, to an event loop that is closed.
    def report(late: Any) -> None:
        if "Event loop is closed" not in str(late.exc_value):
            hook(late)

    logger.setLevel(logging.CRITICAL + 1)
    sys.unraisablehook = report
    try:
        yield
    except BaseException:
        time.sleep(0.3)  # until they have reported
        raise
    finally:
        logger.setLevel(level)
        sys.unraisablehook = hook


def cache_directory(part: str) -> Path | None:
    """Returns the directory of a part of this project in the user's cache; it may not exist yet.

    ``XDG_CACHE_HOME`` names the cache; default: ``~/.cache``. Returns ``None`` for a user without a
    home.
    """
    cache = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard ignores relative paths. An unknown home is "~", and HOME may be any text.
    if not os.path.isabs(cache):
        home = os.path.expanduser("~")
        if not os.path.isabs(home) or home == "/":
            return None
        cache = os.path.join(home, ".cache")

    return Path(cache) / "eagle3-jax" / part


def check_free(final: Path, num_bytes: int) -> None:
    """Refuses a write of ``num_bytes`` before it begins if the disk of ``final`` is too full.

    Raises:
        WriteError: The disk has less free space.
    """
    existing = next(parent for parent in (final, *final.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes:
        raise WriteError(
            f"disk full: {final} needs {num_bytes:,} bytes and {free:,} are free. Free some, or"
            " write elsewhere"
        )


def remove_tree(directory: Path) -> None:
    """Removes a directory that threads of a failed writer may still write into, or create again."""
    for _ in range(20):
        if not directory.exists():
            return
        shutil.rmtree(directory, ignore_errors=True)
        time.sleep(0.3)


@contextlib.contextmanager
def _sibling(final: Path) -> Iterator[Path]:
    """Yields a locked directory next to the final name, and removes it at the end of the block."""
    prefix = f".{final.name}."
    with disk_full_named(final), contextlib.ExitStack() as stack:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(final.parent, prefix)
            temporary = Path(tempfile.mkdtemp(".partial", prefix, final.parent))
        except OSError as error:
            reason = (
                f"{final} cannot be created ({error.strerror}); give a place that can be written"
            )
            raise WriteError(reason) from None
        stack.callback(remove_tree, temporary)

        with contextlib.suppress(OSError):  # some file systems have no locks
            stack.enter_context(_locked(temporary))
        yield temporary


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Removes the directories that killed writers left. A writer that lives holds its lock."""
    for path in folder.iterdir():
        if path.name.startswith(prefix) and path.name.endswith(".partial"):
            with contextlib.suppress(OSError), _locked(path):
                remove_tree(path)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the lock of a directory. Raises ``OSError`` if another process holds it."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _apply_umask(directory: Path) -> None:
    """Sets the usual permissions; mkdtemp and safetensors give access to the owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    for path in (directory, *directory.rglob("*")):
        mode = 0o777 if path.is_dir() else 0o666
        path.chmod(mode & ~umask)
