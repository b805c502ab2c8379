"""Set-up of every notebook, called by its first cell: checks the environment and says what it runs on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_NEEDED = ("eagle3_jax", "matplotlib", "plotly", "ipykernel")


def start(*, repository: bool = False, device: bool = True, also: tuple[str, ...] = ()) -> None:
    """Check the environment, set matplotlib's style, keep compiled programs, and print versions and device.

    Args:
        repository: Whether the notebook uses ``validation``, ``examples`` or the helpers of ``tests``, which are not
            installed; the checkout is then put on the path.
        device: Whether to print the device. JAX settles how it shares memory when it first touches a device, so a
            notebook that configures this memory prints the device later.
        also: Modules that this notebook imports beyond those of the extra ``notebooks``.

    Raises:
        SystemExit: A module is missing; one line says what to install.
    """
    missing = [name for name in (*_NEEDED, *also) if importlib.util.find_spec(name) is None]
    if missing:
        extra = (
            "notebooks,convert,bench" if {"torch", "transformers"} & set(missing) else "notebooks"
        )
        raise SystemExit(
            f"{', '.join(missing)}: not installed in the environment of this kernel ({sys.executable}); "
            f"install it with: {sys.executable} -m pip install -e '{ROOT}[{extra}]'"
        )
    if repository:
        sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
    import jax
    from pictures import style

    import eagle3_jax
    from eagle3_jax.cli._compiled import keep_compiled_programs

    style.use()
    keep_compiled_programs(None)
    print(
        f"eagle3-jax {eagle3_jax.__version__}, jax {jax.__version__}"
        + (f", {_device()}" if device else "")
    )


def _device() -> str:
    import jax

    first = jax.devices()[0]
    return "CPU" if first.platform == "cpu" else f"{first.device_kind} ({len(jax.devices())})"
