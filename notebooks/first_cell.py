"""Set-up of every notebook, called by its first cell: environment, versions and device."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
_NEEDED = ("eagle3_jax", "matplotlib", "plotly", "ipykernel")


def start(*, repository: bool = False, device: bool = True, also: tuple[str, ...] = ()) -> None:
    """Checks the environment, sets matplotlib's style, keeps compiled programs, prints versions.

    Args:
        repository: Whether the notebook uses ``validation`` or the helpers of ``tests``, which are
            not installed. If so, the checkout is added to the path.
        device: Whether to print the device. JAX fixes its share of the memory at the first use of a
            device, so a notebook that configures this share prints the device later.
        also: Modules that this notebook imports in addition to those of the extra ``notebooks``.

    Raises:
        SystemExit: A module is missing. The message is one line with the command that installs it.
    """
    missing = [name for name in (*_NEEDED, *also) if importlib.util.find_spec(name) is None]
    if missing:
        extra = (
            "notebooks,convert,bench" if {"torch", "transformers"} & set(missing) else "notebooks"
        )
        raise SystemExit(
            f"{', '.join(missing)}: not installed in the environment of this kernel"
            f" ({sys.executable}); install it with: {sys.executable} -m pip install -e"
            f" '{ROOT}[{extra}]'"
        )
    sys.path.append(str(ROOT / "examples"))  # nano_eagle3, whose parts the notebooks build
    if repository:
        sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
    import jax
    from pictures import style

    import eagle3_jax
    from eagle3_jax.devices.compilation import keep_compiled_programs

    style.use()
    _describe_figures()
    keep_compiled_programs(None)
    print(
        f"eagle3-jax {eagle3_jax.__version__}, jax {jax.__version__}"
        + (f", {_device()}" if device else "")
    )


def _describe_figures() -> None:
    """Adds alternative text to the metadata of every figure."""
    from IPython import get_ipython
    from matplotlib.figure import Figure

    if (shell := get_ipython()) is None:
        return
    png = shell.display_formatter.formatters["image/png"]
    draw = png.lookup_by_type(Figure)

    def described(figure: Figure) -> object:
        image = draw(figure)
        return image if image is None else (image, {"alt": alternative_text(figure)})

    png.for_type(Figure, described)


def alternative_text(figure: Figure) -> str:
    """Describes a figure in words, such as ``"Plot: τ by batch size. Axes: batch size; τ."``."""
    titles = [axes.get_title("left") or axes.get_title("center") for axes in figure.axes]
    titles = [title for title in titles if title]
    labels = [
        text for axes in figure.axes for text in (axes.get_xlabel(), axes.get_ylabel()) if text
    ]
    text = f"Plot: {'; '.join(titles) or 'untitled'}."
    return f"{text} Axes: {'; '.join(dict.fromkeys(labels))}." if labels else text


def _device() -> str:
    import jax

    first = jax.devices()[0]
    return "CPU" if first.platform == "cpu" else f"{first.device_kind} ({len(jax.devices())})"
