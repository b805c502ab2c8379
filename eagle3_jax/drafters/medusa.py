"""Medusa: several heads on the target's last state, each for one position ahead (Cai et al., 2024, arXiv 2401.10774).

Head ``k`` (from 0) reads ``h_t``, the target's state after its final norm at the last token that it has run, and
predicts ``x_{t+2+k}``; ``x_{t+1}`` comes from the target itself::

    z <- z + SiLU(W_l z + b_l), l = 0 .. L-1, from z = h_t;     logits_k = O_k z

There is no cache and no embedding: one vector per row is all that it knows. Every ``q_k`` is a function of ``h_t``
alone, so the drafter is parallel: its drawn chains follow a product law, and of a tree all nodes of one level have the
same candidates. That is also its weakness. A head neither knows which ``x_{t+1}`` was chosen nor what the heads before
it proposed, so acceptance falls fast with depth, and faster with temperature than that of drafters that read tokens.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.drafters.base import NetworkDrafter
from eagle3_jax.drafters.parallel import parallel_inputs
from eagle3_jax.models.config import MOST, check_drafting, check_sizes
from eagle3_jax.models.functional import Params
from eagle3_jax.models.layers import Linear, Precision
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.types import Draft, Observation, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """A set of Medusa heads.

    Attributes:
        vocab_size: ``V``, the target's.
        draft_vocab_size: ``W``, how many target tokens they can propose.
        target_width: ``D``, the target's and the heads' own.
        num_target_layers: Layers of the target, behind whose final norm the heads stand.
        num_heads: ``K``, the most tokens of a draft.
        num_layers: ``L``, residual blocks of each head.
        bias: Whether the blocks carry a bias.
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
        check_sizes(self, "vocab_size", "target_width", "num_target_layers", "num_heads", "num_layers")
        check_drafting(self)

    @property
    def width(self) -> int:
        """The heads' own, which is the target's."""
        return self.target_width

    @property
    def aux_layers(self) -> tuple[int]:
        """What leaves the target's final norm."""
        return (self.num_target_layers + 1,)

    @property
    def max_positions(self) -> int:
        """They know no positions."""
        return MOST


class ResidualBlocks(nnx.Module):
    """One head up to its output projection."""

    def __init__(self, config: MedusaConfig, *, precision: Precision, rngs: nnx.Rngs):
        width = config.target_width
        self.layers = nnx.List(
            [Linear(width, width, bias=config.bias, precision=precision, rngs=rngs) for _ in range(config.num_layers)]
        )

    def __call__(self, z: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
        for layer in self.layers:
            z = z + jax.nn.silu(layer(z))
        return z


class MedusaHeads(nnx.Module):
    """The network."""

    def __init__(self, config: MedusaConfig, *, precision: Precision, rngs: nnx.Rngs):
        vocab = Axis(VOCAB, config.draft_vocab_size)
        self.blocks = nnx.List(
            [ResidualBlocks(config, precision=precision, rngs=rngs) for _ in range(config.num_heads)]
        )
        self.outputs = nnx.List(
            [
                Linear(config.target_width, config.draft_vocab_size, axes=(None, vocab), precision=precision, rngs=rngs)
                for _ in range(1 if config.shared_output else config.num_heads)
            ]
        )

    def __call__(self, state: Float[Array, "*rows D"], count: int) -> Float[Array, "*rows count W"]:
        """Logits of the first ``count`` heads in float32."""
        if len(self.outputs) > 1:
            return jnp.stack([self.logits(state, head) for head in range(count)], axis=-2)
        hidden = jnp.stack([self.blocks[head](state) for head in range(count)], axis=-2)
        return self.outputs[0](hidden).astype(jnp.float32)

    def logits(self, state: Float[Array, "*rows D"], head: int) -> Float[Array, "*rows W"]:
        """Logits of one head in float32."""
        return self.outputs[head % len(self.outputs)](self.blocks[head](state)).astype(jnp.float32)


class MedusaState(struct.PyTreeNode, kw_only=True):
    """All that the heads read.

    Attributes:
        hidden: ``[B D]``, the target's final state at the last committed token.
        root: ``[B]``, the token that it chose there.
    """

    hidden: Float[Array, "B D"]
    root: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class MedusaDrafter(NetworkDrafter):
    """Drafts a chain, of the likeliest tokens or drawn ones, or a tree; shorter ones leave the last heads out.

    The trees of the paper are static (:mod:`eagle3_jax.topology`); a dynamic one takes the likeliest products of
    the heads' probabilities.

    Parameters are a dictionary: ``head`` (the network) and, where the heads propose a part of the vocabulary,
    ``draft_to_target [W]``. The topology is a chain of all heads when left out.
    """

    network: ClassVar[type[nnx.Module]] = MedusaHeads

    config: MedusaConfig
    topology: Topology | None = None

    def __post_init__(self) -> None:
        topology = self.topology or Chain(self.longest)
        object.__setattr__(self, "topology", topology)
        if topology.max_depth > self.longest:
            raise ValueError(
                f"a draft of {topology.max_depth} tokens needs as many Medusa heads and there are {self.longest}; "
                f"lower num_speculative_tokens to at most {self.longest}, or choose a tree that is no deeper"
            )
        super().__post_init__()

    @property
    def longest(self) -> int:
        """The most tokens of a chain."""
        return self.config.num_heads

    def init(self, params: Params, batch: int, capacity: int) -> MedusaState:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params, capacity
        hidden = jnp.zeros((batch, self.config.target_width), self.precision.activations)
        return MedusaState(hidden=hidden, root=jnp.zeros((batch,), jnp.int32))

    def observe(self, params: Params, state: MedusaState, seen: Observation) -> MedusaState:
        """Keep the state of the last token, which is the one that chose ``next_token``."""
        del params
        index = jnp.maximum(seen.length - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(seen.features[:, :, 0], index, axis=1)[:, 0]
        observed = seen.length > 0
        return MedusaState(
            hidden=jnp.where(observed[:, None], newest, state.hidden),
            root=jnp.where(observed, seen.next_token, state.root),
        )

    def propose(self, params: Params, state: MedusaState, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """All levels at once."""
        logits = self.bind(params)(state.hidden, self.max_depth)
        ids = params.get("draft_to_target")
        return self.grow(parallel_inputs(state.root, logits, ids, self.config.vocab_size, keys, sampling))[0]
