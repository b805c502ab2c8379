"""Bounds of what a description may say."""

from __future__ import annotations

from typing import Any

# Sizes and positions are 32-bit on the device, and sums of a few of them must stay so.
MOST = 1_000_000_000
# A config.json that says more would fill the memory before anything can contradict it.
MOST_LAYERS = 10_000


def within(config: Any, name: str, least: int | float, most: int | float) -> None:
    """Refuse a number outside its range, NaN included; ``None`` is none."""
    value = getattr(config, name)
    if value is not None and not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}; expected a number from {least:g} to {most:g}")


def positive(config: Any, *names: str) -> None:
    """Refuse sizes that are none; ``None`` is none."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; expected a positive whole number")
        within(config, name, 1, MOST)
