"""Plots of ``eagle3 plan`` and ``eagle3 tune``; matplotlib is imported only when one is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from eagle3_jax.theory.speedup import Rates, rates_for_speedup, speedup, tau_from_conditional_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from eagle3_jax.bench.tune import Tuning
    from eagle3_jax.theory.bounds import RoundBound


def plot_speedup(path: Path, found: Rates, *, num_draft_tokens: int, verify_cost: float, draft_cost: float) -> None:
    """Two maps: the speed-up over ``α`` and ``K``, and the break-even ``α`` over ``v`` and ``K``."""
    from matplotlib.figure import Figure

    lengths = np.arange(1, max(8, num_draft_tokens) + 1)
    alphas, verify_costs = np.linspace(0, 1, 101), np.linspace(1, 3, 81)
    gains = [[_speedup(float(a), int(k), verify_cost, draft_cost) for k in lengths] for a in alphas]
    levels = [[_break_even(float(v), int(k), draft_cost) for k in lengths] for v in verify_costs]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _map(left, lengths, alphas, gains, f"S = τ / (v + K·c), v = {verify_cost:g}, c = {draft_cost:g}")
    left.contour(lengths, alphas, gains, levels=[1.0], colors="white", linestyles="dashed")
    left.plot(num_draft_tokens, found.conditional_acceptance_rate, "wo", markeredgecolor="black")
    left.set_ylabel("conditional acceptance rate α")
    _map(right, lengths, verify_costs, levels, f"α at which speculation breaks even, c = {draft_cost:g} (blank: never)")
    right.plot(num_draft_tokens, verify_cost, "wo", markeredgecolor="black")
    right.set_ylabel("verification cost v")
    figure.savefig(path, dpi=150)


def plot_roofline(path: Path, bounds: Sequence[RoundBound], *, tau: float, title: str, largest_batch: int) -> None:
    """Tokens per second over the batch, plain and speculative, and the speed-up below it."""
    from matplotlib.figure import Figure

    batches = [bound.batch for bound in bounds]
    figure = Figure(figsize=(7, 6.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    upper.plot(batches, [bound.plain_tokens_per_second for bound in bounds], "o-", label="plain")
    upper.plot(batches, [bound.tokens_per_second(tau) for bound in bounds], "s-", label=f"speculative, τ = {tau:.2f}")
    upper.set(xscale="log", yscale="log", ylabel="tokens/s, at most", title=title)
    lower.plot(batches, [bound.speedup(tau) for bound in bounds], "k.-")
    lower.axhline(1.0, color="grey", linestyle="dashed")
    lower.set(xlabel="batch", ylabel="S", ylim=(0, None))
    lower.set_xscale("log", base=2)
    for axes in (upper, lower):
        if batches[0] <= largest_batch < batches[-1]:
            axes.axvline(largest_batch, color="tab:red", linestyle="dotted", label="memory is full")
        axes.grid(alpha=0.3)
    upper.legend()
    figure.savefig(path, dpi=150)


def plot_tuning(path: Path, found: Tuning, *, title: str) -> None:
    """The speed-up of every draft over the batch size, with quartiles."""
    from matplotlib.figure import Figure

    batches = [one.batch for one in found.batches]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for same in zip(*(one.candidates for one in found.batches), strict=True):
        shape, gains = same[0].shape, [one.speedup for one in same]
        spread = [[gain.median - gain.low for gain in gains], [gain.high - gain.median for gain in gains]]
        label = f"{shape.name}, τ = {shape.mean_acceptance_length:.2f}"
        axes.errorbar(batches, [gain.median for gain in gains], yerr=spread, marker="o", capsize=3, label=label)
    axes.axhline(1.0, color="grey", linestyle="dashed", label="plain")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="batch", ylabel="S = τ / (v + G·c)", title=title, ylim=(0, None))
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _speedup(alpha: float, k: int, verify_cost: float, draft_cost: float) -> float:
    tau = tau_from_conditional_rate(alpha, k)
    return speedup(tau, num_draft_tokens=k, verify_cost=verify_cost, draft_cost=draft_cost)


def _break_even(verify_cost: float, k: int, draft_cost: float) -> float:
    found = rates_for_speedup(1.0, num_draft_tokens=k, verify_cost=verify_cost, draft_cost=draft_cost)
    return float("nan") if found is None else found.conditional_acceptance_rate


def _map(axes: Axes, x: np.ndarray, y: np.ndarray, values: list[list[float]], title: str) -> None:
    drawn = axes.pcolormesh(x, y, np.array(values), shading="nearest", cmap="viridis")
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes)
    axes.set(xlabel="K", title=title)
