"""The slots of a cache: which of them hold what, round after round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pictures.style import ACCEPTED, COLOURS, REJECTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# What a slot holds, as the numbers that :func:`slot_map` takes.
EMPTY, COMMITTED, NEW, REFUSED = range(4)
_NAMES = ("nothing", "committed before", "committed in this round", "written, not committed")
_FILL = ("#ffffff", "#c9d6e4", "#2a9d74", COLOURS[REJECTED])


def slot_map(
    status: np.ndarray,
    *,
    ax: Axes,
    first: int = 0,
    rows: Sequence[str] | None = None,
    title: str = "",
    legend: bool = True,
) -> None:
    """Draw slots as squares, a row of them for each moment.

    Args:
        status: ``[R S]``, what each slot holds (``EMPTY``, ``COMMITTED``, ``NEW`` or ``REFUSED``).
        ax: Where.
        first: Number of the first slot that is shown.
        rows: What each row is; the first one is drawn on top.
        title: What is to be seen.
        legend: Whether to say which colour is which.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    count, slots = status.shape
    edges = first - 0.5 + np.arange(slots + 1), np.arange(count + 1) - 0.5
    ax.pcolormesh(*edges, status, cmap=ListedColormap(_FILL), vmin=-0.5, vmax=3.5, edgecolors="#d5dae0", linewidth=0.6)
    for (row, slot), what in np.ndenumerate(status):
        if what == REFUSED:  # told apart without colours as well
            ax.text(first + slot, row, "×", ha="center", va="center", color="white", fontsize=7)
    if not ax.yaxis_inverted():  # axes that are shared are turned once
        ax.invert_yaxis()
    ax.set_yticks(range(count), rows if rows is not None else [str(row) for row in range(count)])
    ax.set(xlabel="slot")
    ax.set_title(title, pad=20 if legend else None)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    if legend:
        patches = [Patch(fc=fill, ec="#9aa0a6", label=name) for fill, name in zip(_FILL, _NAMES, strict=True)]
        ax.legend(handles=patches, ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), fontsize=8, borderaxespad=0.1)


def moved(path: Sequence[int], num_nodes: int, *, first: int, title: str = "") -> Figure:
    """How the commit of a tree moves the accepted path: above, nodes as they were written; below, as they stay.

    Args:
        path: The committed nodes in order, the root among them.
        num_nodes: Of the draft, root included.
        first: Slot of the root.
        title: What is to be seen.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(max(6.0, 0.54 * num_nodes), 2.8))
    for node in range(num_nodes):
        _token(ax, first + node, 1, str(node), COLOURS[ACCEPTED if node in path else REJECTED])
        if node < len(path):
            _token(ax, first + node, 0, str(path[node]), COLOURS[ACCEPTED])
        else:
            _token(ax, first + node, 0, "×", "#ffffff", ink="#9aa0a6")
    for place, node in enumerate(path):
        ax.annotate("", (first + place, 0.22), (first + node, 0.78), arrowprops={"arrowstyle": "-|>", "ec": "#57606a"})
    ax.set(xlim=(first - 0.8, first + num_nodes - 0.2), ylim=(-0.5, 1.5), yticks=(1, 0), xlabel="slot", title=title)
    ax.set_yticklabels(("written", "committed"))
    ax.grid(visible=False)
    plt.close(fig)
    return fig


def _token(ax: Axes, x: int, y: int, text: str, color: str, ink: str = "white") -> None:
    box = {"fc": color, "ec": "#d5dae0", "boxstyle": "round,pad=0.4"}
    ax.text(x, y, text, ha="center", va="center", color=ink, fontsize=9, bbox=box)
