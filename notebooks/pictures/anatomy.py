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
# columns of the token, the feature and the residual path
_LEFT = 2.2
_MAIN = 6.5
_RIGHT = 9.2


def eagle3_head(config: Eagle3Config, num_layers: int) -> Figure:
    """Draws the head from the target's features to a draft token. Dashed lines are the feedback.

    Args:
        config: The head. Variations of other EAGLE-3 layouts are not shown.
        num_layers: Number of layers of the target.
    """
    import matplotlib.pyplot as plt

    # It is narrow, so that a telephone shows its words large enough.
    fig, ax = plt.subplots(figsize=(4.4, 6.9))
    ax.set(xlim=(-0.3, 10.5), ylim=(0.7, 17.3))
    ax.axis("off")
    width = config.width
    count = len(config.aux_layers)

    # The features of the target, and their projection.
    _target(ax, config.aux_layers, num_layers)
    _box(ax, _MAIN, 13.4, f"fc\n{count}·{config.target_width} → {width}", width=3.2)
    _node(ax, _MAIN, 11.7, "g")
    _arrow(ax, (_MAIN, 12.9), (_MAIN, 12.0))
    _arrow(ax, (_MAIN, 11.4), (_MAIN, 10.7))
    _box(ax, _MAIN, 10.3, "norm", width=2.0, height=0.8)

    # The token that follows the feature.
    _box(ax, _LEFT, 11.9, "embedding\nof $x_{t+1}$", width=2.6, color=TARGET)
    _box(ax, _LEFT, 10.3, "norm", width=2.0, height=0.8)
    _arrow(ax, (_LEFT, 11.4), (_LEFT, 10.7))
    _box(ax, 4.35, 8.6, f"attention\n{2 * width} → {width}", width=3.4)
    _arrow(ax, (_MAIN, 9.9), (5.2, 9.1))
    _arrow(ax, (_LEFT, 9.9), (3.5, 9.1))
    _words(ax, 4.35, 9.75, "concatenated", _INK)

    _node(ax, _MAIN, 7.2, "+")
    _arrow(ax, (5.2, 8.1), (6.25, 7.4))
    ax.plot([6.8, _RIGHT, _RIGHT], [11.7, 11.7, 7.2], color=_INK, linewidth=1.2)
    _arrow(ax, (_RIGHT, 7.2), (6.8, 7.2))
    _words(ax, 8.95, 9.4, "residual path, before the norm", _INK, rotation=90)

    # From the attention to the draft token.
    _box(ax, _MAIN, 6.0, "norm, MLP,\n+ residual", width=3.2)
    _arrow(ax, (_MAIN, 6.9), (_MAIN, 6.5))
    _box(ax, _MAIN, 4.4, "norm", width=2.0, height=0.8)
    _arrow(ax, (_MAIN, 5.5), (_MAIN, 4.8))
    _box(ax, _MAIN, 3.1, f"output\n{width} → {config.draft_vocab_size}", width=3.2)
    _arrow(ax, (_MAIN, 4.0), (_MAIN, 3.6))
    _box(ax, _MAIN, 1.5, "best id + d2t:\ndraft for $x_{t+2}$", width=3.4)
    _arrow(ax, (_MAIN, 2.6), (_MAIN, 2.0))

    # The feedback of the next draft step.
    dashed = {"color": _GUESS, "linewidth": 1.4, "linestyle": (0, (4, 2))}
    ax.plot([_MAIN, 9.8, 9.8, 7.3], [5.15, 5.15, 12.4, 12.4], **dashed)
    _arrow(ax, (7.3, 12.4), (6.72, 11.95), color=_GUESS)
    feature = "next draft step: own output before the final norm, without fc"
    _words(ax, 10.15, 8.8, feature, _GUESS, rotation=90)

    ax.plot([4.8, 0.4, 0.4], [1.5, 1.5, 11.9], **dashed)
    _arrow(ax, (0.4, 11.9), (0.88, 11.9), color=_GUESS)
    _words(ax, 0.05, 6.0, "next draft step: the drafted token", _GUESS, rotation=90)

    ax.set_title("Architecture of an EAGLE-3 head")
    plt.close(fig)
    return fig


def _target(ax: Axes, taps: tuple[int, ...], num_layers: int) -> None:
    """Draws the layers of the target and a line from every feature to ``fc``."""
    low = 1.9
    high = 8.4
    step = (high - low) / num_layers
    for layer in range(num_layers):
        x = low + layer * step
        ax.add_patch(_patch((x + 0.05 * step, 15.6), 0.9 * step, 1.0, TARGET, alpha=0.16))
        if num_layers <= 16 or layer in taps:
            _words(ax, x + step / 2, 16.1, str(layer), _INK)

    for index, tap in enumerate(taps):
        x = low + tap * step
        ax.plot([x, x, x], [16.6, 15.6, 15.1], color=DRAFTER, linewidth=2)
        end = _MAIN + 0.8 * (index - (len(taps) - 1) / 2)
        _arrow(ax, (x, 15.1), (end, 13.92), color=DRAFTER)

    _words(ax, 5.15, 16.95, "layers of the target", _INK)
    _words(ax, 0.75, 16.1, "embedding", _INK)
    _words(ax, 2.2, 14.3, "$f_t$: input of\nthese layers", DRAFTER)


def _words(ax: Axes, x: float, y: float, text: str, color: str, *, rotation: float = 0) -> None:
    ax.text(x, y, text, ha="center", va="center", fontsize=8, color=color, rotation=rotation)


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
    height: float = 1.0,
    color: str = DRAFTER,
) -> None:
    ax.add_patch(_patch((x - width / 2, y - height / 2), width, height, color, alpha=0.2))
    ax.text(x, y, text, ha="center", va="center", fontsize=9)


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
