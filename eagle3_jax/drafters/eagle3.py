"""EAGLE-3: a one-layer head that drafts from fused target features.

Li et al. (2025, arXiv 2503.01840). The head reads, at each position ``t``, the target's features
``f_t`` of three layers and the *next* token ``x_{t+1}``, and predicts ``x_{t+2}``::

    g_t = fc([f_t of a low, a middle and a high layer])         fuse
    a_t = layer([norm(embedding(x_{t+1})); norm(g_t)]) + g_t    first layer: input twice as wide
    q   = softmax(output(norm(a_t)))                            distribution of x_{t+2}

Further draft tokens use the head's own output ``a`` in place of ``g``. Training does the same
("training-time test"), so the head has seen its own errors.

``observe`` runs the head on newly committed tokens, whose features are known. ``propose`` grows the
draft from there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.cache import Cache
from eagle3_jax.devices.kernels import indices
from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.drafters.base import NetworkDrafter
from eagle3_jax.drafters.grow import DraftInputs, Level
from eagle3_jax.models.config import Eagle3Config, gated
from eagle3_jax.models.context import AttentionContext, attention_contexts, empty_cache
from eagle3_jax.models.decoder import MIXERS, Block
from eagle3_jax.models.functional import Params, call_cached
from eagle3_jax.models.layers import Linear, Precision, RMSNorm, SwiGLU, embed
from eagle3_jax.tree import causal_mask
from eagle3_jax.types import Draft, Observation, SamplingParams


class FirstLayer(nnx.Module):
    """The layer whose attention reads the token embedding next to the features: twice the width."""

    def __init__(self, config: Eagle3Config, *, precision: Precision, rngs: nnx.Rngs):
        layer = config.layers[0]
        width = config.width
        eps = config.norm_eps
        self.embedding_norm = RMSNorm(width, eps)
        self.feature_norm = RMSNorm(width, eps)

        self.attention = MIXERS[type(layer.mixer)](
            layer.mixer,
            d_in=2 * width,
            width=width,
            norm_eps=eps,
            precision=precision,
            rngs=rngs,
        )

        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, gated(layer), precision=precision, rngs=rngs)
        self.norm_before_residual = config.norm_before_residual

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        fused: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        context: AttentionContext,
    ) -> tuple[Float[Array, "B T D"], Any]:
        normed = self.feature_norm(fused)
        embedding_and_features = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        attended, written = self.attention(embedding_and_features, positions, context)
        # Some published heads add to the normed features instead of the features.
        residual = normed if self.norm_before_residual else fused
        x = residual + attended
        return x + self.mlp(self.mlp_norm(x)), written


class Eagle3Head(nnx.Module):
    """The network. The embedding is an input, because most heads share the target's."""

    def __init__(self, config: Eagle3Config, *, precision: Precision, rngs: nnx.Rngs):
        width = config.width
        eps = config.norm_eps
        chunks = len(config.aux_layers)
        features_width = chunks * config.target_width
        self.config = config

        if config.norm_before_fc:
            self.input_norm = RMSNorm(features_width, eps)
        if config.fc_norm:
            norms = [RMSNorm(config.target_width, eps) for _ in range(chunks)]
            self.fc_norm = nnx.List(norms)
        self.fc = Linear(features_width, width, precision=precision, rngs=rngs)

        self.first = FirstLayer(config, precision=precision, rngs=rngs)
        block = functools.partial(Block, width=width, norm_eps=eps, precision=precision, rngs=rngs)
        self.upper_layers = nnx.List([block(layer) for layer in config.layers[1:]])
        self.norm = RMSNorm(width, eps)

        vocab = Axis(VOCAB, config.draft_vocab_size)
        self.head = Linear(
            width, config.draft_vocab_size, axes=(None, vocab), precision=precision, rngs=rngs
        )

    def fuse(self, features: Float[Array, "B T A Dt"]) -> Float[Array, "B T D"]:
        """Returns ``fc`` of the concatenated features, low layer first."""
        if self.config.fc_norm:
            chunks = [norm(features[:, :, i]) for i, norm in enumerate(self.fc_norm)]
            features = jnp.stack(chunks, axis=2)
        concatenated = features.reshape(*features.shape[:2], -1)
        if self.config.norm_before_fc:
            concatenated = self.input_norm(concatenated)
        return self.fc(concatenated)

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        stream: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        contexts: Sequence[AttentionContext],
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
        """Runs one step of the head.

        Args:
            embedded: ``[B T D]``, embeddings of the tokens after the positions.
            stream: ``[B T D]``, fused features; for draft tokens the head's own output.
            positions: ``[B T]``.
            contexts: For each layer, what its attention reads.

        Returns:
            The next output, and for each layer what its cache keeps: keys and values, or latents.
        """
        x, kv = call_cached(self.first, embedded, stream, positions, contexts[0])
        written = [kv]
        for block, context in zip(self.upper_layers, contexts[1:], strict=True):
            x, kv = call_cached(block, x, positions, context)
            written.append(kv)
        output = self.norm(x) if self.config.norm_output else x
        return output, tuple(written)

    def logits(self, output: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Returns draft logits in float32 from the output of ``__call__``."""
        normed = output if self.config.norm_output else self.norm(output)
        return self.head(normed).astype(jnp.float32)


class FeedbackState(struct.PyTreeNode, kw_only=True):
    """The head's state after the committed tokens.

    Attributes:
        cache: Keys and values of the pairs ``(f_t, x_{t+1})`` of committed tokens.
        output: ``[B D]``, the head's output at the last pair, from which the first draft token
            follows.
        root: ``[B]``, the last token chosen by the target.
    """

    cache: Cache
    output: Float[Array, "B D"]
    root: Int[Array, " B"]


def following(seen: Observation) -> Int[Array, "B T"]:
    """Returns ``x_{t+1}``: the next committed token, after the last of them the target's choice."""
    next_tokens = jnp.concatenate([seen.tokens[:, 1:], seen.next_token[:, None]], axis=1)
    is_last = indices(next_tokens.shape[1])[None, :] == seen.length[:, None] - 1
    return jnp.where(is_last, seen.next_token[:, None], next_tokens)


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter(NetworkDrafter):
    """Drafts a chain or a tree with an EAGLE-3 head.

    Parameters are a dictionary: ``head`` (the network), ``embedding [V D]`` (mostly the target's
    own array) and ``draft_to_target [W]`` (absolute ids).

    EAGLE-1 and MTP derive from this class and replace the network. A network has

    * ``fuse(features [B T A Dt]) -> [B T D]``;
    * ``__call__(embedded, stream, positions, contexts) -> (output [B T D], written)``;
    * ``logits(output) -> [B T W]``, unless ``borrows_output`` says to use the target's output
      matrix.
    """

    network: ClassVar[type[nnx.Module]] = Eagle3Head

    # Eagle3Config; drafters with another network have another type.
    config: Any

    def init(self, params: Params, batch: int, capacity: int) -> FeedbackState:
        """Returns an empty state; see :class:`eagle3_jax.types.Drafter`."""
        del params
        config = self.config
        dtype = self.precision.activations
        # The capacity has room for every verified node; the head may run on more nodes of a tree
        # than that.
        capacity += max(0, self.shape.num_expanded - self.num_nodes)
        cache = empty_cache(config.layers, batch=batch, capacity=capacity, dtype=dtype)
        output = jnp.zeros((batch, config.width), dtype)
        root = jnp.zeros((batch,), jnp.int32)
        return FeedbackState(cache=cache, output=output, root=root)

    def observe(self, params: Params, state: FeedbackState, seen: Observation) -> FeedbackState:
        """Runs the head on the committed pairs ``(f_t, x_{t+1})`` at positions ``t``.

        Only these enter its cache.
        """
        head = self.bind(params)
        next_tokens = following(seen)
        count = next_tokens.shape[1]
        positions = state.cache.length[:, None] + indices(count)[None, :]
        past = attention_contexts(
            self.config.layers, causal_mask(count), positions, state.cache, is_chain=True
        )
        embedded = self.embed(params, next_tokens, positions)
        fused = head.fuse(seen.features)
        output, written = head(embedded, fused, positions, past)

        # The output at the newest pair predicts the first draft token. Rows without new tokens keep
        # theirs.
        newest = jnp.maximum(seen.length - 1, 0)[:, None, None]
        newest_output = jnp.take_along_axis(output, newest, axis=1)[:, 0]
        has_new = seen.length > 0
        cache = state.cache.commit(written, seen.length)
        output = jnp.where(has_new[:, None], newest_output, state.output)
        root = jnp.where(has_new, seen.next_token, state.root)
        return FeedbackState(cache=cache, output=output, root=root)

    def propose(
        self, params: Params, state: FeedbackState, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        """Grows a draft by feeding the head its own output. Verification makes any draft exact."""
        head = self.bind(params)
        length = state.cache.length

        def run(tokens, output, depth, mask, memory):
            # The pair of a token is one position before the token itself, and all nodes of a level
            # share it.
            positions = jnp.broadcast_to(length[:, None] + depth, tokens.shape)
            layers, earlier_positions = memory
            draft_positions = jnp.concatenate([earlier_positions, positions], axis=1)
            cache = Cache(layers=layers, length=length)
            past = attention_contexts(
                self.config.layers, mask, draft_positions, cache, is_chain=self.is_chain
            )

            # The features of a draft token are not known. The head's own output a replaces g.
            embedded = self.embed(params, tokens, positions)
            output, written = head(embedded, output, positions, past)
            layers = cache.keep(written).layers
            logits = self.logits(params, head, output)
            return Level(logits, carry=output, memory=(layers, draft_positions))

        output = state.output[:, None]
        no_positions = jnp.zeros((length.shape[0], 0), jnp.int32)
        logits = self.logits(params, head, output)
        first = Level(logits, carry=output, memory=(state.cache.layers, no_positions))
        inputs = DraftInputs(
            root=state.root,
            first=first,
            run=run,
            draft_to_target=params.get("draft_to_target"),
            vocab_size=self.config.vocab_size,
            keys=keys,
            sampling=sampling,
        )
        draft, (layers, _) = self.grow(inputs)

        # Guesses are after the committed slots, whose number has not changed. Returning this cache
        # saves a copy.
        cache = Cache(layers=layers, length=length)
        return draft.replace(state=state.replace(cache=cache))

    def embed(
        self, params: Params, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """Returns embeddings of the tokens that follow the features at these positions."""
        del positions
        return embed(params["embedding"], tokens, self.precision)

    def logits(
        self, params: Params, head: Any, output: Float[Array, "B T D"]
    ) -> Float[Array, "B T W"]:
        """Returns draft logits in float32 from the network's output."""
        if self.borrows_output:
            return self.target_logits(params, output)
        return head.logits(output)
