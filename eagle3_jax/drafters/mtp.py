"""Multi-token prediction as DeepSeek-V3 has it: one more block, trained with the model.

DeepSeek-AI (2024, arXiv 2412.19437, section 2.2). At each position ``t`` it reads the target's
final state ``g_t`` (after the final norm) and the *next* token ``x_{t+1}``::

    z_t = W [norm_e(embedding(x_{t+1})); norm_h(g_t)]
    g'_{t+1} = norm(block(z_t))                              q = softmax(g'_{t+1} · output matrix)

The block is a whole decoder layer with its input norm. Its normed output replaces ``g`` in the next
step, so one module drafts any number of tokens. DeepSeek trained it on the first of them alone; the
acceptance of the second and third token grows with training on its own output
(``training/methods.py``). The embedding and the output matrix are the target's, unless the file has
others. At position 0 the embedding counts as zero (``zero_first``), as in DeepSeek's and Xiaomi's
modules; speculators trains without that. ``q`` depends on the tokens sampled before it.

Two things weaken it. It reads the last state alone, of a target that was not trained for it
(DeepSeek trains both together). And each further step is further from what the module has seen in
training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle3_jax.cache import KeyValue
from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.drafters.base import FinalStateConfig
from eagle3_jax.drafters.eagle3 import Eagle3Drafter
from eagle3_jax.models.context import AttentionContext
from eagle3_jax.models.decoder import Block
from eagle3_jax.models.functional import Params, call_cached
from eagle3_jax.models.layers import Linear, Precision, RMSNorm, embed


@dataclasses.dataclass(frozen=True, kw_only=True)
class MTPConfig(FinalStateConfig):
    """An MTP module with a dense block, its one layer.

    Attributes:
        own_output: Whether it has an output matrix of its own.
        zero_first: Whether the embedding at position 0 counts as zero.
    """

    own_output: bool = False
    zero_first: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.layers) != 1:
            raise ValueError(
                f"the module has {len(self.layers)} layers; expected 1 (it is fed back, not"
                " stacked)"
            )


class MTPModule(nnx.Module):
    """The network; the embedding is an input."""

    def __init__(self, config: MTPConfig, *, precision: Precision, rngs: nnx.Rngs):
        width = config.width
        eps = config.norm_eps
        self.embedding_norm = RMSNorm(width, eps)
        self.feature_norm = RMSNorm(width, eps)
        self.fc = Linear(2 * width, width, precision=precision, rngs=rngs)
        self.block = Block(
            config.layers[0], width=width, norm_eps=eps, precision=precision, rngs=rngs
        )

        self.norm = RMSNorm(width, eps)
        if config.own_output:
            vocab = Axis(VOCAB, config.vocab_size)
            self.head = Linear(
                width, config.vocab_size, axes=(None, vocab), precision=precision, rngs=rngs
            )

    def fuse(self, features: Float[Array, "B T 1 D"]) -> Float[Array, "B T D"]:
        """Returns the target's state unchanged: every step reads it with the embedding."""
        return features[:, :, 0]

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        stream: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        contexts: Sequence[AttentionContext],
    ) -> tuple[Float[Array, "B T D"], tuple[KeyValue, ...]]:
        """Runs one step: from the target's normed state, or the module's own, to its next state.

        Returns:
            The state, and keys and values of the block.
        """
        embedding_and_state = jnp.concatenate(
            [self.embedding_norm(embedded), self.feature_norm(stream)], axis=-1
        )
        x, kv = call_cached(self.block, self.fc(embedding_and_state), positions, contexts[0])
        return self.norm(x), (kv,)

    def logits(self, output: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns logits in float32 from the module's output matrix."""
        return self.head(output).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class MTPDrafter(Eagle3Drafter):
    """Drafts a chain or a tree with an MTP module, by EAGLE-3's ``observe`` and ``propose``.

    Parameters: ``head`` (the network), ``embedding [V D]`` (its own or the target's) and the
    target's output matrix (:meth:`~eagle3_jax.drafters.base.NetworkDrafter.assemble`).
    """

    network: ClassVar[type[nnx.Module]] = MTPModule
    borrows_output: ClassVar[bool] = True

    config: MTPConfig

    def embed(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns embeddings of the tokens; zero at position 0 if ``zero_first``."""
        embedded = embed(params["embedding"], tokens, self.precision)
        if not self.config.zero_first:
            return embedded
        return jnp.where(positions[..., None] == 0, 0, embedded)

    def logits(
        self, params: Params, head: Any, output: Float[Array, "B T D"]
    ) -> Float[Array, "B T V"]:
        """Returns logits in float32, from the target's output matrix or the module's."""
        if self.config.own_output:
            return head.logits(output)
        return super().logits(params, head, output)
