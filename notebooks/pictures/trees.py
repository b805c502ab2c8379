"""Draft trees: accepted, rejected and never visited nodes, and the ancestor mask."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pictures.interactive import Interactive
from pictures.style import ACCEPTED, BONUS, COLOURS, CORRECTED, REJECTED, TARGET, UNVISITED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = "root"
_INK = {**COLOURS, ROOT: "#1f2328"}
# Markers of matplotlib and plotly, so that color is not the only mark.
_MARKS = {
    ROOT: ("s", "square"),
    ACCEPTED: ("o", "circle"),
    CORRECTED: ("D", "diamond"),
    BONUS: ("*", "star"),
    REJECTED: ("X", "x"),
    UNVISITED: ("o", "circle-open"),
}
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

    draft = _Tree(tokens, parents, status)
    x, y = draft.places()
    figure, axes = plt.subplots(figsize=(1.2 + 1.35 * (x.max() + 1), 1.0 + _ROW * (y.max() + 1)))
    for node, parent in enumerate(parents):
        if parent >= 0:
            line = {
                "color": _INK[status[node]],
                "lw": 2.2 if draft.kept(node) else 0.8,
                "zorder": 1,
            }
            axes.plot([x[parent], x[node]], [y[parent], y[node]], **line)
    for kind in draft.kinds():
        nodes = [node for node, node_status in enumerate(status) if node_status == kind]
        marker = _MARKS[kind][0]
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
            color="#1f2328" if draft.kept(node) else "#4b5563",
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
    figure.legend(loc="outside lower left", ncols=len(draft.kinds()), fontsize="small")
    plt.close(figure)  # the caller shows it
    return figure


def interactive_rounds(rounds: Sequence[Mapping[str, Any]]) -> Interactive:
    """Draws several trees with a slider. A tooltip shows all values of a node.

    Args:
        rounds: For each tree, the arguments of :func:`tree`, and if known, lists with a number or
            ``None`` for each node: ``p`` and ``q``, its probability after its parent (target and
            drafter), and ``score``, its cumulative log-probability under the drafter.
    """
    from plotly import graph_objects as go

    trees = [_Tree(**arguments) for arguments in rounds]
    traces = []
    steps = []
    leaves = 0
    levels = 0
    kinds = [kind for kind in _MARKS if any(kind in draft.kinds() for draft in trees)]
    per_tree = 2 + len(kinds)
    for index, draft in enumerate(trees):
        visible = [index == number // per_tree for number in range(per_tree * len(trees))]
        steps.append(
            {
                "label": str(index + 1),
                "method": "update",
                "args": [{"visible": visible}, {"title.text": draft.title}],
            }
        )
        x, y = draft.places()
        leaves = max(leaves, float(y.max()))
        levels = max(levels, int(x.max()))
        for is_kept in (False, True):
            edges = [
                (n, parent)
                for n, parent in enumerate(draft.parents)
                if parent >= 0 and draft.kept(n) == is_kept
            ]
            traces.append(
                go.Scatter(
                    x=[x_value for n, parent in edges for x_value in (x[parent], x[n], None)],
                    y=[y_value for n, parent in edges for y_value in (y[parent], y[n], None)],
                    mode="lines",
                    line={
                        "color": _INK[ACCEPTED] if is_kept else "#c9cdd2",
                        "width": 3 if is_kept else 1,
                    },
                    hoverinfo="skip",
                    showlegend=False,
                    visible=index == 0,
                )
            )
        for kind in kinds:
            nodes = [node for node, node_status in enumerate(draft.status) if node_status == kind]
            traces.append(
                go.Scatter(
                    x=x[nodes].tolist(),
                    y=y[nodes].tolist(),
                    mode="markers+text",
                    name=kind,
                    marker={
                        "symbol": _MARKS[kind][1],
                        "color": _INK[kind],
                        "size": 9,
                        "line": {"width": 1.5},
                    },
                    text=[f" {_safe(_shown(draft.tokens[node]))}" for node in nodes],
                    textposition="top right",
                    textfont={"family": "monospace", "size": 10},
                    hovertext=[draft.described(node) for node in nodes],
                    hoverinfo="text",
                    cliponaxis=False,
                    visible=index == 0,
                )
            )
    figure = go.Figure(traces)
    figure.update_layout(
        title={
            "text": trees[0].title,
            "x": 0.01,
            "y": 0.99,
            "yanchor": "top",
            "pad": {"t": 14},
            "font": {"size": 15},
        },
        template="plotly_white",
        height=int(270 + 18 * (leaves + 1)),
        margin={"l": 20, "r": 20, "t": 74, "b": 20},
        xaxis={
            "range": [-0.2, levels + 1.0],
            "dtick": 1,
            "title": "level",
            "showgrid": False,
            "zeroline": False,
        },
        yaxis={"range": [leaves + 1, -1], "visible": False},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        hoverlabel={"font": {"family": "monospace"}, "align": "left"},
        sliders=[
            {"active": 0, "currentvalue": {"prefix": "round "}, "steps": steps, "pad": {"t": 45}}
        ],
    )
    return Interactive(figure)


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


@dataclasses.dataclass(frozen=True)
class _Tree:
    """A tree of :func:`interactive_rounds`."""

    tokens: Sequence[str]
    parents: Sequence[int]
    status: Sequence[str]
    p: Sequence[float | None] | None = None
    q: Sequence[float | None] | None = None
    score: Sequence[float | None] | None = None
    title: str = ""

    def kinds(self) -> list[str]:
        """Statuses of the tree, in the order of the legend."""
        return [kind for kind in _MARKS if kind in self.status]

    def kept(self, node: int) -> bool:
        """Whether the node is part of the generated text."""
        return self.status[node] in (ROOT, ACCEPTED, CORRECTED, BONUS)

    def places(self) -> tuple[np.ndarray, np.ndarray]:
        """Column and row of each node. Each leaf has its own row; a parent has the row of its first child."""
        level = np.zeros(len(self.parents))
        row = np.zeros(len(self.parents))
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(int(parent), []).append(node)
        todo = list(reversed(children[-1]))
        leaves = 0
        while todo:  # depth first, the first child first
            node = todo.pop()
            level[node] = 0 if self.parents[node] < 0 else level[self.parents[node]] + 1
            row[node] = leaves
            below = children.get(node, [])
            leaves += not below
            todo += reversed(below)
        return level, row

    def described(self, node: int) -> str:
        """Text of the tooltip of a node."""
        lines = [f"<b>{_safe(repr(self.tokens[node]))}</b>", f"node {node}, {self.status[node]}"]
        for name, values, form in (
            ("p (target)", self.p, ".4f"),
            ("q (draft)", self.q, ".4f"),
            ("sum of ln q", self.score, ".3f"),
        ):
            if values is not None and values[node] is not None:
                lines.append(f"{name:<12}{values[node]:{form}}".replace(" ", "\u00a0"))
        return "<br>".join(lines)


def _shown(token: str) -> str:
    """Text of a token with visible white space, shortened."""
    visible = token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "␣")
    visible = "".join(letter if letter.isprintable() else "·" for letter in visible)
    return visible if len(visible) <= _LONGEST else f"{visible[: _LONGEST - 1]}…"


def _safe(text: str) -> str:
    return html.escape(text, quote=False)
