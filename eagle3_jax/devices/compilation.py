"""The cache of compiled programs on disk (docs/design.md, 9)."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path

from eagle3_jax.files.writing import cache_directory

# Room for thousands of programs of the shipped pair, or hundreds of large models with their GPU
# kernels.
MOST_BYTES = 2 * 2**30


def keep_compiled_programs(directory: str | None = None) -> None:
    """Makes JAX store compiled programs on disk, so that the next process reads them.

    The commands do this by themselves. In a program of your own call it once, before decoding::

        e3.keep_compiled_programs()

    Args:
        directory: A directory, or ``none`` for no cache. ``None`` is the directory in JAX's own
            configuration, or else the user's cache directory.

    Raises:
        ValueError: The directory cannot be written.
    """
    import jax

    if directory == "none":
        jax.config.update("jax_enable_compilation_cache", False)
        return
    if directory is None and jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    folder = cache_directory("compiled") if directory is None else Path(directory)
    if folder is None:
        return

    if directory == "":
        raise ValueError("the compilation cache is an empty name; give a directory or 'none'")
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        if directory is None:
            return
        raise ValueError(
            f"the compilation cache {directory} cannot be written; give another directory or 'none'"
        )

    # JAX compiles a damaged entry again, so the user need not act on the warning.
    warnings.filterwarnings("ignore", message=".*persistent compilation cache")
    if jax.config.jax_compilation_cache_max_size == -1:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_max_size", MOST_BYTES)
    _make_prunable(folder)
    jax.config.update("jax_compilation_cache_dir", str(folder.absolute()))
    # The many small programs around the loop take long to compile in total, and little space.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _make_prunable(folder: Path) -> None:
    """Gives every program a file for the time of its last use.

    JAX writes these files only when it prunes. JAX before 0.12 writes nothing to a directory in
    which one is missing. An empty file counts as the oldest; the next use of the program writes the
    time.
    """
    # In a shared directory a file can be another user's.
    with contextlib.suppress(OSError):
        for program in folder.glob("*-cache"):
            used = program.with_name(program.name.removesuffix("-cache") + "-atime")
            if not used.exists():
                used.touch()
