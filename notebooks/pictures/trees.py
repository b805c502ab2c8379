"""Draft trees: accepted, rejected and never visited nodes, and the ancestor mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pictures.style import ACCEPTED, BONUS, COLOURS, CORRECTED, REJECTED, TARGET, UNVISITED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = "root"
_INK = {**COLOURS, ROOT: "#1f2328"}
# Markers of matplotlib, so that color is not the only mark.
_MARKS = {ROOT: "s", ACCEPTED: "o", CORRECTED: "D", BONUS: "*", REJECTED: "X", UNVISITED: "o"}
_EMITTED = (ROOT, ACCEPTED, CORRECTED, BONUS)  # kinds of nodes that are part of the text
_ROW = 0.3  # inches from leaf to leaf
_LONGEST = 14  # characters of a token that are shown next to its node


def statuses(parents: Sequence[int], path: Sequence[int]) -> list[str]:
    """Classifies each node by the path that verification accepted.

    Verification tries the children of a node in order. Children before the accepted one are
    rejected. If no child is accepted, all of them are rejected. Children after the accepted one,
    and all nodes below a rejected one, are never visited.

    Args:
        parents: ``[N]``, -1 at the root.
        path: Accepted nodes below the root, in order.

    Returns:
        ``[N]``: ``"root"``, ``"accepted"``, ``"rejected"`` or ``"never visited"``.
    """
    # Maps a node of the path to its accepted child. After the last node, all children were tried.
    taken = dict(zip([0, *path], [*path, len(parents)], strict=True))

    kinds = []
    for node, parent in enumerate(parents):
        if parent < 0:
            kinds.append(ROOT)
        elif taken.get(parent, -1) == node:
            kinds.append(ACCEPTED)
        elif node < taken.get(parent, -1):
            kinds.append(REJECTED)
        else:
            kinds.append(UNVISITED)
    return kinds


def tree(
    tokens: Sequence[str],
    parents: Sequence[int],
    *,
    status: Sequence[str],
    title: str = "",
) -> Figure:
    """Draws a draft tree from left to right, one level per column.

    Args:
        tokens: ``[N]``, texts.
        parents: ``[N]``, -1 at the root; every parent comes before its children. The token that the
            target added can be the last entry, as a child of the last accepted node.
        status: ``[N]``, from :func:`statuses`; ``"corrected"`` or ``"bonus"`` for the token that
            the target added.
        title: Title of the figure.
    """
    import matplotlib.pyplot as plt

    x, y = _places(parents)
    kinds = [kind for kind in _MARKS if kind in status]
    emitted = [kind in _EMITTED for kind in status]
    figure, axes = plt.subplots(figsize=(1.2 + 1.35 * (x.max() + 1), 1.0 + _ROW * (y.max() + 1)))
    for node, parent in enumerate(parents):
        if parent >= 0:
            line = {
                "color": _INK[status[node]],
                "lw": 2.2 if emitted[node] else 0.8,
                "zorder": 1,
            }
            axes.plot([x[parent], x[node]], [y[parent], y[node]], **line)

    for kind in kinds:
        nodes = [node for node, node_status in enumerate(status) if node_status == kind]
        marker = _MARKS[kind]
        ink = _INK[kind]
        face = "white" if kind == UNVISITED else ink
        axes.scatter(
            x[nodes],
            y[nodes],
            marker=marker,
            s=64 if kind == BONUS else 34,
            facecolor=face,
            edgecolor=ink,
            zorder=2,
        )
        axes.scatter(
            [], [], marker=marker, facecolor=face, edgecolor=ink, label=f"{kind} ({len(nodes)})"
        )

    for node in range(len(tokens)):
        axes.annotate(
            _shown(tokens[node]),
            (x[node], y[node]),
            xytext=(5, 2),  # above the edge to the first child
            textcoords="offset points",
            va="bottom",
            family="monospace",
            size=7.5,
            color="#1f2328" if emitted[node] else "#4b5563",
            zorder=3,
            parse_math=False,
            bbox={
                "boxstyle": "square,pad=0.1",
                "facecolor": "white",
                "edgecolor": "none",
                "alpha": 0.75,
            },
        )

    axes.set(
        title=title,
        xlabel="level (all nodes of a level share one position)",
        xlim=(-0.2, x.max() + 0.9),
        ylim=(y.max() + 0.8, -0.8),
        xticks=range(int(x.max()) + 1),
        yticks=[],
    )
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside lower left", ncols=len(kinds), fontsize="small")
    plt.close(figure)  # the caller shows it
    return figure


def mask_map(
    mask: Any, labels: Sequence[str], *, title: str = "", depths: Sequence[int] | None = None
) -> Figure:
    """Draws the ancestor mask: dark where the node of the row attends to the node of the column.

    Args:
        mask: ``[N N]``, booleans.
        labels: ``[N]``, texts of the nodes.
        title: Title of the figure.
        depths: ``[N]``, levels, written after the labels of the rows.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    seen = np.asarray(mask, bool)
    count = len(labels)
    side = 1.4 + 0.2 * count
    figure, axes = plt.subplots(figsize=(side + 0.5, side))
    axes.imshow(seen, cmap=ListedColormap(["#f3f4f6", TARGET]), vmin=0, vmax=1)
    axes.set_xticks(np.arange(-0.5, count), minor=True)
    axes.set_yticks(np.arange(-0.5, count), minor=True)
    axes.grid(visible=False)
    axes.grid(which="minor", color="white", linewidth=1, alpha=1)
    axes.tick_params(which="both", length=0)

    shown = [_shown(label) for label in labels]
    rows = (
        shown
        if depths is None
        else [f"{label}  {depth}" for label, depth in zip(shown, depths, strict=True)]
    )
    font = {"family": "monospace", "size": 7, "parse_math": False}
    axes.set_xticks(range(count), shown, rotation=90, **font)
    axes.set_yticks(range(count), rows, **font)
    axes.set(
        title=title,
        xlabel="attended node",
        ylabel="node" if depths is None else "node and its level",
    )
    for spine in axes.spines.values():
        spine.set_visible(False)
    plt.close(figure)
    return figure


def _places(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Column and row of each node. Each leaf has its own row, a parent that of its first child."""
    level = np.zeros(len(parents))
    row = np.zeros(len(parents))
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(int(parent), []).append(node)

    todo = list(reversed(children[-1]))
    leaves = 0
    while todo:  # depth first, the first child first
        node = todo.pop()
        level[node] = 0 if parents[node] < 0 else level[parents[node]] + 1
        row[node] = leaves
        below = children.get(node, [])
        leaves += not below
        todo += reversed(below)
    return level, row


def _shown(token: str) -> str:
    """Text of a token with visible white space, shortened."""
    visible = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    visible = "".join(letter if letter.isprintable() else "·" for letter in visible)
    return visible if len(visible) <= _LONGEST else f"{visible[: _LONGEST - 1]}…"
