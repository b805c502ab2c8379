"""Drawing of the architecture of an EAGLE-3 head, with its sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle3_jax.models.config import Eagle3Config
from pictures.style import DRAFTER, TARGET

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#57606a"
_GUESS = "#c05a8e"
# heights of the feature, the token and the residual path
_MAIN = 2.6
_LOW = 1.0
_ABOVE = 3.75


def eagle3_head(config: Eagle3Config, num_layers: int) -> Figure:
    """Draws the head from the target's features to a draft token. Dashed lines are the feedback.

    Args:
        config: The head. Variations of other EAGLE-3 layouts are not shown.
        num_layers: Number of layers of the target.
    """
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(11.0, 4.3))
    ax.set(xlim=(-0.9, 16.3), ylim=(-0.9, 5.5))
    ax.axis("off")
    width = config.width
    count = len(config.aux_layers)

    # The features of the target, and their projection.
    _target(ax, config.aux_layers, num_layers)
    _box(ax, 3.3, _MAIN, f"fc\n{count}·{config.target_width} → {width}", width=1.5)

    _node(ax, 4.75, _MAIN, "g")
    _arrow(ax, (4.05, _MAIN), (4.55, _MAIN))
    _arrow(ax, (4.95, _MAIN), (5.45, _MAIN))
    _box(ax, 6.0, _MAIN, "norm", width=1.0)

    # The token that follows the feature.
    _box(ax, 4.75, _LOW, "embedding\nof $x_{t+1}$", width=1.5, color=TARGET)
    _box(ax, 6.6, _LOW, "norm", width=1.0)
    _arrow(ax, (5.5, _LOW), (6.1, _LOW))
    _box(
        ax,
        8.3,
        (_MAIN + _LOW) / 2 + 0.4,
        f"attention\n{2 * width} → {width}",
        width=1.7,
        height=1.5,
    )
    _arrow(ax, (6.5, _MAIN), (7.45, _MAIN - 0.15))
    _arrow(ax, (7.1, _LOW), (7.45, _LOW + 0.85))
    ax.text(
        6.7,
        (_MAIN + _LOW) / 2 + 0.2,
        "concatenated",
        ha="center",
        va="center",
        fontsize=8,
        color=_INK,
    )

    _node(ax, 9.9, _MAIN, "+")
    _arrow(ax, (9.15, _MAIN - 0.2), (9.7, _MAIN))
    ax.plot([4.75, 4.75, 9.9], [_MAIN + 0.2, _ABOVE, _ABOVE], color=_INK, linewidth=1.2)
    _arrow(ax, (9.9, _ABOVE), (9.9, _MAIN + 0.2))
    ax.text(
        7.3,
        _ABOVE + 0.08,
        "residual path, before the norm",
        ha="center",
        va="bottom",
        fontsize=8,
        color=_INK,
    )

    # From the attention to the draft token.
    _box(ax, 11.2, _MAIN, "norm, MLP,\n+ residual", width=1.6)
    _arrow(ax, (10.1, _MAIN), (10.4, _MAIN))
    _box(ax, 13.0, _MAIN, "norm", width=0.9)
    _arrow(ax, (12.0, _MAIN), (12.55, _MAIN))
    _box(ax, 14.9, _MAIN, f"output\n{width} → {config.draft_vocab_size}", width=1.7)
    _arrow(ax, (13.45, _MAIN), (14.05, _MAIN))
    _box(ax, 14.9, _LOW, "best id + d2t:\ndraft for $x_{t+2}$", width=1.9)
    _arrow(ax, (14.9, _MAIN - 0.45), (14.9, _LOW + 0.45))

    # The feedback of the next draft step.
    dashed = {"color": _GUESS, "linewidth": 1.4, "linestyle": (0, (4, 2))}
    ax.plot([12.25, 12.25, 4.4, 4.4], [_MAIN, 4.6, 4.6, _MAIN + 0.55], **dashed)
    _arrow(ax, (4.4, _MAIN + 0.6), (4.62, _MAIN + 0.17), color=_GUESS)
    note = {"ha": "center", "fontsize": 8, "color": _GUESS}
    ax.text(
        8.3,
        4.72,
        "next draft step: own output before the final norm, without fc",
        va="bottom",
        **note,
    )

    ax.plot([14.9, 14.9, 4.75], [_LOW - 0.45, -0.2, -0.2], **dashed)
    _arrow(ax, (4.75, -0.2), (4.75, _LOW - 0.45), color=_GUESS)
    ax.text(9.8, -0.34, "next draft step: the drafted token", va="top", **note)

    ax.set_title("Architecture of an EAGLE-3 head")
    plt.close(fig)
    return fig


def _target(ax: Axes, taps: tuple[int, ...], num_layers: int) -> None:
    """Draws the layers of the target and a line from every feature to ``fc``."""
    low = -0.35
    high = 4.9
    step = (high - low) / num_layers
    for layer in range(num_layers):
        y = low + layer * step
        ax.add_patch(_patch((0.0, y + 0.05 * step), 1.3, 0.9 * step, TARGET, alpha=0.16))
        if num_layers <= 16 or layer in taps:
            ax.text(
                0.65,
                y + step / 2,
                str(layer),
                ha="center",
                va="center",
                fontsize=min(7, 110 / num_layers),
                color=_INK,
            )

    for index, tap in enumerate(taps):
        y = low + tap * step
        ax.plot([0.0, 1.3], [y, y], color=DRAFTER, linewidth=2)
        ax.plot([1.3, 2.0], [y, y], color=DRAFTER, linewidth=1.4)
        _arrow(ax, (2.0, y), (2.53, _MAIN + 0.36 * (index - (len(taps) - 1) / 2)), color=DRAFTER)

    ax.text(0.65, high + 0.1, "target", ha="center", va="bottom", fontsize=9, color=_INK)
    ax.text(0.65, low - 0.1, "embedding", ha="center", va="top", fontsize=8, color=_INK)
    ax.text(
        2.1,
        high + 0.1,
        "$f_t$: input of\nthese layers",
        ha="center",
        va="bottom",
        fontsize=8,
        color=DRAFTER,
    )


def _patch(
    corner: tuple[float, float], width: float, height: float, color: str, alpha: float = 0.13
):
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        corner,
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=color,
        alpha=alpha,
        linewidth=0,
    )


def _box(
    ax: Axes,
    x: float,
    y: float,
    text: str,
    *,
    width: float,
    height: float = 0.9,
    color: str = DRAFTER,
) -> None:
    ax.add_patch(_patch((x - width / 2, y - height / 2), width, height, color, alpha=0.2))
    ax.text(x, y, text, ha="center", va="center", fontsize=8.5)


def _node(ax: Axes, x: float, y: float, text: str) -> None:
    ax.text(
        x,
        y,
        text,
        ha="center",
        va="center",
        fontsize=9,
        bbox={"boxstyle": "circle", "fc": "white", "ec": _INK},
    )


def _arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str = _INK
) -> None:
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", xy=end, xytext=start, arrowprops=style)
