"""Heads that feed their own output back: one step from a feature and the token after it, then from that step's output.

EAGLE-1, EAGLE-3 and MTP differ in the network alone. At each position ``t`` it reads the target's features ``f_t`` and
the *next* token ``x_{t+1}``, and predicts ``x_{t+2}``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.cache import Cache, KeyValues
from eagle3_jax.drafters._grow import Level
from eagle3_jax.drafters._network import NetworkDrafter
from eagle3_jax.models.config import LayerConfig, check_stack
from eagle3_jax.models.functional import Params
from eagle3_jax.models.layers import embed
from eagle3_jax.models.memory import causal_mask, empty_cache, memories
from eagle3_jax.types import Draft, Observation, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinalStateConfig:
    """A head that reads the target's final state alone. It is as wide as its target and proposes all of its tokens.

    Attributes:
        vocab_size: ``V``.
        width: ``D``.
        layers: The head's own.
        num_target_layers: ``L`` of the target, whose state after the final norm is feature ``L + 1``.
        max_positions: Longest sequence that the head was built for.
        norm_eps: Added to the mean square in RMSNorm.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    num_target_layers: int
    max_positions: int = 2048
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_stack(self)

    @property
    def num_layers(self) -> int:
        """The head's own layers."""
        return len(self.layers)

    @property
    def draft_vocab_size(self) -> int:
        """``W``, all of ``V``."""
        return self.vocab_size

    @property
    def target_width(self) -> int:
        """Width of the target's features."""
        return self.width

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """What leaves the target's final norm."""
        return (self.num_target_layers + 1,)


@struct.dataclass(kw_only=True)
class FeedbackState:
    """What the head knows for certain.

    Attributes:
        cache: Keys and values of the pairs ``(f_t, x_{t+1})`` from true features.
        output: ``[B D]``, the head's output at the last pair, from which the first draft token follows.
        root: ``[B]``, the last token chosen by the target.
    """

    cache: Cache
    output: Float[Array, "B D"]
    root: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class FeedbackDrafter(NetworkDrafter):
    """Drafts a chain or a tree.

    Its network has

    * ``fuse(features [B T A Dt]) -> [B T D]``;
    * ``__call__(embedded, stream, positions, memories) -> (output [B T D], written)``, one step: fused features or its
      own last output in, next output and its keys and values out;
    * ``logits(output) -> [B T W]``, unless the drafter reads them off the target's output matrix.
    """

    def init(self, params: Params, batch: int, capacity: int) -> FeedbackState:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params
        config, dtype = self.config, self.precision.activations
        # There is room for as many nodes as are verified; a tree may run more of them than that.
        capacity += max(0, self.shape.num_run - self.num_nodes)
        return FeedbackState(
            cache=empty_cache(config.layers, batch=batch, capacity=capacity, dtype=dtype),
            output=jnp.zeros((batch, config.width), dtype),
            root=jnp.zeros((batch,), jnp.int32),
        )

    def observe(self, params: Params, state: FeedbackState, seen: Observation) -> FeedbackState:
        """Run the head on the true pairs ``(f_t, x_{t+1})`` at positions ``t``; only these enter its cache."""
        head, fed = self.bound(params), seen.tokens.shape[1]
        shifted = jnp.concatenate([seen.tokens[:, 1:], seen.next_token[:, None]], axis=1)
        last = jnp.arange(fed, dtype=jnp.int32)[None, :] == seen.length[:, None] - 1
        shifted = jnp.where(last, seen.next_token[:, None], shifted)
        positions = state.cache.length[:, None] + jnp.arange(fed, dtype=jnp.int32)[None, :]
        past = memories(self.config.layers, causal_mask(fed), positions, state.cache)
        output, written = head(self.embed(params, shifted, positions), head.fuse(seen.features), positions, past)
        index = jnp.maximum(seen.length - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(output, index, axis=1)[:, 0]
        observed = seen.length > 0
        return FeedbackState(
            cache=state.cache.commit(written, seen.length),
            output=jnp.where(observed[:, None], newest, state.output),
            root=jnp.where(observed, seen.next_token, state.root),
        )

    def propose(self, params: Params, state: FeedbackState, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """Grow the draft, or draw it; verification makes the output exact whatever is proposed."""
        head, length = self.bound(params), state.cache.length

        def run(tokens, output, depth, mask, memory):
            # All nodes of a level share one rotary position, one behind their place in the sequence.
            positions = jnp.broadcast_to(length[:, None] + depth, tokens.shape)
            layers, before = memory
            drafted = jnp.concatenate([before, positions], axis=1)
            past = memories(self.config.layers, mask, drafted, Cache(layers=layers, length=length))
            output, written = head(self.embed(params, tokens, positions), output, positions, past)
            layers = tuple(KeyValues(**one._asdict()) for one in written)
            return Level(self.logits(params, head, output), output, (layers, drafted))

        output = state.output[:, None]
        nothing = jnp.zeros((length.shape[0], 0), jnp.int32)
        first = Level(self.logits(params, head, output), carry=output, memory=(state.cache.layers, nothing))
        draft, (layers, _) = self.grown(
            first,
            run,
            root=state.root,
            draft_to_target=params.get("draft_to_target"),
            vocab_size=self.config.vocab_size,
            keys=keys,
            sampling=sampling,
        )
        # The guesses lie behind the committed slots, whose number is as before: to hand them on spares a copy.
        cache = Cache(layers=layers, length=length)
        return dataclasses.replace(draft, state=dataclasses.replace(state, cache=cache))

    def embed(self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the network reads of the tokens after the states at these positions."""
        del positions
        return embed(params["embedding"], tokens, self.precision)

    def logits(self, params: Params, head: Any, output: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Draft logits in float32 from what the network gave."""
        return self.target_logits(params, output) if self.borrows_output else head.logits(output)
