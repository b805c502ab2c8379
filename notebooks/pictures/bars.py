"""Two laws over the vocabulary side by side: what both have in common, and what only the target wants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pictures.style import ACCEPTED, COLOURS, DRAFTER, REJECTED, RESIDUAL, TARGET

_LONGEST = 14  # characters of a token's text below its bar
_WIDTH = 0.4
_GOLDEN = 0.6180339887498949  # its multiples modulo 1 are spread evenly, whatever their number


class Columns(NamedTuple):
    """What :func:`laws` draws, one entry per group of bars; the last may be all other tokens together.

    Attributes:
        labels: Below the bars.
        p: Mass under the target.
        q: Mass under the drafter; zeros where there is none.
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
    q: Float[np.ndarray, " V"] | None = None,
    *,
    labels: Sequence[str] | None = None,
    residual: bool = False,
    top: int = 12,
    ax: Axes | None = None,
    title: str = "",
) -> Figure:
    """Draw ``p``, and beside it ``q``, for the likeliest tokens; all others together are the last group.

    The part of a bar of ``p`` that ``q`` has too is filled: over all tokens it is the probability that a token drawn
    from ``q`` is accepted. What is left of ``p`` is empty, or hatched as the residual.

    Args:
        p: The target's distribution.
        q: The drafter's; left out, ``p`` stands alone.
        labels: Text of every token; its id where left out.
        residual: Whether to hatch ``max(p - q, 0)``.
        top: How many tokens have bars of their own.
        ax: Where to draw; a new figure when left out.
        title: Above the bars.
    """
    shown = columns(p, q, labels=labels, top=top)
    if ax is None:
        _, ax = plt.subplots(figsize=(max(5.0, 1.6 + 0.55 * len(shown.labels)), 3.4))
    place = np.arange(len(shown.labels), dtype=float)
    if q is None:
        ax.bar(place, shown.p, 2 * _WIDTH, color=TARGET, label="$p$, the target")
    else:
        common, rest = float(shown.common.sum()), float(shown.rest.sum())
        left, right = place - _WIDTH / 2, place + _WIDTH / 2
        ax.bar(left, shown.common, _WIDTH, color=TARGET, label=rf"$\min(p, q)$, sums to {common:.3f}")
        if residual:
            ax.bar(
                left,
                shown.rest,
                _WIDTH,
                bottom=shown.common,
                color=RESIDUAL + "33",
                edgecolor=RESIDUAL,
                hatch="////",
                linewidth=0,
                label=rf"$\max(p - q, 0)$, sums to {rest:.3f}",
            )
        ax.bar(left, shown.p, _WIDTH, fill=False, edgecolor=TARGET, linewidth=1.2, label="$p$, the target")
        ax.bar(right, shown.q, _WIDTH, color=DRAFTER + "80", edgecolor=DRAFTER, label="$q$, the drafter")
    return _finished(ax, shown.labels, title)


def darts(
    p: Float[np.ndarray, " V"],
    q: Float[np.ndarray, " V"],
    tokens: Int[np.ndarray, " n"],
    heights: Float[np.ndarray, " n"],
    *,
    labels: Sequence[str] | None = None,
    top: int = 8,
    ax: Axes | None = None,
    title: str = "",
) -> Figure:
    """Draw the coin of the acceptance rule: points spread evenly below ``q``, accepted where they are below ``p`` too.

    Args:
        p: The target's distribution.
        q: The drafter's.
        tokens: Drawn from ``q``.
        heights: ``u · q(token)`` of each, with ``u`` uniform.
        labels: Text of every token; its id where left out.
        top: How many tokens are shown; darts at others are left out.
        ax: Where to draw; a new figure when left out.
        title: Above the picture.
    """
    likely = _likely(np.asarray(p, float), np.asarray(q, float), top)
    if ax is None:
        _, ax = plt.subplots(figsize=(max(5.0, 1.6 + 0.75 * likely.size), 3.4))
    place = np.arange(likely.size, dtype=float)
    ax.bar(place, q[likely], 2 * _WIDTH, color=DRAFTER + "30", edgecolor=DRAFTER, label="$q$, the drafter")
    ax.bar(place, p[likely], 2 * _WIDTH, fill=False, edgecolor=TARGET, linewidth=2, label="$p$, the target")
    across = 2 * _WIDTH * (np.arange(tokens.size) * _GOLDEN % 1.0 - 0.5)
    for kind, marker, side in ((ACCEPTED, "o", heights < p[tokens]), (REJECTED, "x", heights >= p[tokens])):
        chosen = side & np.isin(tokens, likely)
        column = np.argmax(tokens[chosen][:, None] == likely, axis=1)
        ax.scatter(
            column + across[chosen], heights[chosen], 12, COLOURS[kind], marker=marker, linewidth=0.8, label=kind
        )
    return _finished(ax, _named(likely, labels), title)


def _finished(ax: Axes, names: list[str], title: str) -> Figure:
    long = max(map(len, names)) > 4
    ax.set_xticks(
        range(len(names)), names, rotation=40 if long else 0, ha="right" if long else "center", family="monospace"
    )
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")
    ax.set_ylabel("probability")
    ax.set_title(title)
    ax.legend(fontsize="small")
    figure = ax.get_figure()
    assert isinstance(figure, Figure)
    return figure


def _likely(p: Float[np.ndarray, " V"], q: Float[np.ndarray, " V"], top: int) -> Int[np.ndarray, " n"]:
    """The tokens with the most mass under either law, by ``p``, then by ``q``."""
    likely = np.argsort(-np.maximum(p, q), kind="stable")[:top]
    return likely[np.lexsort((likely, -q[likely], -p[likely]))]


def _named(tokens: Int[np.ndarray, " n"], labels: Sequence[str] | None) -> list[str]:
    return [str(token) if labels is None else visible(labels[int(token)]) for token in tokens]


def columns(
    p: Float[np.ndarray, " V"],
    q: Float[np.ndarray, " V"] | None = None,
    *,
    labels: Sequence[str] | None = None,
    top: int = 12,
) -> Columns:
    """What :func:`laws` draws: the tokens with the most mass under either law, by ``p``, then the others together.

    Raises:
        ValueError: The laws, or the labels, are of different sizes.
    """
    p = np.asarray(p, float)
    other = np.zeros_like(p) if q is None else np.asarray(q, float)
    if p.ndim != 1 or other.shape != p.shape or (labels is not None and len(labels) != p.size):
        named = "" if labels is None else f" and {len(labels)} labels"
        raise ValueError(f"p has shape {p.shape}, q {other.shape}{named}; expected one entry per token in each")
    likely = _likely(p, other, top)
    others = np.setdiff1d(np.arange(p.size), likely)
    groups = [[token] for token in likely] + ([others] if others.size else [])
    names = _named(likely, labels)
    together = lambda values: np.array([values[group].sum() for group in groups])
    return Columns(
        labels=names + ([f"{others.size} others"] if others.size else []),
        p=together(p),
        q=together(other),
        common=together(np.minimum(p, other)),
        rest=together(np.maximum(p - other, 0.0)),
    )


def visible(piece: str) -> str:
    """A token's text for a label: blanks and line ends can be seen, and nothing is read as a formula."""
    text = piece.encode("unicode_escape").decode().replace(" ", "␣")
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return text.replace("$", r"\$")
