"""The first cell of every notebook: is everything here that it needs, and on what does it run?"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# What the notebooks import beyond the package, and the extra that brings it.
_NEEDED = ("matplotlib", "plotly", "ipykernel")


def start(*, repository: bool = False, device: bool = True, also: tuple[str, ...] = ()) -> None:
    """Check the environment, set the look of pictures, keep compiled programs, and say on what this runs.

    Args:
        repository: Whether the notebook uses ``validation``, ``tests`` or ``examples``, which are not installed; the
            checkout above the working directory is then put on the path.
        device: Whether to say on what device this runs. JAX settles how it shares memory when it first touches one; a
            notebook that has a say in that asks later.
        also: Modules that this notebook imports beyond those of the extra ``notebooks``.

    Raises:
        SystemExit: Something is missing; one line says what to install.
    """
    missing = [name for name in (*_NEEDED, *also) if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)}: not installed in the environment of this kernel ({sys.executable}); "
            f"install it with: {sys.executable} -m pip install 'eagle3-jax[{_extra(missing)}]'"
        )
    if repository:
        sys.path[:0] = [str(folder) for folder in _checkout()]
    import jax

    import eagle3_jax
    from eagle3_jax.cli._compiled import keep_compiled_programs
    from eagle3_jax.pictures import style

    style.use()
    keep_compiled_programs(None)
    print(f"eagle3-jax {eagle3_jax.__version__}, jax {jax.__version__}" + (f", {_device()}" if device else ""))


def _device() -> str:
    import jax

    first = jax.devices()[0]
    return "CPU" if first.platform == "cpu" else f"{first.device_kind} ({len(jax.devices())})"


def _extra(missing: list[str]) -> str:
    return "notebooks,convert,bench" if {"torch", "transformers"} & set(missing) else "notebooks"


def _checkout() -> list[Path]:
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "validation").is_dir() and (folder / "eagle3_jax").is_dir():
            return [folder, folder / "tests"]
    raise SystemExit(
        f"this notebook reads `validation`, which is not part of the installed package: start it inside a checkout of "
        f"the repository (now in {Path.cwd()})"
    )


__all__ = ["start"]
