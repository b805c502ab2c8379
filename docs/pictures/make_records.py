"""Draw the pictures of numbers, choosing, validation and deploying from records and from plans: nothing runs a model.

python docs/pictures/make_records.py        # writes speed, draft_length, levels and rollout.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "recorded"), str(HERE.parents[1]), str(HERE.parents[1] / "notebooks")]

import speeds  # noqa: E402
from pictures import style  # noqa: E402

from eagle3_jax.theory.speedup import tau_from_conditional_rate  # noqa: E402

BLUE, ORANGE, GREY = style.SERIES[0], style.SERIES[1], "#9aa0a6"
# What each level compares, from the rule alone to other engines.
LEVELS = (
    ("Acceptance rule", "L0 L1", "exact distributions,\ninjected randomness"),
    ("Compiled loop", "L2 L3", "sampled sequences,\nbits of the caches"),
    ("Models", "L4 L6 HF", "transformers:\nlogits, text, sampling"),
    ("Engines", "L5 L8 JV", "vLLM: greedy text,\naccepted counts"),
    ("Programs", "L9 AOT", "speed limits,\ncompiled kernels"),
)
STAGES = ((1, 34), (10, 24), (50, 24), (100, 168))  # percent of the traffic, hours: the plan on docs/deploying.md


def main() -> None:
    """Draw and write."""
    style.use()
    matplotlib.rcParams.update({"svg.hashsalt": "eagle3-jax", "svg.fonttype": "path"})
    for name, draw in (("speed", speed), ("draft_length", draft_length), ("levels", levels), ("rollout", rollout)):
        _write(draw(), name)


def speed() -> Figure:
    """Speed-up of every method of the canonical benchmark, with quartiles."""
    rows = list(speeds.ROWS.values())[::-1]
    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    medians = [row["ratio"]["median"] for row in rows]
    spread = [
        [row["ratio"]["median"] - row["ratio"]["low"] for row in rows],
        [row["ratio"]["high"] - row["ratio"]["median"] for row in rows],
    ]
    colours = [
        BLUE if row["name"].startswith(("chain", "tree")) else ORANGE if row["name"] == "n-gram K=5" else GREY
        for row in rows
    ]
    axes.barh(range(len(rows)), medians, xerr=spread, color=colours, ecolor="#333333", height=0.7)
    for place, row in enumerate(rows):
        axes.text(row["ratio"]["high"] + 0.02, place, f"{row['ratio']['median']:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [speeds.NAMES[row["name"]].replace("`", "") for row in rows], fontsize=8)
    axes.axvline(1, color="#333333", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1.6)
    axes.set_xlabel("speed-up over plain decoding, median and quartiles")
    return figure


def draft_length() -> Figure:
    """Measured and predicted speed-up over K, and what a constant acceptance rate would give."""
    rows = [row for row in speeds.ROWS.values() if row["name"].startswith("chain")]
    lengths = [row["num_draft_steps"] for row in rows]
    figure, axes = plt.subplots(figsize=(7.2, 3.4))
    for alpha in (0.5, 0.7, 0.9):
        curve = [tau_from_conditional_rate(alpha, k) / (1.35 + k * 0.14) for k in range(1, 9)]
        axes.plot(range(1, 9), curve, color=GREY, linewidth=1)
        axes.text(8.1, curve[-1], f"α = {alpha}", va="center", fontsize=8)
    ratios = [row["ratio"] for row in rows]
    spread = [[one["median"] - one["low"] for one in ratios], [one["high"] - one["median"] for one in ratios]]
    axes.errorbar(
        lengths, [one["median"] for one in ratios], yerr=spread, fmt="o", color=BLUE, label="measured, with quartiles"
    )
    axes.plot(lengths, [row["predicted_ratio"] for row in rows], "x", color=ORANGE, label="predicted: τ / (v + K·c)")
    axes.axhline(1, color="#333333", linewidth=0.8, linestyle="--")
    axes.set_xlim(0.7, 9)
    axes.set_xlabel("draft length K (grey curves: v = 1.35, c = 0.14)")
    axes.set_ylabel("speed-up S")
    axes.legend(loc="upper left", fontsize=8)
    return figure


def levels() -> Figure:
    """The levels of the validation, from the rule to other engines."""
    figure, axes = plt.subplots(figsize=(7.2, 1.9))
    for place, (subject, names, compared) in enumerate(LEVELS):
        axes.add_patch(plt.Rectangle((place + 0.04, 0.05), 0.92, 0.9, facecolor="#eaf1f8", edgecolor=BLUE))
        axes.text(place + 0.5, 0.78, subject, ha="center", va="center", fontsize=8.5, weight="bold")
        axes.text(place + 0.5, 0.55, names, ha="center", va="center", fontsize=8.5, color=BLUE)
        axes.text(place + 0.5, 0.25, compared, ha="center", va="center", fontsize=7)
    axes.set_xlim(0, len(LEVELS))
    axes.set_ylim(0, 1)
    axes.axis("off")
    return figure


def rollout() -> Figure:
    """Share of the traffic over time in the plan of docs/deploying.md."""
    figure, axes = plt.subplots(figsize=(7.2, 2.4))
    start = 0
    for share, hours in STAGES:
        axes.fill_between([start, start + hours], share, color=BLUE, alpha=0.35, linewidth=0)
        axes.text(start + hours / 2, share + 4, f"{share} %: {hours} h", ha="center", fontsize=8)
        start += hours
    axes.set_ylim(0, 118)
    axes.set_xlim(0, start)
    axes.set_xlabel("hours after the shadow stage")
    axes.set_ylabel("% of the requests")
    return figure


def _write(figure: Figure, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None, "Creator": None}, facecolor="white")
    text = (HERE / f"{name}.svg").read_text(encoding="utf-8")
    (HERE / f"{name}.svg").write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")
    plt.close(figure)


if __name__ == "__main__":
    main()
