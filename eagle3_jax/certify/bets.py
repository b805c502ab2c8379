"""Bets against a sampler, whose gains bound p-values, and the smallest error that they win against.

A bet names another distribution for each token before it is seen. The product of the ratios of the
two probabilities is the gain. Under a correct sampler its expectation is at most 1: it is an
e-process (Ramdas et al., 2023), and testing with it is testing by betting (Shafer, 2021). So the
gain exceeds ``1 / p`` with probability at most ``p``, however few tokens there are (Ville, 1939). A
mean of the gains of several bets has the same expectation, so a mixture of bets is a bet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy import special, stats

from eagle3_jax.measure.frequencies import POWER

#: Concentrations of the Dirichlet distributions that frequencies behind a text are bet to have.
CONCENTRATIONS = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
#: Factors of the probability that a draft is accepted; infinity accepts every draft.
WILLINGNESS = (0.7, 0.9, 0.95, 1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2.0, math.inf)
#: Shares of the redraws that come from the target's distribution in place of the residual.
UNREDUCED = (0.1, 0.3, 1.0)
# share of the positions that are bet to hold a draft; the token behind the last draft is free
VERIFIED = 0.8
# probabilities that the draft is the likeliest token; else it is any other, by its probability
LIKELIEST = (1.0, 0.65)


@dataclasses.dataclass(frozen=True)
class Bet:
    """A bet that was settled: the logarithm of its gain, and what was seen."""

    log_gain: float
    detail: str

    @property
    def p_value(self) -> float:
        """The bound of the p-value: one over the gain (Ville's inequality)."""
        return min(1.0, math.exp(min(0.0, -self.log_gain)))


@dataclasses.dataclass(frozen=True)
class Error:
    """A wrong acceptance of a draft that the drafter chose without drawing.

    Attributes:
        willing: Factor of the probability of acceptance.
        unreduced: Share of the redraws that come from the target's distribution.
    """

    willing: float = 1.0
    unreduced: float = 0.0

    def mass(self, p: np.ndarray) -> np.ndarray:
        """Returns the probability of the draft's token where the target's is ``p``."""
        # Leviathan's rule accepts the draft with min(1, p / q), where q is 1 for a sure draft.
        # A token without mass is not accepted; infinity times 0 is not a number.
        with np.errstate(invalid="ignore"):
            accepted = np.where(p > 0, np.minimum(1.0, self.willing * p), 0.0)
        # The residual has none of the draft's mass; a redraw that ignores it has all.
        return accepted + (1 - accepted) * self.unreduced * p

    def ratios(self, p: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the factors of the probabilities of the draft's token and of all others.

        A part of the positions has no draft.
        """
        mass = self.mass(p)
        drafted = np.where(p > 0, mass / np.maximum(p, 1e-300), 1.0)
        others = np.where(p < 1, (1 - mass) / np.maximum(1 - p, 1e-300), 1.0)

        free = 1 - VERIFIED
        return free + VERIFIED * drafted, free + VERIFIED * others

    def __str__(self) -> str:
        if self.unreduced:
            return f"redraws of which {100 * self.unreduced:.0f} % ignore the residual"
        if math.isinf(self.willing):
            return "acceptance of every draft"

        size = 100 * abs(self.willing - 1)
        return f"an acceptance {size:.0f} % too {'willing' if self.willing > 1 else 'reluctant'}"


ERRORS = (
    *(Error(willing=factor) for factor in WILLINGNESS),
    *(Error(unreduced=share) for share in UNREDUCED),
)


def bet_on_one_token(probs: np.ndarray, cells: np.ndarray, texts: np.ndarray) -> Bet:
    """Bets that one token of each text's distribution, the draft, comes too often or too seldom.

    A drafter that does not draw has the same draft behind the same text, so what a text's first
    tokens show of it makes the bets on the later ones.

    Args:
        probs: ``[n C]`` the distributions; the last cell holds all tokens that were not reported,
            and no draft.
        cells: ``[n]`` the cell of each token.
        texts: ``[n]`` the number of the text before it; -1 for a text that comes once.
    """
    # Tokens behind the same text become neighbours; a text that comes once is a group of its own.
    order = np.argsort(texts, kind="stable")
    sorted_texts = texts[order]
    is_start = np.append(True, (np.diff(sorted_texts) != 0) | (sorted_texts[1:] < 0))
    starts = np.flatnonzero(is_start)

    p = probs[order, :-1]
    is_token = np.arange(p.shape[1]) == cells[order, None]

    # The draft of a text is unknown, but the same each time. So the bet on a text is the mixture
    # over its possible drafts, each with a prior that sees the distribution alone.
    priors = [_prior(p[starts], likeliest) for likeliest in LIKELIEST]
    gains = []
    for error in ERRORS:
        drafted, others = error.ratios(p)
        log_ratio = np.log(np.where(is_token, drafted, others))
        of_texts = np.add.reduceat(log_ratio, starts, axis=0)
        gains += [float(np.logaddexp.reduce(of_texts + prior, axis=1).sum()) for prior in priors]

    log_gain = mixture(gains)
    best = ERRORS[int(np.argmax(gains)) // len(LIKELIEST)]
    likelier = in_words(log_gain)
    detail = "no error of acceptance makes the tokens likelier"
    return Bet(log_gain, f"with {best} the tokens are {likelier}" if likelier else detail)


def in_words(log_gain: float) -> str:
    """Returns by how much a bet's distribution makes the tokens likelier; empty if it does not."""
    exponent = log_gain / math.log(10)
    if exponent >= 4:
        return f"10^{exponent:.0f} times as likely"
    factor = f"{10**exponent:.1f}"
    return f"{factor} times as likely" if float(factor) > 1 else ""


def mixture(log_gains: Sequence[float]) -> float:
    """Returns the logarithm of the gain of a stake that is split equally over bets."""
    return float(np.logaddexp.reduce(log_gains)) - math.log(len(log_gains))


def _prior(p: np.ndarray, likeliest: float) -> np.ndarray:
    """Returns the logarithm of the probability of each token ``[n L]`` to be the draft."""
    behind = p[:, 1:] / np.maximum(p[:, 1:].sum(axis=1, keepdims=True), 1e-300)
    with np.errstate(divide="ignore"):
        return np.log(np.column_stack([np.full(len(p), likeliest), (1 - likeliest) * behind]))


def bet_on_frequencies(counts: np.ndarray, probs: np.ndarray) -> Bet:
    """Bets that frequencies behind a text are a Dirichlet sample around its distribution.

    Args:
        counts: ``[texts C]`` how often each token came.
        probs: ``[texts C]`` the distributions.
    """
    gains = [dirichlet_gain(counts, probs, scale).sum() for scale in CONCENTRATIONS]
    log_gain = mixture(gains)
    likelier = in_words(log_gain)
    detail = "no other distribution makes their counts likelier"
    return Bet(
        log_gain, f"with other distributions their counts are {likelier}" if likelier else detail
    )


def dirichlet_gain(counts: np.ndarray, probs: np.ndarray, scale: float) -> np.ndarray:
    """Returns the logarithm of the gain of a Dirichlet mixture, for each text.

    The gain is the mixture's likelihood of the counts over that of the distribution. Arguments as
    in :func:`bet_on_frequencies`; a token of probability 0 is another test's.
    """
    counts = np.where(probs > 0, counts, 0)
    alphas = np.where(probs > 0, scale * probs, 1.0)

    # Γ(α) / Γ(α + n) · Π Γ(α pₓ + nₓ) / Γ(α pₓ): the Dirichlet-multinomial distribution of the
    # counts, without the number of their orders, which divides out.
    total = counts.sum(axis=-1)
    likelihood = special.gammaln(scale) - special.gammaln(scale + total)
    cells = special.gammaln(counts + alphas) - special.gammaln(alphas)
    likelihood = likelihood + cells.sum(axis=-1)
    return likelihood - special.xlogy(counts, np.where(probs > 0, probs, 1.0)).sum(axis=-1)


def smallest_error(
    probs: np.ndarray, errors: Sequence[Error], *, level: float, share: float = VERIFIED
) -> Error | None:
    """Returns the first error of a list that is found with 90 % power.

    Drafts are taken to be the likeliest tokens.

    Args:
        probs: ``[n C]`` the distributions of the tokens that drafts reach.
        errors: From the smallest on.
        level: Significance of the test.
        share: Share of the tokens that a draft is verified for.
    """
    # The bet on the error itself must gain 1 / level in spite of its small share of the stake.
    needed = -math.log(level) + math.log(len(ERRORS) * len(LIKELIEST))
    p = probs[:, 0]
    for error in errors:
        drafted, others = error.ratios(p)
        mass = p + share * (error.mass(p) - p)
        log_drafted = np.log(drafted)
        log_others = np.log(others)

        # The logarithm of the gain is a sum over tokens, and nearly normal.
        mean = mass * log_drafted + (1 - mass) * log_others
        square = mass * log_drafted**2 + (1 - mass) * log_others**2
        spread = math.sqrt(float((square - mean**2).sum()))
        if float(mean.sum()) - stats.norm.isf(1 - POWER) * spread >= needed:
            return error
    return None


def smallest_distance(
    counts: np.ndarray,
    probs: np.ndarray,
    distances: Sequence[float],
    *,
    level: float,
    share: float = VERIFIED,
    runs: int = 20,
    seed: int = 0,
) -> float | None:
    """Returns the first distance of draft and target at which accepting every draft is found.

    Drafts are sampled from the distributions ``p exp(σ z)``, normalized, with ``z`` normal and
    ``σ`` of that total variation distance on average.

    Args:
        counts: ``[texts C]`` how often each token came.
        probs: ``[texts C]`` the distributions of texts that came more than once.
        distances: From the smallest on.
        level: Significance of the test.
        share: Share of the tokens that a draft is verified for.
        runs: Runs of a simulation, of which 90 % must find it.
        seed: Seed of the simulation.
    """
    if not len(counts):
        return None

    rng = np.random.default_rng(seed)
    sizes = counts.sum(axis=1).astype(int)
    weights = sizes / sizes.sum()
    directions = rng.standard_normal(probs.shape)

    for distance in distances:
        drafts = _tilted(probs, directions, weights, distance)
        if drafts is None:
            continue

        # Where every draft is accepted, tokens come from the draft's distribution.
        mixed = share * drafts + (1 - share) * probs
        num_found = sum(
            bet_on_frequencies(rng.multinomial(sizes, mixed), probs).p_value < level
            for _ in range(runs)
        )
        if num_found >= POWER * runs:
            return distance
    return None


def _tilted(
    probs: np.ndarray, directions: np.ndarray, weights: np.ndarray, distance: float
) -> np.ndarray | None:
    """Returns distributions at a mean distance from others.

    ``None`` if those are so sure that no distribution is so far from them.
    """
    low = 0.0
    high = 20.0
    tilted = probs

    # The distance grows with the scale of the tilt, which bisection finds.
    for _ in range(40):
        scale = (low + high) / 2
        logits = np.where(
            probs > 0, np.log(np.maximum(probs, 1e-300)) + scale * directions, -math.inf
        )
        tilted = special.softmax(logits, axis=1)
        reached = float(weights @ (np.abs(tilted - probs).sum(axis=1) / 2))
        low = scale if reached < distance else low
        high = high if reached < distance else scale
    return tilted if high < 20.0 else None
