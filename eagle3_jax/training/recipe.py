"""How heads of one method are trained, as the training loop and the command line take it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from eagle3_jax.loaded import LoadedTarget
from eagle3_jax.models.config import MOST, MOST_LAYERS, DecoderConfig
from eagle3_jax.models.decoder import DecoderTarget
from eagle3_jax.models.functional import Params
from eagle3_jax.training.batches import Frozen, TTTBatch

Loss = tuple[Float[Array, ""], dict[str, Float[Array, ""]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """What a recipe lets one choose; ``None`` leaves it to the method.

    Attributes:
        depth: Draft positions that are learned.
        num_layers: Layers of the head.
        width: Of its residual stream, where that is not the target's.
        mlp_width: Inner width of its MLPs.
        draft_vocab_size: ``W``, how many of the target's tokens it can draft.
    """

    depth: int
    num_layers: int | None = None
    width: int | None = None
    mlp_width: int | None = None
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        for name, most in {
            "num_layers": MOST_LAYERS,
            "width": MOST,
            "mlp_width": MOST,
            "draft_vocab_size": MOST,
        }.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ValueError(f"{name} is {str(value)[:40]}; expected a whole number from 1 to {most:,}")

    def refuse(self, method: str, *names: str) -> None:
        """Refuse what a method leaves no choice of.

        Raises:
            ValueError: One of the named options was given.
        """
        for name in names:
            if getattr(self, name) is not None:
                raise ValueError(f"{name} is {getattr(self, name)}, and {method} has no choice of it; leave it out")


class Recipe(NamedTuple):
    """How heads of one method are trained.

    Attributes:
        drafter: Its drafter, of a configuration and ``precision``.
        config: The head for a target.
        start: Its first parameters, from the drafter, the target, the draft vocabulary (``None`` for all) and a key.
        loss: Of the drafter, the target's model, the head's parameters, what is frozen, a batch and the options:
            differentiable in the head's parameters alone. Its metrics are those of
            :func:`eagle3_jax.training.ttt.ttt_loss`: ``accuracy_k`` of each draft position and ``simulated_tau``.
        depths: Phases ``UNTIL:DEPTH,...``, as ``eagle3 train head --unroll`` takes them.
        draft_vocab_size: Usual ``W``; ``None`` for all of the target's.
    """

    drafter: Callable[..., Any]
    config: Callable[[DecoderConfig, HeadOptions], Any]
    start: Callable[[Any, LoadedTarget, Int[np.ndarray, " W"] | None, jax.Array], Params]
    loss: Callable[[Any, DecoderTarget, Params, Frozen, TTTBatch, HeadOptions], Loss]
    depths: str = "5"
    draft_vocab_size: int | None = None
