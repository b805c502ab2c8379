"""The tie rule and its statistics, against values worked out by hand."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("scipy")

from validation.margin import (
    Agreement,
    Control,
    bfloat16_ulp,
    classify,
    clopper_pearson,
    poisson_quantile,
    rate_bound,
    tie_tolerance,
    wrong_tolerance,
)


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        (1.0, 2**-7),
        (np.nextafter(np.float32(2), np.float32(0)), 2**-7),
        (2.0, 2**-6),
        (8.0, 0.0625),
        (15.99, 0.0625),
        (16.0, 0.125),
        (31.9, 0.125),
        (32.0, 0.25),
        (-16.0, 0.125),
        (0.0, 2.0**-133),
        (2.0**-127, 2.0**-133),
        (2.0**-126, 2.0**-133),
        (2.0**-125, 2.0**-132),
    ],
)
def test_the_unit_of(value: float, unit: float) -> None:
    assert bfloat16_ulp(value) == unit


def test_the_unit_is_the_step_of_the_grid() -> None:
    """Every positive finite bfloat16 and its neighbour."""
    grid = np.arange(0x7F80, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
    assert np.array_equal(bfloat16_ulp(grid[:-1]), np.diff(grid))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_unit(value: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        bfloat16_ulp([1.0, value])


def test_the_tolerance_follows_the_highest_logit_and_the_type() -> None:
    assert tie_tolerance([10.0, 20.0, 40.0], "bfloat16").tolist() == [0.125, 0.25, 0.5]
    assert wrong_tolerance([10.0, 20.0], "bfloat16").tolist() == [0.5, 1.0]
    assert tie_tolerance([10.0, 20.0], "mixed").tolist() == [0.125, 0.25]
    assert tie_tolerance([10.0, 20.0], "float32").tolist() == [1e-3, 1e-3]


@pytest.mark.parametrize(
    ("gap", "rank", "found"),
    [
        (0.0, 1, Agreement.AGREE),
        (0.0, 2, Agreement.AGREE),  # of several equal logits any is the argmax
        (0.25, 2, Agreement.TIE),  # two units at 20, exactly
        (np.nextafter(0.25, 1), 2, Agreement.DISAGREE),
        (0.01, 3, Agreement.DISAGREE),  # near, but third
    ],
)
def test_a_token_is_classified(gap: float, rank: int, found: Agreement) -> None:
    assert classify([gap], [rank], tie_tolerance([20.0], "bfloat16")).tolist() == [found]


@pytest.mark.parametrize("gap", [-0.1, math.nan])
def test_a_gap_that_is_none_is_refused(gap: float) -> None:
    with pytest.raises(ValueError, match="never below 0"):
        classify([gap], [1], [0.25])


def test_intervals_of_proportions() -> None:
    # Nothing seen: (1 - p)^n = tail. Everything seen: p^n = tail.
    low, high = clopper_pearson(0, 50, confidence=0.99)
    assert low == 0 and math.isclose(high, 1 - 0.005 ** (1 / 50))
    low, high = clopper_pearson(50, 50, confidence=0.99)
    assert high == 1 and math.isclose(low, 0.005 ** (1 / 50))
    # One of two: P(X >= 1) = 1 - (1-p)^2 = tail below, P(X <= 1) = 1 - p^2 = tail above.
    low, high = clopper_pearson(1, 2, confidence=0.9)
    assert math.isclose(low, 1 - math.sqrt(0.95)) and math.isclose(high, math.sqrt(0.95))
    assert math.isclose(rate_bound(0, 1000, confidence=0.95), 1 - 0.05 ** (1 / 1000))
    for counts in ((3, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match="trials"):
            clopper_pearson(*counts)


def test_the_quantile_is_the_smallest_count_that_is_rarely_exceeded() -> None:
    def exceeds(count: int, mean: float) -> float:
        return sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1, count + 100))

    for mean in (0.01, 1.0, 4.6, 20.0):
        found = poisson_quantile(mean)
        assert exceeds(found, mean) <= 1e-6 < exceeds(found - 1, mean)


def test_a_control_without_flips_still_allows_for_what_it_could_have_missed() -> None:
    control = Control(flips=0, tokens=1000)
    assert math.isclose(control.bound, 1 - 0.01 ** (1 / 1000))
    assert control.allowed(1000) == poisson_quantile(1000 * control.bound) < 20
    assert Control(flips=10, tokens=1000).allowed(1000) > control.allowed(1000)
