"""Interactive rooflines with a list of accelerators."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eagle3_jax.theory.accelerators import Accelerator
from pictures.interactive import Interactive
from pictures.style import SERIES

_SYMBOLS = ("circle", "diamond", "square", "cross")


@dataclasses.dataclass(frozen=True)
class Step:
    """One kind of step under the roof."""

    group: str  #: Name of its group, such as ``plain step``. A group has one color and one symbol.
    intensity: float  #: Operations per byte.
    label: str = ""  #: Label of the point; empty for none.


def roofline(
    steps: Sequence[Step], accelerators: Sequence[Accelerator], words: Sequence[Sequence[str]]
) -> Interactive:
    """Plots attainable arithmetic over arithmetic intensity, in bfloat16.

    Args:
        steps: The points.
        accelerators: Entries of the list; the first one is shown at the start.
        words: For each accelerator and each step, the text of the tooltip.
    """
    import plotly.graph_objects as go

    groups = list(dict.fromkeys(step.group for step in steps))
    limits = 0.5, 2.0 * max(2 * max(step.intensity for step in steps), 600.0)

    def series_of(accelerator: Accelerator, tooltips: Sequence[str]) -> list[dict]:
        """Makes the roof and a series for each group."""
        peak = accelerator.peak_flops / 1e12
        slope = accelerator.bandwidth_bytes_per_second / 1e12
        line = [limits[0], peak / slope, limits[1]]
        traces: list[dict] = [
            {"x": line, "y": [min(peak, slope * x) for x in line], "hovertext": None}
        ]

        for group in groups:
            members = [
                (step, text)
                for step, text in zip(steps, tooltips, strict=True)
                if step.group == group
            ]
            xs = [step.intensity for step, _ in members]
            ys = [min(peak, slope * x) for x in xs]
            traces.append({"x": xs, "y": ys, "hovertext": [text for _, text in members]})
        return traces

    def title(accelerator: Accelerator) -> str:
        ridge = accelerator.peak_flops / accelerator.bandwidth_bytes_per_second
        return f"{accelerator.name}: ridge point at {ridge:.0f} operations per byte"

    roof, *points = series_of(accelerators[0], words[0])
    figure = go.Figure(
        go.Scatter(
            **roof, mode="lines", line={"color": "#444", "width": 3}, name="roof", hoverinfo="skip"
        )
    )
    for index, (group, series) in enumerate(zip(groups, points, strict=True)):
        look = {
            "size": 13,
            "color": SERIES[index],
            "symbol": _SYMBOLS[index % 4],
            "line": {"width": 1},
        }
        labels = [step.label for step in steps if step.group == group]
        figure.add_scatter(
            **series,
            mode="markers+text",
            text=labels,
            textposition="top left" if index % 2 == 0 else "bottom right",
            hoverinfo="text",
            marker=look,
            name=group,
        )

    buttons = []
    for accelerator, tooltips in zip(accelerators, words, strict=True):
        traces = series_of(accelerator, tooltips)
        change = {key: [series[key] for series in traces] for key in ("x", "y", "hovertext")}
        text = {"title.text": title(accelerator)}
        buttons.append({"label": accelerator.name, "method": "update", "args": [change, text]})

    ticks = {"type": "log", "dtick": 1}
    figure.update_layout(
        title={"text": title(accelerators[0]), "x": 0.02, "font": {"size": 15}},
        xaxis={"title": "arithmetic intensity, operations per byte", **ticks},
        yaxis={
            "title": "attainable, 10<sup>12</sup> operations per second",
            **ticks,
            "range": [-0.9, 3.7],
        },
        legend={"x": 0.98, "y": 0.04, "xanchor": "right", "yanchor": "bottom"},
        updatemenus=[{"buttons": buttons, "x": 1.0, "y": 1.18, "xanchor": "right"}],
        template="plotly_white",
        height=460,
        margin={"t": 70, "r": 20},
    )
    return Interactive(figure)
