"""EAGLE-3: a one-layer head that drafts from fused target features (Li et al., 2025, arXiv 2503.01840).

The head reads, at each position ``t``, the target's features ``f_t`` of three layers and the *next* token
``x_{t+1}``, and predicts ``x_{t+2}``. Further draft tokens feed the head's own output back in place of the features.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from flax import nnx

from eagle3_jax.drafters._feedback import FeedbackDrafter
from eagle3_jax.models.config import Eagle3Config
from eagle3_jax.models.eagle3 import Eagle3Head


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter(FeedbackDrafter):
    """Drafts a chain or a tree with an EAGLE-3 head.

    Parameters are a dictionary: ``head`` (the network), ``embedding [V D]`` (mostly the target's own array) and
    ``draft_to_target [W]`` (absolute ids).
    """

    network: ClassVar[type[nnx.Module]] = Eagle3Head

    config: Eagle3Config
