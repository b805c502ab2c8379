"""Curves of a policy in training: what its drafters have accepted, and its reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pictures import style

# Steps that a point of a curve averages.
WINDOW = 10
DRAFTERS = ("refreshed head", "frozen head", "n-grams", "siblings")
Runs = Mapping[str, Sequence[Mapping[str, Any]]]


def acceptance_and_reward(runs: Runs) -> Figure:
    """Draws tokens per round by drafter, and rewards of plain and drafted rollouts.

    Args:
        runs: The lines of each run by its name, ``drafted-SEED`` or ``plain-SEED``, as
            ``examples/rollouts.py`` records them.
    """
    figure, (pace_axes, reward_axes) = plt.subplots(1, 2, figsize=(9.6, 3.6))
    drafted = lines_of(runs, "drafted")
    for drafter, colour in zip(DRAFTERS, style.SERIES, strict=False):
        draw(pace_axes, [curve(lines, drafter) for lines in drafted], drafter, colour)
    pace_axes.set(xlabel="step of the policy", ylabel="tokens per round", ylim=(1, None))
    pace_axes.legend()

    for kind, colour in zip(("plain", "drafted"), style.SERIES, strict=False):
        rewards = [curve(lines, None) for lines in lines_of(runs, kind)]
        draw(reward_axes, rewards, f"{kind} rollouts", colour)
    reward_axes.set(xlabel="step of the policy", ylabel="reward", ylim=(0, 1))
    reward_axes.legend()
    return figure


def lines_of(runs: Runs, kind: str) -> list[Sequence[Mapping[str, Any]]]:
    """Returns the lines of the runs of one kind, seed by seed."""
    return [lines for name, lines in sorted(runs.items()) if name.startswith(f"{kind}-")]


def curve(lines: Sequence[Mapping[str, Any]], drafter: str | None) -> np.ndarray:
    """Returns steps and means over windows of steps, ``[2 N]``; the reward without a drafter."""
    measured = [line for line in lines if drafter is None or drafter in line]
    steps = np.array([line["step"] for line in measured])
    values = np.array(
        [
            line["reward"] if drafter is None else line[drafter]["tokens_per_round"]
            for line in measured
        ]
    )
    windows = steps // WINDOW
    means = [values[windows == window].mean() for window in np.unique(windows)]
    return np.array([(np.unique(windows) + 0.5) * WINDOW, means])


def draw(axes: Axes, curves: Sequence[np.ndarray], label: str, colour: str) -> None:
    """Draws the mean of the seeds, and the range of them."""
    shortest = min(curve.shape[1] for curve in curves)
    steps = curves[0][0, :shortest]
    values = np.array([curve[1, :shortest] for curve in curves])
    axes.plot(steps, values.mean(0), color=colour, label=label)
    axes.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
