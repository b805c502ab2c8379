"""Plots of two distributions over the vocabulary: common mass and residual."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from pictures.style import DRAFTER, RESIDUAL, TARGET

_LONGEST = 14  # characters of a token's label
_WIDTH = 0.4


def distributions(
    p: Float[np.ndarray, " V"],
    q: Float[np.ndarray, " V"],
    *,
    labels: Sequence[str],
    top: int,
    title: str,
) -> Figure:
    """Draws ``p`` next to ``q`` for the most likely tokens; all others are the last group.

    The filled part of a bar of ``p`` is ``min(p, q)``: its sum is the probability that a token
    sampled from ``q`` is accepted. The rest of ``p``, ``max(p - q, 0)``, is hatched: the residual.

    Args:
        p: The target's distribution.
        q: The drafter's.
        labels: Text of every token.
        top: Number of tokens with bars of their own.
        title: Title of the figure.
    """
    p = np.asarray(p, float)
    q = np.asarray(q, float)
    likely = np.argsort(-np.maximum(p, q), kind="stable")[:top]  # under either distribution
    likely = likely[np.lexsort((likely, -q[likely], -p[likely]))]
    others = np.setdiff1d(np.arange(p.size), likely)

    groups = [[token] for token in likely] + ([others] if others.size else [])
    names = [visible(labels[int(token)]) for token in likely]
    names += [f"{others.size} others"] if others.size else []

    def total(mass: np.ndarray) -> np.ndarray:
        return np.array([mass[group].sum() for group in groups])

    common = total(np.minimum(p, q))
    excess = total(np.maximum(p - q, 0.0))

    figure, ax = plt.subplots(figsize=(max(5.0, 1.6 + 0.55 * len(names)), 3.4))

    groups_x = np.arange(len(names), dtype=float)
    target_x = groups_x - _WIDTH / 2
    right = groups_x + _WIDTH / 2
    ax.bar(
        target_x, common, _WIDTH, color=TARGET, label=rf"$\min(p, q)$, sums to {common.sum():.3f}"
    )
    look = {"color": RESIDUAL + "33", "edgecolor": RESIDUAL, "hatch": "////", "linewidth": 0}
    ax.bar(
        target_x,
        excess,
        _WIDTH,
        bottom=common,
        label=rf"$\max(p - q, 0)$, sums to {excess.sum():.3f}",
        **look,
    )
    ax.bar(
        target_x,
        total(p),
        _WIDTH,
        fill=False,
        edgecolor=TARGET,
        linewidth=1.2,
        label="$p$, the target",
    )
    ax.bar(
        right, total(q), _WIDTH, color=DRAFTER + "80", edgecolor=DRAFTER, label="$q$, the drafter"
    )

    turned = {"rotation": 40, "ha": "right"} if max(map(len, names)) > 4 else {}
    ax.set_xticks(groups_x, names, family="monospace", **turned)
    ax.tick_params(axis="x", length=0)
    ax.grid(False, axis="x")
    ax.set_ylabel("probability")
    ax.set_title(title)
    ax.legend(fontsize="small")
    return figure


def visible(piece: str) -> str:
    """Makes the label of a token, with visible blanks and line ends and without formulas."""
    text = piece.encode("unicode_escape").decode().replace(" ", "␣")
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return text.replace("$", r"\$")
