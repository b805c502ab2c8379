"""Where the time of a round goes, and what a larger batch does to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from pictures.style import ACCEPTED, COLOURS, DRAFTER, RESIDUAL, SERIES, TARGET, UNVISITED

Numbers = Sequence[float | int] | np.ndarray

_PARTS = {"draft": DRAFTER, "verify": TARGET, "commit": COLOURS[ACCEPTED], "host": COLOURS[UNVISITED]}
_HATCHES = {"draft": "//", "commit": "..", "host": "xx"}  # a colour is never alone
_LABELLED = 0.07  # of the longest bar: narrower parts carry no figure


def stacked_steps(names: Sequence[str], parts: Mapping[str, Numbers], *, unit: str = "ms", title: str = "") -> Figure:
    """One bar per kind of step, made of its parts, the first name on top.

    Args:
        names: Of the bars.
        parts: For each part, as ``draft``, ``verify``, ``commit`` or ``host``, its time in every bar, in ``unit``.
        unit: Of the times.
        title: What is to be seen.

    Raises:
        ValueError: A part does not have a time for every bar.
    """
    for part, times in parts.items():
        if len(times) != len(names):
            raise ValueError(f"{part} has {len(times)} times for {len(names)} bars; give one each")
    figure = Figure(figsize=(7.2, 1.3 + 0.42 * len(names)))
    axes = figure.add_subplot()
    places = range(len(names))
    totals = [sum(times[index] for times in parts.values()) for index in places]
    ends = [0.0] * len(names)
    others = iter((RESIDUAL, *SERIES[3:]))
    for part, times in parts.items():
        colour = _PARTS.get(part) or next(others, SERIES[0])
        axes.barh(
            places, times, left=ends, height=0.62, color=colour, edgecolor="white", label=part, hatch=_HATCHES.get(part)
        )
        for index, time in enumerate(times):
            if time >= _LABELLED * max(totals):
                axes.text(
                    ends[index] + time / 2,
                    index,
                    _short(time),
                    ha="center",
                    va="center",
                    fontsize="small",
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.2},
                )
        ends = [end + time for end, time in zip(ends, times, strict=True)]
    for index, total in enumerate(totals):
        axes.annotate(f"{_short(total)} {unit}", (total, index), (5, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(totals))
    axes.grid(visible=False, axis="y")
    axes.set(xlabel=f"time of a step, {unit}", title=title)
    figure.legend(loc="outside upper right", ncols=len(parts))
    return figure


def twin(
    x: Numbers,
    left: Numbers,
    right: Numbers,
    *,
    labels: tuple[str, str, str],
    right_range: Sequence[tuple[float | int, float | int]] | None = None,
    title: str = "",
) -> Figure:
    """Two quantities over one axis, each on an axis of its own that starts at zero: τ flat, the step's time rising.

    Args:
        x: Such as batch sizes, evenly spaced in the picture.
        left: Measured at each of them.
        right: The same.
        labels: Of the horizontal, the left and the right axis, with units.
        right_range: Lowest and highest of what ``right`` is the middle of.
        title: What is to be seen.
    """
    figure = Figure()
    first = figure.add_subplot()
    second = first.twinx()
    places = range(len(x))
    (one,) = first.plot(places, left, color=COLOURS[ACCEPTED], marker="o", label=labels[1])
    (two,) = second.plot(places, right, color=DRAFTER, marker="s", linestyle="--", label=labels[2])
    highest = max(right)
    if right_range is not None:
        low, high = zip(*right_range, strict=True)
        second.fill_between(places, low, high, color=DRAFTER, alpha=0.2, linewidth=0)
        highest = max(highest, *high)
    first.set_ylim(0, 1.25 * max(left))
    second.set_ylim(0, 1.15 * highest)
    first.set_xticks(places, [f"{value:g}" for value in x])
    first.set(xlabel=labels[0], title=title)
    for axes, line, label in ((first, one, labels[1]), (second, two, labels[2])):
        axes.set_ylabel(label, color=line.get_color())
        axes.tick_params(axis="y", colors=line.get_color())
    second.spines["right"].set_visible(True)
    second.grid(visible=False)
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
