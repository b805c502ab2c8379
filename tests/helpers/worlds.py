"""Targets and drafters as tables, whose distributions are known in closed form."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tables

from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.topology import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """A target and a drafter as tables."""

    order: int  #: Tokens of context.
    follows: np.ndarray  #: ``[V^order]``, index of the distribution that follows each context.
    target_logits: np.ndarray  #: ``[L V]``, logits of the target.
    drafter_logits: np.ndarray  #: ``[L V]``, of the drafter.

    @property
    def target(self) -> LoadedTarget:
        return tables.target(self.target_logits[self.follows], self.order)

    def drafter(self, topology: Topology, **options: Any) -> LoadedDrafter:
        return tables.drafter(self.drafter_logits[self.follows], self.order, topology, **options)


def wide(size: int = 80, count: int = 5) -> World:
    """Ids of two digits; all digits of the last two tokens choose one of a few distributions."""
    rng = np.random.default_rng(1)
    first, second = np.divmod(np.arange(size**2), size)
    # Either first digit is usual.
    usual = np.where(np.arange(size) < 64, 0.0, 1.0)
    target_logits = rng.normal(size=(count, size)) * 0.6 + usual
    drafter_logits = target_logits + rng.normal(size=target_logits.shape) * 0.8
    follows = (first % 64 + 2 * (first // 64) + 3 * (second % 64) + second // 64) % count
    return World(2, follows, target_logits.astype(np.float32), drafter_logits.astype(np.float32))


WIDE = wide()
