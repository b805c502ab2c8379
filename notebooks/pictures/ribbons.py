"""Plots of acceptance by position."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure
from scipy.stats import binomtest

from pictures.style import SERIES
from pictures.times import Numbers

_MARKERS = "osD^vP"


def acceptance_ribbons(
    per_position: Mapping[str, Numbers], *, rounds: Mapping[str, int], title: str
) -> Figure:
    """Plots the share of rounds that accept the draft tokens up to each position.

    Args:
        per_position: For each series, the shares at positions 1, 2, …, as
            ``SpeculationStats.acceptance_per_position``.
        rounds: For each series, the number of rounds; the ribbon is the 95 % interval (Wilson,
            1927).
        title: Title of the figure.
    """
    figure = Figure()
    axes = figure.add_subplot()

    deepest = max(map(len, per_position.values()))
    for index, (name, shares) in enumerate(per_position.items()):
        places = np.arange(1, len(shares) + 1)
        colour = SERIES[index % len(SERIES)]
        low, high = zip(*(_wilson(share, rounds[name]) for share in shares), strict=True)
        axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
        label = f"{name} ({rounds[name]:,} rounds)"
        axes.plot(places, shares, color=colour, marker=_MARKERS[index % len(_MARKERS)], label=label)

    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    axes.set(xlabel="position in the draft", ylabel="share of rounds that accept it", title=title)
    axes.legend()
    return figure


def _wilson(share: float, rounds: int) -> tuple[float, float]:
    """Computes the 95 % interval of a share."""
    if rounds < 1:
        return 0.0, 1.0
    interval = binomtest(round(share * rounds), rounds).proportion_ci(0.95, method="wilson")
    return interval.low, interval.high
