"""Plots of the slots of a cache, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pictures.style import ACCEPTED, COLOURS, REJECTED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# States of a slot, as :func:`slot_map` takes them.
EMPTY, COMMITTED, NEW, REFUSED = range(4)
_NAMES = ("empty", "committed before", "committed in this round", "written, not committed")
_FILL = ("#ffffff", "#c9d6e4", "#2a9d74", COLOURS[REJECTED])


def slot_map(
    status: np.ndarray,
    *,
    ax: Axes,
    first: int,
    rows: Sequence[str],
    title: str,
    legend: bool = True,
) -> None:
    """Draws slots as squares, one row for each point in time.

    Args:
        status: ``[R S]``, state of each slot (``EMPTY``, ``COMMITTED``, ``NEW`` or ``REFUSED``).
        ax: Axes of the plot.
        first: Number of the first slot.
        rows: Labels of the rows, from top to bottom.
        title: Title of the plot.
        legend: Whether to show a legend.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    count, slots = status.shape
    edges = first - 0.5 + np.arange(slots + 1), np.arange(count + 1) - 0.5
    ax.pcolormesh(
        *edges,
        status,
        cmap=ListedColormap(_FILL),
        vmin=-0.5,
        vmax=3.5,
        edgecolors="#d5dae0",
        linewidth=0.6,
    )

    for (row, slot), state in np.ndenumerate(status):
        if state == REFUSED:  # a mark in addition to the color
            ax.text(first + slot, row, "×", ha="center", va="center", color="white", fontsize=7)
    if not ax.yaxis_inverted():  # shared axes are inverted once
        ax.invert_yaxis()

    ax.set_yticks(range(count), rows)
    ax.set(xlabel="slot")
    ax.set_title(title, pad=20 if legend else None)
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)

    if legend:
        patches = [
            Patch(fc=fill, ec="#9aa0a6", label=name)
            for fill, name in zip(_FILL, _NAMES, strict=True)
        ]
        ax.legend(
            handles=patches,
            ncols=4,
            loc="lower left",
            bbox_to_anchor=(0, 1.0),
            fontsize=8,
            borderaxespad=0.1,
        )


def moved(path: Sequence[int], num_nodes: int, *, first: int, title: str) -> Figure:
    """Draws the commit of a tree: written nodes at the top, committed nodes at the bottom.

    Args:
        path: Committed nodes in order, root included.
        num_nodes: Number of nodes of the draft, root included.
        first: Slot of the root.
        title: Title of the figure.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(max(6.0, 0.54 * num_nodes), 2.8))
    for node in range(num_nodes):
        _token(ax, first + node, 1, str(node), COLOURS[ACCEPTED if node in path else REJECTED])
        if node < len(path):
            _token(ax, first + node, 0, str(path[node]), COLOURS[ACCEPTED])
        else:
            _token(ax, first + node, 0, "×", "#ffffff", ink="#9aa0a6")

    for offset, node in enumerate(path):
        ax.annotate(
            "",
            (first + offset, 0.22),
            (first + node, 0.78),
            arrowprops={"arrowstyle": "-|>", "ec": "#57606a"},
        )

    ax.set(
        xlim=(first - 0.8, first + num_nodes - 0.2),
        ylim=(-0.5, 1.5),
        yticks=(1, 0),
        xlabel="slot",
        title=title,
    )
    ax.set_yticklabels(("written", "committed"))
    ax.grid(visible=False)
    plt.close(fig)
    return fig


def _token(ax: Axes, x: int, y: int, text: str, color: str, ink: str = "white") -> None:
    box = {"fc": color, "ec": "#d5dae0", "boxstyle": "round,pad=0.4"}
    ax.text(x, y, text, ha="center", va="center", color=ink, fontsize=9, bbox=box)
