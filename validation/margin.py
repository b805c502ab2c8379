"""When two argmaxes may differ: near ties, and how many of them noise explains.

A bfloat16 model that runs in blocks of another size sums in another order, so an argmax may flip
where two logits are approximately tied. The rule: at every position the token is the reference's
argmax, or it is one of its two likeliest and its logit is at most two bfloat16 units below.
Anything else is a disagreement. The allowed numbers of ties and disagreements follow from a control
in which nothing is drafted, because plain decoding in bfloat16 has some of both.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from eagle3_jax.measure.frequencies import POWER

TIE_ULPS = 2.0
WRONG_ULPS = 8.0  # noise has not been seen beyond 2.5
FLOAT32_TOLERANCE = 1e-3  # of logits: float32 sums in another order differ by about 1e-5


class Agreement(enum.IntEnum):
    """The reference's verdict on a token."""

    AGREE = 0
    TIE = 1
    DISAGREE = 2


def bfloat16_ulp(values: ArrayLike) -> np.ndarray:
    """Unit in the last place: the step of the bfloat16 grid at each value.

    It is ``2^(e-7)`` in ``[2^e, 2^(e+1))``.

    It follows from the exponent of the float32 value, so that no logarithm rounds at a power of
    two. Below the smallest normal number the grid is even, with steps of ``2^-133``.

    Raises:
        ValueError: A value is not finite; it has no unit.
    """
    values = np.asarray(values, np.float32)
    if not np.isfinite(values).all():
        raise ValueError("a logit is not finite, so it has no unit in the last place")
    _, exponent = np.frexp(np.maximum(np.abs(values), np.finfo(np.float32).smallest_normal))
    return np.ldexp(1.0, exponent - 8)


def tie_tolerance(best_value: ArrayLike, dtype: str) -> np.ndarray:
    """Largest gap of a tie: 1e-3 in float32, else two units of the highest logit."""
    if dtype == "float32":
        return np.full(np.shape(best_value), FLOAT32_TOLERANCE)
    return TIE_ULPS * bfloat16_ulp(best_value)


def wrong_tolerance(best_value: ArrayLike, dtype: str) -> np.ndarray:
    """Gap beyond which a token is wrong, independently of any control: four times that of a tie."""
    return tie_tolerance(best_value, dtype) * WRONG_ULPS / TIE_ULPS


def classify(gap: ArrayLike, rank: ArrayLike, tolerance: ArrayLike) -> np.ndarray:
    """:class:`Agreement` at every position.

    Args:
        gap: Highest logit minus that of the token, at least 0.
        rank: One more than the number of tokens with a higher logit; equal logits do not count.
        tolerance: Largest gap of a tie; see :func:`tie_tolerance`.

    Raises:
        ValueError: A gap is negative or not a number: it was not measured against the highest
            logit.
    """
    gap = np.asarray(gap, float)
    rank = np.asarray(rank)
    if not (gap >= 0).all():
        raise ValueError(
            f"the smallest gap is {gap.min()}; a gap is measured from the highest logit, so it is"
            " never below 0"
        )
    tie = (rank <= 2) & (gap <= np.asarray(tolerance, float))
    return np.where(gap == 0, Agreement.AGREE, np.where(tie, Agreement.TIE, Agreement.DISAGREE))


@dataclasses.dataclass(frozen=True)
class Control:
    """How often the argmax flips between two block sizes without a draft (an A/A study)."""

    flips: int  #: Positions at which it did.
    tokens: int  #: Positions looked at.

    @property
    def bound(self) -> float:
        """Upper bound of the flip rate, at 99 %."""
        return float(stats.binomtest(self.flips, self.tokens).proportion_ci(0.98).high)

    def allowed(self, tokens: int, *, times: float = 1.0) -> int:
        """Most flips in ``tokens`` positions that ``times`` this noise explains.

        One run in a million has more.
        """
        return int(stats.poisson.isf(1e-6, times * tokens * self.bound))

    def sees(self, tokens: int, *, times: float = 1.0) -> float:
        """The smallest rate of flips that exceeds :meth:`allowed` with 90 % power."""
        return float(stats.gamma.ppf(POWER, self.allowed(tokens, times=times) + 1)) / tokens
