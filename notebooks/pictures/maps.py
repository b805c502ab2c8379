"""Colored tables of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib import pyplot as plt
from matplotlib.figure import Figure


def table_map(
    values: Float[np.ndarray, "R C"],
    rows: Sequence[str],
    columns: Sequence[object],
    *,
    title: str,
    most: float,
    words: Sequence[Sequence[str]] | None = None,
    colours: str = "Blues",
) -> Figure:
    """Draws a table whose cells are coloured by their value.

    Args:
        values: ``[R C]``, from 0.
        rows: Labels of the rows, from top to bottom.
        columns: Labels of the columns.
        title: Title of the figure.
        most: Value of the darkest colour.
        words: ``[R C]``, texts of the cells; default: the values with two digits.
        colours: Name of a colour map of matplotlib.
    """
    figure, axes = plt.subplots(figsize=(2.8 + 0.9 * len(columns), 0.9 + 0.36 * len(rows)))
    axes.imshow(values, cmap=colours, vmin=0, vmax=most, aspect="auto")

    for (row, column), value in np.ndenumerate(values):
        text = f"{value:.2f}" if words is None else words[row][column]
        ink = "white" if value > 0.6 * most else "black"
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize="small")

    axes.set_xticks(range(len(columns)), [str(column) for column in columns])
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set_title(title)
    return figure
