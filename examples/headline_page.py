"""What `headline.py` writes for people: one table and one plot of all cells that were measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle3_jax.bench.tables import show, to_markdown, write_text
from eagle3_jax.writing import whole_file

COLUMNS = [
    "prompts", "T", "batch", "method", "tokens/s", "over plain", "over vLLM", "τ", "accepted per position",
    "% of roofline", "same texts",
]  # fmt: skip
NOTE = "A REHEARSAL: no figure counts.\n\n"


def write(record: dict[str, Any], directory: Path) -> str:
    """Write headline.md, and headline.png where matplotlib is installed; returns the table."""
    failed = [f"- {key}: {cell['failed']}" for key, cell in record["cells"].items() if "failed" in cell]
    table = to_markdown(COLUMNS, list(rows(record)))
    text = "\n".join([NOTE * record["rehearsal"] + table, *["\nNot measured:\n" * bool(failed)], *failed])
    write_text(directory / "headline.md", text + "\n")
    try:
        with whole_file(directory / "headline.png") as partial:
            draw(record, partial)
    except ModuleNotFoundError:
        return f"{text}\nno plot: matplotlib is not installed (pip install 'eagle3-jax[plot]')"
    return text


def measured(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells with figures, by prompts, temperature and batch, ours before vLLM's."""
    cells = [cell for cell in record["cells"].values() if "rows" in cell]
    return sorted(
        cells, key=lambda cell: (cell["prompts"], cell["temperature"], cell["batch"], cell["rival"] != "ours")
    )


def rows(record: dict[str, Any]) -> Iterator[list[str]]:
    """The table. Where vLLM took part our own row of that cell gives only the ratio to it, and the texts shared."""
    cells = measured(record)
    place = lambda cell, name: (cell["prompts"], cell["temperature"], cell["batch"], name)
    beside = {place(cell, row["name"]): row for cell in cells if cell["rival"] != "ours" for row in cell["rows"]}
    for cell in cells:
        for row in cell["rows"]:
            name, ours = row["name"], cell["rival"] == "ours"
            if not ours and not name.startswith("vLLM"):
                continue
            other = beside.get(place(cell, name.removeprefix("vLLM ")))
            found, texts = row["acceptance"], (row if ours else other or row)["same_texts"]
            yield [
                cell["prompts"],
                f"{cell['temperature']:g}",
                str(cell["batch"]),
                name,
                spread(row["decode_tokens_per_second"]),
                spread(row["ratio"]) if ours and name != cell["baseline"] else "",
                spread(other["ratio"]) if ours and other else "",
                "" if found is None else f"{found['mean_acceptance_length']:.2f}",
                "" if found is None else " ".join(f"{share:.2f}" for share in found["per_position"]),
                f"{100 * row['roofline']['share']:.0f}",
                "" if texts is None or name == "plain" else f"{texts} of {cell['num_prompts']}",
            ]


def spread(one: dict[str, float]) -> str:
    """Median and quartiles."""
    low, middle, high = (show(float(f"{one[name]:.3g}")) for name in ("low", "median", "high"))
    return f"{middle} ({low}\N{EN DASH}{high})"


def draw(record: dict[str, Any], path: Path) -> None:
    """Tokens/s over the batch, a panel for each set of prompts and temperature; vLLM dashed, quartiles as bars."""
    from matplotlib.figure import Figure

    cells = measured(record)
    sets = list(dict.fromkeys(cell["prompts"] for cell in cells))
    heats = sorted({cell["temperature"] for cell in cells})
    if not cells:
        return
    figure = Figure(figsize=(5 * len(sets), 4 * len(heats)), layout="constrained")
    panels = figure.subplots(len(heats), len(sets), squeeze=False)
    methods = dict.fromkeys(row["name"].removeprefix("vLLM ") for cell in cells for row in cell["rows"])
    colors = {name: f"C{index}" for index, name in enumerate(methods)}
    for (down, heat), (across, name) in ((one, two) for one in enumerate(heats) for two in enumerate(sets)):
        lines: dict[str, list[tuple[int, dict[str, float]]]] = {}
        for cell in cells:
            if (cell["prompts"], cell["temperature"]) == (name, heat):
                for row in cell["rows"]:
                    if cell["rival"] == "ours" or row["name"].startswith("vLLM"):
                        lines.setdefault(row["name"], []).append((cell["batch"], row["decode_tokens_per_second"]))
        axes = panels[down, across]
        for method, points in lines.items():
            middle = [one["median"] for _, one in points]
            bars = [
                [one["median"] - one["low"] for _, one in points],
                [one["high"] - one["median"] for _, one in points],
            ]
            axes.errorbar(
                [batch for batch, _ in points], middle, yerr=bars, label=method, marker="o", capsize=2,
                color=colors[method.removeprefix("vLLM ")], linestyle="--" if method.startswith("vLLM") else "-",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="batch", ylabel="tokens/s", title=f"{name}, T={heat:g}")
        axes.set_xscale("log", base=2)
    panels[0, 0].legend(fontsize="small")
    if record["rehearsal"]:
        figure.suptitle(NOTE.strip())
    figure.savefig(path, dpi=150)
