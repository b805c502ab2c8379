"""Acceptance by position, and the map of where speculation pays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure

from pictures.style import DRAFTER, SERIES, TARGET
from pictures.times import Numbers

_MARKERS = "osD^vP"
_Z = 1.959964  # of a 95 % interval


def acceptance_ribbons(
    per_position: Mapping[str, Numbers], *, rounds: Mapping[str, int] | None = None, title: str = ""
) -> Figure:
    """The share of rounds in which the draft token at each position was accepted, with all those before it.

    Args:
        per_position: A series by its name: the share at positions 1, 2, …, as
            ``SpeculationStats.acceptance_per_position``.
        rounds: How many rounds each share was counted in; its ribbon is then the 95 % interval (Wilson, 1927) and
            reaches down to zero otherwise.
        title: What is to be seen.
    """
    figure = Figure()
    axes = figure.add_subplot()
    deepest = max(map(len, per_position.values()))
    for index, (name, shares) in enumerate(per_position.items()):
        places = np.arange(1, len(shares) + 1)
        colour = SERIES[index % len(SERIES)]
        bands = [_wilson(share, rounds[name]) if rounds else (0.0, share) for share in shares]
        low, high = zip(*bands, strict=True)
        axes.fill_between(places, low, high, color=colour, alpha=0.18 if rounds else 0.10, linewidth=0)
        label = f"{name} ({rounds[name]:,} rounds)" if rounds else name
        axes.plot(places, shares, color=colour, marker=_MARKERS[index % len(_MARKERS)], label=label)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.set(xlabel="position in the draft", ylabel="rounds that accept it", title=title)
    axes.legend()
    return figure


def heat_map(
    values: Float[np.ndarray, "Y X"] | Sequence[Sequence[float]],
    x: Numbers,
    y: Numbers,
    *,
    labels: tuple[str, str, str],
    level: float = 1.0,
    marks: Mapping[str, tuple[float | int, float | int]] | None = None,
    title: str = "",
) -> Figure:
    """A map in two colours that meet at ``level``, with the contour of it: where speculation breaks even.

    Args:
        values: ``[Y X]``, such as speed-ups.
        x: Ascending.
        y: Ascending.
        labels: Of the horizontal axis, the vertical axis and the colours.
        level: Between the two colours.
        marks: Points to name, as ``(x, y)``, such as what was measured.
        title: What is to be seen.

    Raises:
        ValueError: There is not a value for every ``x`` and ``y``.
    """
    field = np.asarray(values, float)
    if field.shape != (len(y), len(x)):
        raise ValueError(f"values of shape {field.shape} for {len(y)} y and {len(x)} x; expected one for each pair")
    figure = Figure(figsize=(7.2, 4.2))
    axes = figure.add_subplot()
    span = float(np.max(np.abs(field - level))) or 1.0
    colours = LinearSegmentedColormap.from_list("break even", [DRAFTER, "#ffffff", TARGET])
    mesh = axes.pcolormesh(x, y, field, cmap=colours, norm=Normalize(level - span, level + span), shading="nearest")
    bar = figure.colorbar(mesh, ax=axes, label=labels[2])
    bar.ax.axhline(level, color="black", linewidth=1)
    bar.ax.set_ylim(float(field.min()), float(field.max()))
    if float(field.min()) < level < float(field.max()):
        contour = axes.contour(x, y, field, levels=[level], colors="black", linewidths=1.4)
        axes.clabel(contour, fmt={level: f"{level:g}"}, fontsize="small")
    for index, (name, (across, up)) in enumerate((marks or {}).items()):
        axes.plot(across, up, marker="o", markersize=6, color="black", markerfacecolor="white", clip_on=False, zorder=5)
        right = across > (x[0] + x[-1]) / 2
        axes.annotate(
            name,
            (across, up),
            (-7 if right else 7, (5, -14, 20, -29)[index % 4]),  # near each other, their names still apart
            textcoords="offset points",
            ha="right" if right else "left",
            fontsize="small",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.0},
        )
    axes.grid(visible=False)
    axes.set(xlabel=labels[0], ylabel=labels[1], title=title)
    return figure


def _wilson(share: float, rounds: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if rounds < 1:
        return 0.0, 1.0
    middle, square = share + _Z**2 / (2 * rounds), _Z**2 / rounds
    half = _Z * math.sqrt(share * (1 - share) / rounds + square / (4 * rounds))
    return (middle - half) / (1 + square), (middle + half) / (1 + square)
