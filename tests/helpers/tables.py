"""A target and a drafter that are tables: exact distributions, and very cheap tokens.

The target reads its context through the cache, the mask and the positions that the loop gives it,
so a wrong slot, a wrong ancestor or a wrong position gives it another context, and the distribution
of the output changes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from eagle3_jax.cache import Cache, KeyValue, KeyValues
from eagle3_jax.decode import LoadedDrafter, LoadedTarget
from eagle3_jax.drafters.base import ShapedDrafter
from eagle3_jax.drafters.grow import DraftInputs, Level
from eagle3_jax.models.context import cache_mask
from eagle3_jax.topology import Chain, Topology
from eagle3_jax.types import Draft, DraftSampling, Observation, SamplingParams, TargetOutput


@dataclasses.dataclass(frozen=True)
class TableTarget:
    """The next token depends on the last ``order`` tokens, by a table of logits.

    The table ``[V^order V]`` is its parameters. A context is the number whose digits in base ``V`` are its tokens, the newest one last; what
    stood before the text counts as token 0.
    """

    vocab_size: int  #: ``V``.
    order: int  #: Tokens of context.

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Returns one layer whose keys are a token and its position."""
        layer = KeyValues.allocate(
            batch=batch, capacity=capacity, num_kv_heads=1, head_dim=2, dtype=jnp.float32
        )
        return Cache.of((layer,), batch=batch)

    def __call__(
        self,
        params: Float[Array, "C V"],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "#B T T"],
        cache: Cache | None = None,
        aux_layers: tuple[int, ...] = (),
        length: Int[Array, " B"] | None = None,
    ) -> TargetOutput:
        """See :class:`eagle3_jax.types.TargetModel`."""
        block = jnp.stack([tokens, positions], axis=-1).astype(jnp.float32)[:, None]
        keys_values = KeyValue(block, block)

        seen_by = mask
        if cache is not None:
            (layer,) = cache.layers
            keys_values = layer.write(keys_values, cache.length)
            seen_by = cache_mask(mask, cache.length, layer.capacity)

        token = keys_values.keys[:, 0, :, 0]
        key_positions = keys_values.keys[:, 0, :, 1]

        row = jnp.zeros(tokens.shape, jnp.int32)
        for back in range(self.order):
            ancestors = (positions - back).astype(jnp.float32)
            is_ancestor = seen_by & (key_positions[:, None, :] == ancestors[:, :, None])
            seen = jnp.sum(jnp.where(is_ancestor, token[:, None, :], 0.0), axis=-1).astype(
                jnp.int32
            )
            row = row + seen * self.vocab_size**back

        final = params[jnp.clip(row, 0, params.shape[0] - 1)]
        features = (
            jnp.stack([final] * len(aux_layers), axis=2)
            if aux_layers
            else final[:, :, None][:, :, :0]
        )
        return TargetOutput(final=final, features=features, written=(keys_values,))

    def unembed(self, params: Any, final: Float[Array, "*rows V"]) -> Float[Array, "*rows V"]:
        """Returns the final states, which are the logits."""
        return final


@struct.dataclass(kw_only=True)
class Window:
    """The last tokens of each row."""

    tokens: Int[Array, "B order"]  #: ``[B order]``, the root last; 0 before the text.


@dataclasses.dataclass(frozen=True)
class TableDrafter(ShapedDrafter):
    """Drafts with the library's own growth from a table of logits.

    Its parameters are the table ``[V^order W]`` over ``W`` draft ids, and the target id of each.
    """

    vocab_size: int  #: ``V``.
    order: int  #: Tokens of context.
    topology: Topology = Chain(3)  #: Chain, dynamic tree or static tree.
    #: Whether the tokens of a chain or a static tree are sampled.
    draft_sampling: DraftSampling = DraftSampling.GREEDY

    aux_layers = ()

    def init(self, params: Any, batch: int, capacity: int) -> Window:
        return Window(tokens=jnp.zeros((batch, self.order), jnp.int32))

    def observe(self, params: Any, state: Window, seen: Observation) -> Window:
        # The oldest known token drops out for each one that comes in; the root of before is the
        # first of `seen`.
        known = jnp.concatenate(
            [state.tokens[:, :-1], seen.tokens, seen.next_token[:, None]], axis=1
        )
        columns = seen.length[:, None] + jnp.arange(self.order)[None, :]
        newest = jnp.take_along_axis(known, columns, axis=1).at[:, -1].set(seen.next_token)
        return Window(tokens=jnp.where(seen.length[:, None] > 0, newest, state.tokens))

    def propose(
        self, params: Any, state: Window, keys: Key[Array, " B"], sampling: SamplingParams
    ) -> Draft:
        table, ids = params
        size = table.shape[0]
        context = jnp.zeros(state.tokens.shape[:1], jnp.int32)
        for back in range(self.order):
            context = context + state.tokens[:, self.order - 1 - back] * self.vocab_size**back
        context = context[:, None]
        root = state.tokens[:, -1]

        def run(tokens, carry, depth, mask, memory):
            after = (carry * self.vocab_size + tokens) % size
            return Level(logits=table[after], carry=after, memory=())

        first = Level(logits=table[context], carry=context, memory=())
        inputs = DraftInputs(root, first, run, ids, self.vocab_size, keys, sampling)
        return self.grow(inputs)[0]


def target(logits: np.ndarray, order: int) -> LoadedTarget:
    """Returns the target of a table ``[V^order V]`` of logits."""
    return LoadedTarget(
        TableTarget(logits.shape[1], order), jnp.asarray(logits, jnp.float32), logits.shape[1], 512
    )


def drafter(
    logits: np.ndarray,
    order: int,
    topology: Topology = Chain(3),
    *,
    ids: tuple[int, ...] | None = None,
    draft_sampling: DraftSampling = DraftSampling.GREEDY,
) -> LoadedDrafter:
    """Returns the drafter of a table; with ``ids`` it can propose these tokens only."""
    ids = tuple(range(logits.shape[1])) if ids is None else ids
    method = TableDrafter(logits.shape[1], order, topology, draft_sampling)
    table = jnp.asarray(logits[:, list(ids)], jnp.float32)
    return LoadedDrafter(method, (table, jnp.asarray(ids, jnp.int32)))
