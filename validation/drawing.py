"""Self-contained HTML pages: plots as inline SVG in the colors of the page, and templates."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from eagle3_jax.bench.tables import Plot, data_of, flat, show

# Each series has a marker and a hatch in addition to its color.
COLOURS = ("#3b82c4", "#d97634", "#2a9d74", "#c05a8e", "#8378d0", "#a8862a")
MARKERS = "osD^vP"
HATCHES = ("", "//", "..", "xx", "\\\\", "++")
_CHARACTERS = 75  # of a legend
INK = "#010203"  # placeholder for the text color of the page


def render(template: Path, **values: Any) -> str:
    """Fills in a template, which can import the shared parts of all pages from ``parts.html.jinja``.

    Args:
        template: Path of the template.
        values: Variables of the template.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["show"] = show
    environment.globals |= {"draw": draw, "data_of": data_of, "flat": flat}
    return environment.get_template(template.name).render(**values)


def draw(plot: Plot) -> Markup | None:
    """A plot as inline SVG in the color of the surrounding text; ``None`` if matplotlib is not installed."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    style: dict[Any, Any] = {
        "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
        "svg.hashsalt": repr(plot),  # the same report gives the same page, and two plots share no id
        "text.parse_math": False,  # a dollar sign in a label is a dollar sign
        "font.size": 10,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "hatch.linewidth": 0.5,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(6.2, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.set(xlabel=plot.x_label, ylabel=plot.y_label)
        axes.grid(True, axis="y" if plot.kind == "bar" else "both", color=INK, alpha=0.15, linewidth=0.6)
        axes.set_axisbelow(True)
        _draw_bars(axes, plot) if plot.kind == "bar" else _draw_points(axes, plot)
        if len(plot.series) > 1:
            across = _CHARACTERS // max(map(len, plot.series))  # as many names as fit beside each other
            figure.legend(loc="outside upper center", ncols=max(1, min(4, across, len(plot.series))))
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    label = Markup.escape(f"{plot.title}: {plot.y_label} over {plot.x_label}")
    svg = re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"|^<svg ([^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"',
                 r"<svg \1\2\3", svg, count=1)  # fmt: skip
    return Markup(svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1))


def _draw_points(axes: Any, plot: Plot) -> None:
    for index, (name, (xs, ys)) in enumerate(plot.series.items()):
        look = {"color": COLOURS[index % 6], "marker": MARKERS[index % 6], "label": name}
        ys = [float("nan") if y is None else y for y in ys]
        xs = [float("nan") if x is None else x for x in xs]
        if plot.kind == "scatter":
            axes.scatter(xs, ys, s=14, alpha=0.7, linewidths=0, **look)
        else:
            # Later series are drawn smaller and dashed, so that equal curves show as both.
            size = max(3, 9 - 3 * index) if len(xs) <= 60 else 0
            axes.plot(xs, ys, markersize=size, linestyle=("-", "--", "-.", ":")[index % 4], **look)
    if all(isinstance(x, int) for xs, _ in plot.series.values() for x in xs):
        axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_bars(axes: Any, plot: Plot) -> None:
    groups = list({x: None for xs, _ in plot.series.values() for x in xs})
    width = 0.8 / len(plot.series)
    for index, (name, (xs, ys)) in enumerate(plot.series.items()):
        places = [groups.index(x) + (index - (len(plot.series) - 1) / 2) * width for x in xs]
        heights = [float("nan") if y is None else y for y in ys]
        axes.bar(places, heights, width * 0.94, color=COLOURS[index % 6], hatch=HATCHES[index % 6], label=name)
    names = [show(x) for x in groups]
    crowded = sum(map(len, names)) > 60
    axes.set_xticks(range(len(groups)), names, rotation=35 if crowded else 0, ha="right" if crowded else "center")
