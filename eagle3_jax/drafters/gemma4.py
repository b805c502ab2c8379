"""Gemma 4's assistant: a small model that reads the target's own keys and values.

The assistants that Google publishes with Gemma 4 (transformers' ``gemma4_assistant``). A step reads
a token and a state, and gives the distribution of the next token and the next state::

    x_0 = pre([√D · embedding(token); state])         the target's embedding and final state
    y   = norm(layers(x_0))                           queries alone, keys and values of the target
    q   = softmax(table · y);     state' = post(y)    the next step reads the drafted token

The first step reads the newest token ``x_{L-1}`` and the target's state after its final norm at
``x_{L-2}``, the last token that it has run. The layers have no keys: each attends to those that a
layer of the target has of ``x_0 .. x_{L-2}``. Every step is at position ``L-1`` and sees the same
keys, so the drafter has neither a cache nor a prefill, and a tree costs no more memory than a
chain. It never sees keys of drafted tokens: only the state tells a step what was drafted before.

In layers with a window of ``W`` a step sees the ``W + 1`` newest keys, where the target sees ``W``
with its own. After a round of which no draft token was accepted it sees ``W``: transformers' cache
has no more then, and these are the drafts that it makes.

The E models have a large vocabulary for their size. Their assistants sort it into clusters
(``token_ordering``), choose the best few by a centroid of each, and compute the logits of their
tokens alone. All other tokens have the smallest of these logits, less one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.cache import Cache, KeyValue, KeyValues
from eagle3_jax.devices.kernels import indices
from eagle3_jax.devices.sharding import VOCAB, Axis
from eagle3_jax.drafters.base import LastState, LastStateDrafter
from eagle3_jax.drafters.grow import DraftInputs, Level
from eagle3_jax.models.config import (
    DecoderConfig,
    GroupedQuery,
    LayerConfig,
    check_range,
    check_sizes,
    grouped,
    heads_of,
)
from eagle3_jax.models.context import BlockContext, SharedContext
from eagle3_jax.models.decoder import Block
from eagle3_jax.models.functional import Params, call_cached
from eagle3_jax.models.layers import (
    Linear,
    Precision,
    RMSNorm,
    embed,
    matmul_precision,
    normal_param,
    product_by_table,
)
from eagle3_jax.models.quantised import OUTPUT
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.types import Draft, Observation, SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4AssistantConfig:
    """An assistant of Gemma 4.

    Attributes:
        vocab_size: ``V``, the target's.
        target_width: ``D``, width of the target.
        hidden_width: ``d``, width of the assistant's residual stream.
        layers: Its layers, all of which share keys.
        key_layers: For each of them the target's layer whose keys and values it reads.
        num_target_layers: ``L`` of the target, whose state after the final norm is feature ``L +
            1``.
        max_positions: Longest sequence that it was built for.
        norm_eps: Added to the mean square in RMSNorm.
        num_centroids: Number of clusters of the vocabulary; ``None`` computes all logits.
        num_clusters: Number of clusters whose tokens can be drafted at a time.
        draft_length: Number of tokens of a draft by default; ``None`` for that of the library.
    """

    vocab_size: int
    target_width: int
    hidden_width: int
    layers: tuple[LayerConfig, ...]
    key_layers: tuple[int, ...]
    num_target_layers: int
    max_positions: int = 2048
    norm_eps: float = 1e-6
    num_centroids: int | None = None
    num_clusters: int = 1
    draft_length: int | None = None

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "target_width", "hidden_width", "num_layers", "num_target_layers")
        check_sizes(self, *sizes, "max_positions", "num_centroids", "num_clusters", "draft_length")
        check_range(self, 1e-37, 1.0, "norm_eps")
        if not all(grouped(layer).shares_keys for layer in self.layers):
            raise ValueError("a layer has keys of its own; expected shares_keys in every layer")
        if len(self.key_layers) != len(self.layers):
            raise ValueError(
                f"key_layers are {len(self.key_layers)}; expected one for each of the"
                f" {len(self.layers)} layers"
            )

        count = self.num_centroids
        if count is not None and self.vocab_size % count:
            raise ValueError(
                f"num_centroids {count} does not divide the vocabulary of {self.vocab_size}; all"
                " clusters have the same number of tokens"
            )
        if count is not None and self.num_clusters > count:
            raise ValueError(
                f"centroid_intermediate_top_k is {self.num_clusters} of {count} centroids; expected"
                " at most as many"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers of the assistant."""
        return len(self.layers)

    @property
    def width(self) -> int:
        """``D``: it reads the target's embedding and state, and returns a state of that width."""
        return self.target_width

    @property
    def draft_vocab_size(self) -> int:
        """``W``, all of ``V``."""
        return self.vocab_size

    @property
    def aux_layers(self) -> tuple[int]:
        """The output of the target's final norm."""
        return (self.num_target_layers + 1,)

    def misfit(self, target: DecoderConfig) -> str:
        """Returns why a target has not the keys that the layers read; empty if it has them."""
        for index, (layer, source) in enumerate(zip(self.layers, self.key_layers, strict=True)):
            mixer = grouped(layer)
            keys = f"{mixer.num_kv_heads} key heads of {mixer.head_dim} channels"
            needed = f"layer {index} reads {keys} of target layer {source}"
            theirs = target.layers[source].mixer if source < target.num_layers else None
            if not isinstance(theirs, GroupedQuery) or theirs.shares_keys:
                return f"{needed}, which has no keys of its own"
            if heads_of(layer) != heads_of(target.layers[source]):
                return f"{needed}, which has {theirs.num_kv_heads} of {theirs.head_dim}"
            if (mixer.window is None) != (theirs.window is None):
                return f"{needed}, and only one of the two has a window"
        return ""


class Gemma4AssistantNetwork(nnx.Module):
    """The network of one step."""

    def __init__(self, config: Gemma4AssistantConfig, *, precision: Precision, rngs: nnx.Rngs):
        width = config.hidden_width
        options: dict[str, Any] = {"precision": precision, "rngs": rngs}
        norms: dict[str, Any] = {"norm_eps": config.norm_eps, "norm_kind": "float32"}
        self.pre = Linear(2 * config.target_width, width, **options)
        self.blocks = nnx.List(
            [Block(layer, width=width, **norms, **options) for layer in config.layers]
        )
        self.norm = RMSNorm(width, config.norm_eps, "float32")
        self.post = Linear(width, config.target_width, **options)

        # With centroids some rows of the table are looked up, so it is not divided.
        axes = () if config.num_centroids else (Axis(VOCAB, config.vocab_size), None)
        shape = (config.vocab_size, width)
        self.table = normal_param(rngs, shape, width**-0.5, axes=axes, product=OUTPUT)
        if config.num_centroids:
            self.centroids = Linear(width, config.num_centroids, **options)
        self.config = config
        self.precision = precision

    def __call__(
        self,
        embedded: Float[Array, "B T D"],
        state: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        contexts: Sequence[SharedContext],
    ) -> Float[Array, "B T d"]:
        """Runs one step for every token; returns the normalised state."""
        x = self.pre(jnp.concatenate([embedded, state], axis=-1))
        for block, context in zip(self.blocks, contexts, strict=True):
            x, _ = call_cached(block, x, positions, context)
        return self.norm(x)

    def logits(
        self, normed: Float[Array, "B T d"], ordering: Int[Array, " W"] | None
    ) -> Float[Array, "B T W"]:
        """Returns logits in float32 over draft ids: tokens, or places in the ``ordering``."""
        table = self.table[...]
        if ordering is None:
            return product_by_table(normed, table, self.precision).astype(jnp.float32)

        count = self.config.num_centroids
        clusters = ordering.reshape(count, -1)
        _, best = lax.top_k(self.centroids(normed), self.config.num_clusters)
        batch, size, width = normed.shape
        rows = embed(table, clusters[best].reshape(batch, -1), self.precision)
        operands = self.precision.operands
        chosen = jnp.einsum(
            "btd,btnd->btn",
            normed.astype(operands),
            rows.reshape(batch, size, -1, width).astype(operands),
            preferred_element_type=self.precision.activations,
            precision=matmul_precision(operands),
        ).astype(jnp.float32)

        # The logits of a cluster are next to each other, in the order of its tokens.
        least = jnp.min(chosen, axis=-1)[..., None, None] - 1.0
        others = jnp.broadcast_to(least, (batch, size, *clusters.shape))
        put = others.at[indices(batch)[:, None, None], indices(size)[None, :, None], best]
        return put.set(chosen.reshape(*best.shape, -1)).reshape(batch, size, -1)


class Gemma4AssistantState(LastState, kw_only=True):
    """The input of the first step.

    Attributes:
        hidden: ``[B D]``, the target's final state at the last committed token that it has run.
        root: ``[B]``, the token that the target chose after it.
        is_longer: ``[B]``, whether more than one token was committed last, so that windows have one
            key more.
    """

    is_longer: Bool[Array, " B"]


@dataclasses.dataclass(frozen=True)
class Gemma4AssistantDrafter(LastStateDrafter):
    """Drafts a chain or a tree with an assistant of Gemma 4.

    Parameters are a dictionary: ``head`` (the network), ``embedding [V D]`` (the target's) and,
    with centroids, ``draft_to_target [V]``: the tokens, cluster by cluster.
    """

    network: ClassVar[type[nnx.Module]] = Gemma4AssistantNetwork
    reads_cache: ClassVar[bool] = True

    config: Gemma4AssistantConfig
    topology: Topology | None = None

    def __post_init__(self) -> None:
        if self.topology is None and self.config.draft_length is not None:
            object.__setattr__(self, "topology", Chain(self.config.draft_length))
        super().__post_init__()

    def init(self, params: Params, batch: int, capacity: int) -> Gemma4AssistantState:
        """See :class:`eagle3_jax.types.Drafter`."""
        state = super().init(params, batch, capacity)
        none = jnp.zeros((batch,), jnp.bool_)
        return Gemma4AssistantState(hidden=state.hidden, root=state.root, is_longer=none)

    def observe(
        self, params: Params, state: Gemma4AssistantState, seen: Observation
    ) -> Gemma4AssistantState:
        """Stores the newest token and the state before it."""
        is_longer = jnp.where(seen.length > 0, seen.length > 1, state.is_longer)
        latest = super().observe(params, state, seen)
        return Gemma4AssistantState(hidden=latest.hidden, root=latest.root, is_longer=is_longer)

    def propose(
        self,
        params: Params,
        state: Gemma4AssistantState,
        keys: Key[Array, " B"],
        sampling: SamplingParams,
        *,
        cache: Cache,
    ) -> Draft:
        """Drafts from the target's committed keys and values, which are in ``cache``.

        Raises:
            ValueError: The cache has not the keys that the assistant reads.
        """
        head = self.bind(params)
        contexts = self._contexts(cache, state.is_longer)
        ordering = params.get("draft_to_target")

        def run(tokens, carry, depth, mask, memory):
            del depth, mask
            positions = jnp.broadcast_to(cache.length[:, None], tokens.shape)
            embedded = embed(params["embedding"], tokens, self.precision)
            # The factor is rounded first, as in the target.
            embedded = embedded * jnp.asarray(self.config.target_width**0.5, embedded.dtype)
            normed = head(embedded, carry, positions, contexts)
            return Level(head.logits(normed, ordering), head.post(normed), memory)

        first = run(state.root[:, None], state.hidden[:, None], 0, None, ())
        inputs = DraftInputs(
            root=state.root,
            first=first,
            run=run,
            draft_to_target=ordering,
            vocab_size=self.config.vocab_size,
            keys=keys,
            sampling=sampling,
        )
        draft, _ = self.grow(inputs)
        return draft

    def _contexts(self, cache: Cache, is_longer: Bool[Array, " B"]) -> list[SharedContext]:
        """Returns for every layer the target's keys, and which of them a step sees."""
        # The last committed token. A row without any sees the first slot: something must be seen.
        newest = jnp.maximum(cache.length - 1, 0)[:, None]
        contexts = []
        for layer, source in zip(self.config.layers, self.config.key_layers, strict=True):
            mixer = grouped(layer)
            held = cache.layers[source] if source < len(cache.layers) else None
            shape = held.keys.shape[1::2] if isinstance(held, KeyValues) else None
            if not isinstance(held, KeyValues) or shape != heads_of(layer):
                raise ValueError(
                    f"the target's layer {source} caches {_described(held)}; the assistant reads"
                    f" {mixer.num_kv_heads} key heads of {mixer.head_dim} channels there, so give"
                    " the target that it was trained for"
                )

            slots = indices(held.capacity)[None, :]
            visible = slots <= newest
            if mixer.window is not None:
                more = is_longer[:, None].astype(jnp.int32)
                visible &= slots > newest - mixer.window - more
            context = BlockContext(mask=visible[:, None, :])
            contexts.append(SharedContext(context, KeyValue(held.keys, held.values)))
        return contexts


def _described(layer: Any) -> str:
    """Describes the cache of a layer."""
    if not isinstance(layer, KeyValues):
        return "no keys"
    heads, channels = layer.keys.shape[1::2]
    return f"{heads} of {channels} channels"
