"""EAGLE-1 and EAGLE-2: a head that predicts the target's next final state.

Li et al. (2024, arXiv 2401.15077). The head reads, at each position ``t``, the target's final state
``f_t`` (after the final norm: what the output matrix reads) and the *next* token ``x_{t+1}``::

    f'_{t+1} = layers(fc([embedding(x_{t+1}); f_t]))
    q        = softmax(f'_{t+1} · target's output matrix)

Its output imitates the state ``f_{t+1}``, so no norm follows, the logits are the target's own of
it, and it is fed back in place of ``f``. The first layer has no input norm.

EAGLE-2 (Li et al., 2024, arXiv 2406.16858) is the same head with a dynamic tree, EAGLE-1 the static
tree :data:`eagle3_jax.topology.PUBLISHED_TREES`, at a temperature with siblings sampled without
replacement (``draft_sampling=PROBABILISTIC``). ``q`` depends on the tokens sampled before it.

Three things weaken it. It must predict a state of the target's whole width, and its errors add up
along the draft. It reads one layer of features, the last. It is trained on true states alone, which
it never sees after the first draft token. EAGLE-3 gives up the first two and trains on its own
output.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.cache import KeyValue
from eagle3_jax.drafters.base import FinalStateConfig
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.context import AttentionContext
from eagle3_jax.models.decoder import Block
from eagle3_jax.models.functional import call_cached
from eagle3_jax.models.layers import Linear, Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle1Config(FinalStateConfig):
    """An EAGLE-1 head, mostly of one layer; the first has no input norm.

    Attributes:
        fc_bias: Whether ``fc`` has a bias; most published heads do.
    """

    fc_bias: bool = True


class Eagle1Head(nnx.Module):
    """The network; the embedding is an input and the output matrix the target's."""

    def __init__(self, config: Eagle1Config, *, precision: Precision, rngs: nnx.Rngs):
        width = config.width
        eps = config.norm_eps
        self.fc = Linear(2 * width, width, bias=config.fc_bias, precision=precision, rngs=rngs)
        block = functools.partial(Block, width=width, norm_eps=eps, precision=precision, rngs=rngs)
        self.first = block(config.layers[0], input_norm=False)
        self.upper_layers = nnx.List([block(layer) for layer in config.layers[1:]])

    def fuse(self, features: Float[Array, "B T 1 D"]) -> Float[Array, "B T D"]:
        """Returns the target's state unchanged: ``fc`` reads it with the embedding, every step."""
        return features[:, :, 0]

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        stream: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        contexts: Sequence[AttentionContext],
    ) -> tuple[Float[Array, "B T D"], tuple[KeyValue, ...]]:
        """Runs one step: from the target's state, or the head's guess of it, to the next guess.

        Returns:
            The guess, and keys and values of each layer.
        """
        x = self.fc(jnp.concatenate([embedded, stream], axis=-1))
        written = []
        for layer, context in zip([self.first, *self.upper_layers], contexts, strict=True):
            x, kv = call_cached(layer, x, positions, context)
            written.append(kv)
        return x, tuple(written)


@dataclasses.dataclass(frozen=True)
class Eagle1Drafter(Eagle3Drafter):
    """Drafts a chain or a tree with an EAGLE-1 head, by EAGLE-3's ``observe`` and ``propose``.

    Parameters: ``head`` (the network), ``embedding [V D]`` (its own or the target's) and the
    target's output matrix (:meth:`~eagle3_jax.drafters.base.NetworkDrafter.assemble`).
    """

    network: ClassVar[type[nnx.Module]] = Eagle1Head
    borrows_output: ClassVar[bool] = True

    config: Eagle1Config
