"""Cost of tokens."""

from __future__ import annotations

import math
from typing import NamedTuple

# Below, quotients are no longer finite.
_LEAST = 1e-12


def cost_per_million_tokens(tokens_per_second: float, price_per_hour: float) -> float:
    """``price/3600 / tokens_per_second · 10^6``: the price of a second over the tokens of a second.

    Args:
        tokens_per_second: Speed of the whole machine.
        price_per_hour: Price of the whole machine, in any currency.

    Raises:
        ValueError: The speed is not positive, or the price is negative.
    """
    if not _LEAST <= tokens_per_second < math.inf:
        raise ValueError(f"tokens_per_second is {tokens_per_second:g}; expected a positive number")
    if not 0 <= price_per_hour < math.inf:
        raise ValueError(f"price_per_hour is {price_per_hour:g}; expected 0 or more")
    return price_per_hour / 3600 / tokens_per_second * 1e6


class Cost(NamedTuple):
    """Cost of decoding at one speed; idle time is paid by the tokens of busy hours."""

    tokens_per_second: float  #: Speed of the whole machine while it works.
    per_million_tokens: float  #: Price of a million tokens.
    tokens_per_unit: float  #: Tokens for one unit of the currency.


def cost_of(tokens_per_second: float, *, price_per_hour: float, busy: float = 1.0) -> Cost:
    """Returns the cost per million tokens and the tokens per currency unit.

    Args:
        tokens_per_second: Speed of the whole machine while it works.
        price_per_hour: Price of the whole machine.
        busy: Share of the paid hours in which it works.

    Raises:
        ValueError: A number is out of its range.
    """
    if not 1e-9 <= busy <= 1:
        raise ValueError(f"busy is {busy:g}; expected more than 0 and at most 1")
    per_million = cost_per_million_tokens(tokens_per_second * busy, price_per_hour)
    if price_per_hour < _LEAST:
        raise ValueError(
            f"price_per_hour is {price_per_hour:g}; tokens that cost nothing have no number per"
            " dollar"
        )
    return Cost(tokens_per_second, per_million, tokens_per_second * busy * 3600 / price_per_hour)
