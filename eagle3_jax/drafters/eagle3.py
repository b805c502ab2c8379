"""EAGLE-3: a one-layer head that drafts from fused target features (Li et al., 2025, arXiv 2503.01840).

The head reads, at each position ``t``, the target's features ``f_t`` of three layers and the *next* token
``x_{t+1}``, and predicts ``x_{t+2}``. Further draft tokens feed the head's own output back in place of the features.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Float, Int, Key

from eagle3_jax.cache import Cache, KeyValue, KeyValues, visible
from eagle3_jax.drafters._grow import Level, draw_chain, grow
from eagle3_jax.models.config import Eagle3Config
from eagle3_jax.models.decoder import Attention, Block, CacheMemory, Memory, causal_mask, empty_cache, memories
from eagle3_jax.models.functional import Params, bind, init_params, param_axes, param_shapes, traced_once
from eagle3_jax.models.layers import FLOAT32, Linear, Precision, RMSNorm, SwiGLU, embed
from eagle3_jax.sharding import VOCAB, Axis
from eagle3_jax.tree import Chain, DynamicTree, StaticTree, Topology
from eagle3_jax.types import Draft, DraftSampling, Observation, SamplingParams


class FirstLayer(nnx.Module):
    """The layer that sees the token embedding beside the features; its attention reads both, twice as wide."""

    def __init__(self, config: Eagle3Config, *, precision: Precision, rngs: nnx.Rngs):
        layer, width, eps = config.layers[0], config.width, config.norm_eps
        self.embedding_norm = RMSNorm(width, eps)
        self.feature_norm = RMSNorm(width, eps)
        self.attention = Attention(
            layer.mixer, d_in=2 * width, width=width, norm_eps=eps, precision=precision, rngs=rngs
        )
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = SwiGLU(width, layer.mlp, precision=precision, rngs=rngs)
        self.norm_before_residual = config.norm_before_residual

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        fused: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        memory: Memory,
    ) -> tuple[Float[Array, "B T D"], KeyValue]:
        normed = self.feature_norm(fused)
        both = jnp.concatenate([self.embedding_norm(embedded), normed], axis=-1)
        attended, kv = self.attention(both, positions, memory)
        x = (normed if self.norm_before_residual else fused) + attended
        return x + self.mlp(self.mlp_norm(x)), kv


class Eagle3Head(nnx.Module):
    """The network; the embedding is an input, because most heads share the target's."""

    def __init__(self, config: Eagle3Config, *, precision: Precision, rngs: nnx.Rngs):
        width, eps, chunks = config.width, config.norm_eps, len(config.aux_layers)
        self.config = config
        if config.norm_before_fc:
            self.input_norm = RMSNorm(chunks * config.target_width, eps)
        if config.fc_norm:
            self.fc_norm = nnx.List([RMSNorm(config.target_width, eps) for _ in range(chunks)])
        self.fc = Linear(chunks * config.target_width, width, precision=precision, rngs=rngs)
        self.first = FirstLayer(config, precision=precision, rngs=rngs)
        self.rest = nnx.List(
            [Block(layer, width=width, norm_eps=eps, precision=precision, rngs=rngs) for layer in config.layers[1:]]
        )
        self.norm = RMSNorm(width, eps)
        vocab = Axis(VOCAB, config.draft_vocab_size)
        self.head = Linear(width, config.draft_vocab_size, axes=(None, vocab), precision=precision, rngs=rngs)

    def fuse(self, features: Float[Array, "B T A Dt"]) -> Float[Array, "B T D"]:
        """``fc`` over the concatenated features, low layer first."""
        if self.config.fc_norm:
            chunks = [norm(features[:, :, i]) for i, norm in enumerate(self.fc_norm)]
            features = jnp.stack(chunks, axis=2)
        flat = features.reshape(*features.shape[:2], -1)
        return self.fc(self.input_norm(flat) if self.config.norm_before_fc else flat)

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        stream: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        memories: Sequence[Memory],
    ) -> tuple[Float[Array, "B T D"], tuple[KeyValue, ...]]:
        """One step of the head: fused features or its own last output in, next output and its keys and values out."""
        x, kv = traced_once(self.first, embedded, stream, positions, memories[0])
        written = [kv]
        for block, memory in zip(self.rest, memories[1:], strict=True):
            x, kv = traced_once(block, x, positions, memory)
            written.append(kv)
        return (self.norm(x) if self.config.norm_output else x), tuple(written)

    def logits(self, output: Float[Array, "B T D"]) -> Float[Array, "B T W"]:
        """Draft logits in float32 from the output of ``__call__``."""
        return self.head(output if self.config.norm_output else self.norm(output)).astype(jnp.float32)


@struct.dataclass(kw_only=True)
class Eagle3State:
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
class Eagle3Drafter:
    """Drafts a chain or a tree with an EAGLE-3 head.

    Parameters are a dictionary: ``head`` (the network), ``embedding [V D]`` (mostly the target's own array) and
    ``draft_to_target [W]`` (absolute ids).

    Attributes:
        config: The head.
        topology: The shape of a draft.
        precision: Of the head's products and activations.
        draft_sampling: Whether a chain's tokens are the likeliest or drawn; trees take the likeliest.
    """

    config: Eagle3Config
    topology: Topology = Chain(5)
    precision: Precision = FLOAT32
    draft_sampling: DraftSampling = DraftSampling.GREEDY

    def __post_init__(self) -> None:
        topology, limit = self.topology, self.config.draft_vocab_size
        width = topology.top_k if isinstance(topology, DynamicTree) else 1
        if isinstance(topology, StaticTree):
            width = 1 + max(rank for path in topology.paths for rank in path)
        if width > limit:
            raise ValueError(f"the tree draws {width} children from a draft vocabulary of {limit}; lower top_k")
        positions = self.config.max_positions
        if topology.max_depth >= positions:
            raise ValueError(
                f"a draft of {topology.max_depth} levels is above the limit of the head, which has {positions} "
                f"positions; lower num_speculative_tokens or max_depth to at most {positions - 1}"
            )
        if self.draft_sampling is DraftSampling.PROBABILISTIC and not isinstance(topology, Chain):
            raise ValueError(
                "draft_sampling is probabilistic and the draft a tree, whose tokens are the likeliest ones; "
                "draft a chain (num_speculative_tokens=K) or leave draft_sampling greedy"
            )

    @property
    def num_nodes(self) -> int:
        """``N``."""
        return self.topology.num_nodes

    @property
    def max_depth(self) -> int:
        """``G``."""
        return self.topology.max_depth

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Target layers that are fused."""
        return self.config.aux_layers

    @property
    def is_chain(self) -> bool:
        """Whether the topology is one."""
        return isinstance(self.topology, Chain)

    def drafting(self, topology: Topology | None, draft_sampling: DraftSampling | None) -> Eagle3Drafter:
        """With another topology or another way of drawing; ``None`` leaves that as it is.

        Raises:
            ValueError: A tree was asked for whose tokens are drawn, or which is wider than the draft vocabulary.
        """
        return dataclasses.replace(
            self, topology=topology or self.topology, draft_sampling=draft_sampling or self.draft_sampling
        )

    def param_shapes(self) -> Params:
        """Shapes of the network's parameters."""
        return param_shapes(Eagle3Head, self.config, self.precision)

    def param_axes(self) -> Params:
        """The :data:`~eagle3_jax.sharding.Axes` of all parameters; tables that are looked up are on every device."""
        return {"head": param_axes(Eagle3Head, self.config, self.precision), "embedding": (), "draft_to_target": ()}

    def init_params(self, key: jax.Array) -> Params:
        """Random parameters of the network, for tests and training."""
        return init_params(Eagle3Head, self.config, self.precision, key)

    def init(self, params: Params, batch: int, capacity: int) -> Eagle3State:
        """See :class:`eagle3_jax.types.Drafter`."""
        del params
        config, dtype = self.config, self.precision.activations
        # There is room for as many nodes as are verified; a tree may run more of them than that.
        capacity += max(0, self.topology.num_run - self.num_nodes)
        return Eagle3State(
            cache=empty_cache(config.layers, batch=batch, capacity=capacity, dtype=dtype),
            output=jnp.zeros((batch, config.width), dtype),
            root=jnp.zeros((batch,), jnp.int32),
        )

    def observe(self, params: Params, state: Eagle3State, seen: Observation) -> Eagle3State:
        """Run the head on the true pairs ``(f_t, x_{t+1})`` at positions ``t``; only these enter its cache."""
        head, fed = self._head(params), seen.tokens.shape[1]
        shifted = jnp.concatenate([seen.tokens[:, 1:], seen.next_token[:, None]], axis=1)
        last = jnp.arange(fed)[None, :] == seen.length[:, None] - 1
        shifted = jnp.where(last, seen.next_token[:, None], shifted)
        positions = state.cache.length[:, None] + jnp.arange(fed, dtype=jnp.int32)[None, :]
        past = memories([None] * len(state.cache.layers), causal_mask(fed), positions, state.cache)
        output, written = head(self._embed(params, shifted), head.fuse(seen.features), positions, past)
        index = jnp.maximum(seen.length - 1, 0)[:, None, None]
        newest = jnp.take_along_axis(output, index, axis=1)[:, 0]
        observed = seen.length > 0
        return Eagle3State(
            cache=state.cache.commit(written, seen.length),
            output=jnp.where(observed[:, None], newest, state.output),
            root=jnp.where(observed, seen.next_token, state.root),
        )

    def propose(self, params: Params, state: Eagle3State, keys: Key[Array, " B"], sampling: SamplingParams) -> Draft:
        """Grow the tree, or draw the chain; verification makes the output exact whatever is proposed."""
        head = self._head(params)

        def run(tokens, output, depth, mask, memory):
            # All nodes of a level share one rotary position, one behind their place in the sequence.
            positions = jnp.broadcast_to(state.cache.length[:, None] + depth, tokens.shape)
            start = state.cache.length + mask.shape[-1] - tokens.shape[-1]
            seen = visible(mask, state.cache.length, memory[0].capacity)
            past = [CacheMemory(layer, start, seen) for layer in memory]
            output, written = head(self._embed(params, tokens), output, positions, past)
            return Level(head.logits(output), output, tuple(KeyValues(**one._asdict()) for one in written))

        output = state.output[:, None]
        first, ids = Level(head.logits(output), carry=output, memory=state.cache.layers), params["draft_to_target"]
        if self.draft_sampling is DraftSampling.GREEDY:
            draft, layers = grow(self.topology, root=state.root, first=first, run=run, draft_to_target=ids)
        else:
            draft, layers = draw_chain(
                self.topology,  # type: ignore[arg-type]
                root=state.root,
                first=first,
                run=run,
                draft_to_target=ids,
                vocab_size=self.config.vocab_size,
                keys=keys,
                sampling=sampling,
            )
        # The guesses lie behind the committed slots, whose number is as before: to hand them on spares a copy.
        cache = Cache(layers=layers, length=state.cache.length)
        return dataclasses.replace(draft, state=dataclasses.replace(state, cache=cache))

    def _head(self, params: Params) -> Eagle3Head:
        return bind(Eagle3Head, self.config, self.precision, params["head"])

    def _embed(self, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return embed(params["embedding"], tokens, self.precision)
