"""Plots of the parts of a round and of its time by batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from pictures.style import ACCEPTED, COLOURS, DRAFTER, RESIDUAL, SERIES, TARGET, UNVISITED

Numbers = Sequence[float | int] | np.ndarray

_PARTS = {
    "draft": DRAFTER,
    "verify": TARGET,
    "commit": COLOURS[ACCEPTED],
    "host": COLOURS[UNVISITED],
}
_HATCHES = {"draft": "//", "commit": "..", "host": "xx"}  # marks in addition to the colors
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.2}  # a number
_LABELLED = 0.07  # share of the longest bar: narrower parts have no number


def stacked_steps(names: Sequence[str], parts: Mapping[str, Numbers], *, title: str = "") -> Figure:
    """Draws one stacked bar per kind of step, from top to bottom.

    Args:
        names: Names of the bars.
        parts: For each part (``draft``, ``verify``, ``commit``, ``host``), its milliseconds in
            every bar.
        title: Title of the figure.
    """
    figure = Figure(figsize=(7.2, 1.3 + 0.42 * len(names)))
    axes = figure.add_subplot()
    places = range(len(names))

    totals = [sum(times[index] for times in parts.values()) for index in places]
    offsets = [0.0] * len(names)
    others = iter((RESIDUAL, *SERIES[3:]))

    for part, times in parts.items():
        colour = _PARTS.get(part) or next(others, SERIES[0])
        look = {"height": 0.62, "color": colour, "edgecolor": "white", "hatch": _HATCHES.get(part)}
        axes.barh(places, times, left=offsets, label=part, **look)
        for index, time in enumerate(times):
            if time >= _LABELLED * max(totals):
                at = offsets[index] + time / 2, index, _short(time)
                axes.text(*at, ha="center", va="center", fontsize="small", bbox=_BEHIND)
        offsets = [end + time for end, time in zip(offsets, times, strict=True)]

    for index, total in enumerate(totals):
        axes.annotate(
            f"{_short(total)} ms", (total, index), (5, 0), textcoords="offset points", va="center"
        )

    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(totals))
    axes.grid(visible=False, axis="y")
    axes.set(xlabel="time of a step, ms", title=title)
    figure.legend(loc="outside upper right", ncols=len(parts))
    return figure


def twin(
    x: Numbers,
    left_values: Numbers,
    right_values: Numbers,
    *,
    labels: tuple[str, str, str],
    right_range: Sequence[tuple[float | int, float | int]],
    title: str,
) -> Figure:
    """Plots two quantities with separate vertical axes, both from zero.

    Args:
        x: Values of the horizontal axis, such as batch sizes; they are evenly spaced.
        left_values: Values of the left axis.
        right_values: Values of the right axis.
        labels: Labels of the horizontal, the left and the right axis, with units.
        right_range: Low and high end of the interval of each value of ``right_values``.
        title: Title of the figure.
    """
    figure = Figure()
    first = figure.add_subplot()
    second = first.twinx()
    places = range(len(x))

    (left_line,) = first.plot(
        places, left_values, color=COLOURS[ACCEPTED], marker="o", label=labels[1]
    )
    (right_line,) = second.plot(
        places, right_values, color=DRAFTER, marker="s", linestyle="--", label=labels[2]
    )
    low, high = zip(*right_range, strict=True)
    second.fill_between(places, low, high, color=DRAFTER, alpha=0.2, linewidth=0)

    first.set_ylim(0, 1.25 * max(left_values))
    second.set_ylim(0, 1.15 * max(*right_values, *high))
    first.set_xticks(places, [f"{value:g}" for value in x])
    first.set(xlabel=labels[0], title=title)
    for axes, line, label in ((first, left_line, labels[1]), (second, right_line, labels[2])):
        axes.set_ylabel(label, color=line.get_color())
        axes.tick_params(axis="y", colors=line.get_color())

    second.spines["right"].set_visible(True)
    second.grid(visible=False)
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
