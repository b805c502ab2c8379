"""The tie rule and its statistics, against values worked out by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from validation.margin import (
    Agreement,
    Control,
    bfloat16_ulp,
    classify,
    tie_tolerance,
    wrong_tolerance,
)


def test_the_unit_is_the_step_of_the_grid() -> None:
    """Every positive finite bfloat16 and its neighbour.

    Negative numbers, and numbers between those of the grid, have the same steps.
    """
    grid = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    assert np.array_equal(bfloat16_ulp(grid[:-1]), np.diff(grid))
    assert bfloat16_ulp([np.nextafter(np.float32(2), np.float32(0)), 15.99, -16.0]).tolist() == [
        2**-7,
        0.0625,
        0.125,
    ]


def test_the_tolerance_follows_the_highest_logit_and_the_type() -> None:
    assert tie_tolerance([10.0, 20.0, 40.0], "bfloat16").tolist() == [0.125, 0.25, 0.5]
    assert wrong_tolerance([10.0, 20.0], "bfloat16").tolist() == [0.5, 1.0]
    assert tie_tolerance([10.0, 20.0], "mixed").tolist() == [0.125, 0.25]
    assert tie_tolerance([10.0, 20.0], "float32").tolist() == [1e-3, 1e-3]


@pytest.mark.parametrize(
    ("gap", "rank", "verdict"),
    [
        (0.0, 1, Agreement.AGREE),
        (0.0, 2, Agreement.AGREE),  # of several equal logits any is the argmax
        (0.25, 2, Agreement.TIE),  # two units at 20, exactly
        (np.nextafter(0.25, 1), 2, Agreement.DISAGREE),
        (0.01, 3, Agreement.DISAGREE),  # near, but third
    ],
)
def test_a_token_is_classified(gap: float, rank: int, verdict: Agreement) -> None:
    assert classify([gap], [rank], tie_tolerance([20.0], "bfloat16")).tolist() == [verdict]


@pytest.mark.parametrize("flips", [0, 10])
def test_a_control_allows_for_the_flips_that_it_could_have_missed_once_in_a_million_runs(
    flips: int,
) -> None:
    control = Control(flips=flips, tokens=1000)
    rate = control.bound
    seen = math.fsum(
        math.comb(1000, k) * rate**k * (1 - rate) ** (1000 - k) for k in range(flips + 1)
    )
    assert math.isclose(seen, 0.01)
    mean = 2 * 500 * rate
    allowed = control.allowed(500, times=2)

    def exceeds(count: int) -> float:
        """Probability that a Poisson variable exceeds a count."""
        return math.fsum(
            math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1, 120)
        )

    assert exceeds(allowed) <= 1e-6 < exceeds(allowed - 1)
