"""Colors of the pictures, and settings of matplotlib."""

from __future__ import annotations

from typing import Any

# Status of a token. The colors are distinguishable with any color vision; pictures add a second
# mark.
ACCEPTED = "accepted"
CORRECTED = "corrected"
BONUS = "bonus"
REJECTED = "rejected"
UNVISITED = "never visited"
COLOURS = {
    ACCEPTED: "#2a9d74",
    CORRECTED: "#d97634",
    BONUS: "#3b82c4",
    REJECTED: "#c05a8e",
    UNVISITED: "#9aa0a6",
}

# The target's and the drafter's distribution.
TARGET = "#3b82c4"
DRAFTER = "#d97634"
RESIDUAL = "#8378d0"

# Other series, in this order.
SERIES = ("#3b82c4", "#d97634", "#2a9d74", "#c05a8e", "#8378d0", "#a8862a")


def use() -> None:
    """Sets the style of matplotlib for the pictures of this package and for later cells."""
    from matplotlib import get_backend, pyplot, rcParams, rcsetup

    settings: dict[Any, Any] = {
        "figure.figsize": (7.2, 3.6),
        "figure.dpi": 110,
        "figure.facecolor": "white",
        "figure.constrained_layout.use": True,
        "axes.prop_cycle": rcsetup.cycler(color=SERIES),
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "grid.alpha": 0.25,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "text.parse_math": True,
    }
    rcParams.update(settings)
    # Loads the backend, so that a notebook also shows figures made without pyplot.
    pyplot.switch_backend(get_backend())
