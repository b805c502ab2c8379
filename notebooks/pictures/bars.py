"""Plots of two distributions over the vocabulary: common mass and residual."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from pictures.style import DRAFTER, RESIDUAL, TARGET

_LONGEST = 14  # characters of a token's label
_WIDTH = 0.4


class Columns(NamedTuple):
    """Groups of bars of :func:`laws`; the last group can be all other tokens.

    Attributes:
        labels: Labels below the bars.
        p: Mass under the target.
        q: Mass under the drafter.
        common: ``Σ min(p, q)`` over the tokens of the group.
        rest: ``Σ max(p - q, 0)`` over the tokens of the group.
    """

    labels: list[str]
    p: Float[np.ndarray, " n"]
    q: Float[np.ndarray, " n"]
    common: Float[np.ndarray, " n"]
    rest: Float[np.ndarray, " n"]


def laws(
    p: Float[np.ndarray, " V"],
    q: Float[np.ndarray, " V"],
    *,
    labels: Sequence[str] | None = None,
    residual: bool = False,
    top: int = 12,
    title: str = "",
) -> Figure:
    """Draws ``p`` next to ``q`` for the most likely tokens; all others are the last group.

    The filled part of a bar of ``p`` is ``min(p, q)``: its sum is the probability that a token sampled from ``q`` is
    accepted. The rest of ``p`` is empty, or hatched as the residual.

    Args:
        p: The target's distribution.
        q: The drafter's.
        labels: Text of every token; default: its id.
        residual: Whether to hatch ``max(p - q, 0)``.
        top: Number of tokens with bars of their own.
        title: Title of the figure.
    """
    shown = columns(p, q, labels=labels, top=top)
    figure, ax = plt.subplots(figsize=(max(5.0, 1.6 + 0.55 * len(shown.labels)), 3.4))
    place = np.arange(len(shown.labels), dtype=float)
    left, right = place - _WIDTH / 2, place + _WIDTH / 2
    ax.bar(left, shown.common, _WIDTH, color=TARGET, label=rf"$\min(p, q)$, sums to {shown.common.sum():.3f}")
    if residual:
        look = {"color": RESIDUAL + "33", "edgecolor": RESIDUAL, "hatch": "////", "linewidth": 0}
        label = rf"$\max(p - q, 0)$, sums to {shown.rest.sum():.3f}"
        ax.bar(left, shown.rest, _WIDTH, bottom=shown.common, label=label, **look)
    ax.bar(left, shown.p, _WIDTH, fill=False, edgecolor=TARGET, linewidth=1.2, label="$p$, the target")
    ax.bar(right, shown.q, _WIDTH, color=DRAFTER + "80", edgecolor=DRAFTER, label="$q$, the drafter")
    long = max(map(len, shown.labels)) > 4
    turned = {"rotation": 40, "ha": "right"} if long else {}
    ax.set_xticks(place, shown.labels, family="monospace", **turned)
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")
    ax.set_ylabel("probability")
    ax.set_title(title)
    ax.legend(fontsize="small")
    return figure


def _likely(p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"], top: int) -> Int[np.ndarray, " n"]:
    """Selects the tokens with the most mass under either distribution, sorted by ``p``, then by ``q``."""
    likely = np.argsort(-np.maximum(p, q), kind="stable")[:top]
    return likely[np.lexsort((likely, -q[likely], -p[likely]))]


def columns(
    p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"], *, labels: Sequence[str] | None = None, top: int = 12
) -> Columns:
    """Makes the groups of :func:`laws`: the tokens with the most mass under either distribution, then all others.

    Raises:
        ValueError: The distributions, or the labels, are of different sizes.
    """
    p, q = np.asarray(p, float), np.asarray(q, float)
    if p.ndim != 1 or q.shape != p.shape or (labels is not None and len(labels) != p.size):
        named = "" if labels is None else f" and {len(labels)} labels"
        raise ValueError(f"p has shape {p.shape}, q {q.shape}{named}; expected one entry per token in each")
    likely = _likely(p, q, top)
    others = np.setdiff1d(np.arange(p.size), likely)
    groups = [[token] for token in likely] + ([others] if others.size else [])
    names = [str(token) if labels is None else visible(labels[int(token)]) for token in likely]
    together = lambda values: np.array([values[group].sum() for group in groups])
    return Columns(
        labels=names + ([f"{others.size} others"] if others.size else []),
        p=together(p),
        q=together(q),
        common=together(np.minimum(p, q)),
        rest=together(np.maximum(p - q, 0.0)),
    )


def visible(piece: str) -> str:
    """Makes the label of a token, with visible blanks and line ends and without formulas."""
    text = piece.encode("unicode_escape").decode().replace(" ", "␣")
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return text.replace("$", r"\$")
