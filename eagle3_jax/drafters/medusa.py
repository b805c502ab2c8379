"""Medusa: several heads on the target's last state, each for one position ahead.

Cai et al. (2024, arXiv 2401.10774). Head ``k`` (from 0) reads ``h_t``, the target's state after its
final norm at the last token that it has run. It predicts ``x_{t+2+k}``; ``x_{t+1}`` comes from the
target itself::

    z <- z + SiLU(W_l z + b_l), l = 0 .. L-1, from z = h_t;     logits_k = O_k z

There is no cache and no embedding; the state is one vector per row. Every ``q_k`` is a function of
``h_t``, so the drafter is parallel: the distribution of a sampled chain is a product, and all nodes
of a tree level have the same candidates. That is also its weakness. A head knows neither the chosen
``x_{t+1}`` nor the proposals of the heads before it, so acceptance falls fast with depth. With
temperature it falls faster than that of drafters that read tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.drafters.base import LastState, LastStateDrafter
from eagle3_jax.drafters.parallel import parallel_inputs
from eagle3_jax.models.config import MOST, check_drafting, check_sizes
from eagle3_jax.models.functional import Params
from eagle3_jax.models.layers import Linear, Precision
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.types import Draft, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """A set of Medusa heads.

    Attributes:
        vocab_size: ``V``, the target's.
        draft_vocab_size: ``W``, number of target tokens that the heads can propose.
        target_width: ``D``, width of the target and of the heads.
        num_target_layers: Number of layers of the target. The heads read the state after its final
            norm.
        num_heads: ``K``, the largest number of tokens in a draft.
        num_layers: ``L``, residual blocks of each head.
        bias: Whether the blocks have a bias.
        shared_output: Whether all heads share one output projection (vLLM's ``original_lm_head``).
    """

    vocab_size: int
    draft_vocab_size: int
    target_width: int
    num_target_layers: int
    num_heads: int
    num_layers: int = 1
    bias: bool = False
    shared_output: bool = False

    def __post_init__(self) -> None:
        check_sizes(
            self, "vocab_size", "target_width", "num_target_layers", "num_heads", "num_layers"
        )
        check_drafting(self)

    @property
    def width(self) -> int:
        """Width of the heads, which is that of the target."""
        return self.target_width

    @property
    def aux_layers(self) -> tuple[int]:
        """The output of the target's final norm."""
        return (self.num_target_layers + 1,)

    @property
    def max_positions(self) -> int:
        """No limit, because the heads do not use positions."""
        return MOST


class ResidualBlocks(nnx.Module):
    """One head up to its output projection."""

    def __init__(self, config: MedusaConfig, *, precision: Precision, rngs: nnx.Rngs):
        width = config.target_width
        self.layers = nnx.List(
            [
                Linear(width, width, bias=config.bias, precision=precision, rngs=rngs)
                for _ in range(config.num_layers)
            ]
        )

    def __call__(self, z: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        for layer in self.layers:
            z = z + jax.nn.silu(layer(z))
        return z


class MedusaHeads(nnx.Module):
    """All heads: their residual blocks, and one output projection per head or one for all."""

    def __init__(self, config: MedusaConfig, *, precision: Precision, rngs: nnx.Rngs):
        axes = (None, Axis(VOCAB, config.draft_vocab_size))
        options = {"precision": precision, "rngs": rngs}
        num_outputs = 1 if config.shared_output else config.num_heads
        output = functools.partial(
            Linear, config.target_width, config.draft_vocab_size, axes=axes, **options
        )
        self.blocks = nnx.List([ResidualBlocks(config, **options) for _ in range(config.num_heads)])
        self.outputs = nnx.List([output() for _ in range(num_outputs)])

    def __call__(self, state: Float[Array, "*rows D"], count: int) -> Float[Array, "*rows count W"]:
        """Returns the logits of the first ``count`` heads in float32."""
        if len(self.outputs) > 1:
            return jnp.stack([self.logits(state, head) for head in range(count)], axis=-2)
        hidden = jnp.stack([self.blocks[head](state) for head in range(count)], axis=-2)
        return self.outputs[0](hidden).astype(jnp.float32)

    def logits(self, state: Float[Array, "*rows D"], head: int) -> Float[Array, "*rows W"]:
        """Returns the logits of one head in float32."""
        output = self.outputs[head % len(self.outputs)]
        return output(self.blocks[head](state)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(LastStateDrafter):
    """Drafts a chain of the most likely or of sampled tokens, or a tree.

    A shorter draft does not use the last heads. The trees of the paper are static
    (:mod:`eagle3_jax.topology`). A dynamic tree takes the largest products of the heads'
    probabilities.

    Parameters are a dictionary: ``head`` (the network) and, if the heads propose only a part of the
    vocabulary, ``draft_to_target [W]``. The default topology is a chain of all heads.
    """

    network: ClassVar[type[nnx.Module]] = MedusaHeads

    config: MedusaConfig
    topology: Topology | None = None

    def __post_init__(self) -> None:
        topology = self.topology or Chain(self.longest)
        object.__setattr__(self, "topology", topology)
        if topology.max_depth > self.longest:
            raise ValueError(
                f"a draft of {topology.max_depth} tokens needs as many Medusa heads and there are"
                f" {self.longest}; lower num_speculative_tokens to at most {self.longest}, or"
                " choose a tree that is no deeper"
            )
        super().__post_init__()

    @property
    def longest(self) -> int:
        """The largest number of tokens in a chain."""
        return self.config.num_heads

    def propose(
        self, params: Params, state: LastState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Computes the logits of all levels, then grows the draft."""
        logits = self.bind(params)(state.hidden, self.max_depth)
        ids = params.get("draft_to_target")
        inputs = parallel_inputs(state.root, logits, ids, self.config.vocab_size, keys, sampling)
        draft, _ = self.grow(inputs)
        return draft
