"""A target with a recurrent state, which cannot be rolled back, after a layer of attention.

The second layer is a gated linear recurrence, ``S = a S + k v^T``, as in Mamba-2 and gated delta
networks. It keeps a state for every node of a draft and chooses one at the commit.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from eagle3_jax.cache import Cache, KeyValue, KeyValues
from eagle3_jax.decode import LoadedTarget
from eagle3_jax.models.context import cache_mask
from eagle3_jax.types import EmbeddingTables, TargetOutput


@struct.dataclass(kw_only=True)
class Recurrent:
    """A :class:`eagle3_jax.LayerCache` of one state."""

    state: Float[Array, "B K M"]  #: ``[B K M]``, after the last committed token.

    def fill(self, written: Float[Array, "B K M"], count: Int[Array, " B"]) -> Recurrent:
        """Stores ``written``, the state after the last real token."""
        return self.replace(state=written)  # type: ignore[attr-defined]

    def commit(
        self,
        written: Float[Array, "B T K M"],
        length: Int[Array, " B"],
        count: Int[Array, " B"],
        nodes: Int[Array, "B T"] | None,
    ) -> Recurrent:
        """Keeps the state of ``written`` after the last accepted node."""
        last = jnp.maximum(count - 1, 0)
        if nodes is not None:
            last = jnp.take_along_axis(nodes, last[:, None], axis=1)[:, 0]
        chosen = jnp.take_along_axis(written, last[:, None, None, None], axis=1)[:, 0]
        return self.replace(state=jnp.where((count > 0)[:, None, None], chosen, self.state))  # type: ignore[attr-defined]


@dataclasses.dataclass(frozen=True)
class RecurrentTarget:
    """Embedding, attention with absolute positions, a gated recurrence, a norm, the embedding."""

    vocab_size: int = 13  #: ``V``.
    width: int = 8  #: ``D``, of everything.

    def init(self, seed: int) -> dict[str, Array]:
        """Returns random parameters under which every token affects the output."""
        rng = np.random.default_rng(seed)
        shapes = {
            name: (self.width, self.width) for name in ("q", "k", "v", "o", "rq", "rk", "rv", "ro")
        }
        params = {name: rng.normal(0, shape[0] ** -0.5, shape) for name, shape in shapes.items()}
        params |= {
            "embedding": rng.normal(0, 1.5, (self.vocab_size, self.width)),
            "gate": rng.normal(0, 1, self.width),
        }
        return {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}

    def init_cache(self, batch: int, capacity: int) -> Cache:
        attention = KeyValues.allocate(
            batch=batch, capacity=capacity, num_kv_heads=1, head_dim=self.width, dtype=jnp.float32
        )
        return Cache.of((attention, self.empty(batch)), batch=batch)

    def empty(self, batch: int) -> Recurrent:
        """Returns the state before a text."""
        return Recurrent(state=jnp.zeros((batch, self.width, self.width), jnp.float32))

    def __call__(
        self,
        params: dict[str, Array],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "#B T T"],
        cache: Cache | None = None,
        aux_layers: tuple[int, ...] = (),
        length: Int[Array, " B"] | None = None,
    ) -> TargetOutput:
        batch, size = tokens.shape
        mask = jnp.broadcast_to(mask, (batch, size, size))
        attention, recurrent = cache.layers if cache is not None else (None, self.empty(batch))
        embedded = params["embedding"][tokens]
        rates = 0.7 ** jnp.arange(1, self.width + 1, dtype=jnp.float32)
        angle = positions[:, :, None].astype(jnp.float32) * rates[None, None]
        x = embedded + jnp.sin(angle)
        keys, values = (jnp.matmul(x, params[name])[:, None] for name in "kv")
        keys_values = KeyValue(keys, values)
        seen = mask
        if attention is not None:
            keys_values = attention.write(keys_values, cache.length)
            seen = cache_mask(mask, cache.length, attention.capacity)
        scores = jnp.einsum("btd,bsd->bts", x @ params["q"], keys_values.keys[:, 0])
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        first = (
            embedded + jnp.einsum("bts,bsd->btd", weights, keys_values.values[:, 0]) @ params["o"]
        )

        states = self.states(params, first, mask, recurrent.state)
        read = jnp.einsum("btk,btkm->btm", first @ params["rq"], states[:, 1:])
        second = first + jnp.tanh(read) @ params["ro"]
        final = second / jnp.sqrt(jnp.mean(second**2, axis=-1, keepdims=True) + 1e-6)
        written = states[:, 1:]
        # A prompt needs no state but that after its last token.
        if cache is None:
            real = jnp.full((batch,), size) if length is None else length
            written = jnp.take_along_axis(states, real[:, None, None, None], axis=1)[:, 0]
        streams = (embedded, first, second, final)
        chosen = [streams[layer] for layer in aux_layers]
        features = jnp.stack(chosen, axis=2) if chosen else final[:, :, None][:, :, :0]
        return TargetOutput(final=final, features=features, written=(keys_values, written))

    def states(
        self,
        params: dict[str, Array],
        x: Float[Array, "B T D"],
        mask: Bool[Array, "B T T"],
        start: Float[Array, "B K M"],
    ) -> Float[Array, "B T+1 K M"]:
        """Returns the states before the block and after each node: decayed, plus an update."""
        size = x.shape[1]
        others = mask & ~jnp.eye(size, dtype=bool)[None]
        # 0 is the committed state.
        parents = jnp.max(jnp.where(others, jnp.arange(1, size + 1)[None, None], 0), axis=-1)
        decay = jax.nn.sigmoid(x @ params["gate"])[:, :, None, None]
        added = jnp.einsum("btk,btm->btkm", x @ params["rk"], x @ params["rv"])
        before = jnp.concatenate([start[:, None], jnp.zeros_like(added)], axis=1)

        def visit(states: Array, node: Array) -> tuple[Array, None]:
            parent = parents[:, node][:, None, None, None]
            of_parent = jnp.take_along_axis(states, parent, axis=1)[:, 0]
            return states.at[:, node + 1].set(decay[:, node] * of_parent + added[:, node]), None

        return jax.lax.scan(visit, before, jnp.arange(size))[0]

    def unembed(
        self, params: dict[str, Array], final: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows V"]:
        return final @ params["embedding"].T

    def tables(self, params: dict[str, Array]) -> EmbeddingTables:
        return EmbeddingTables(params["embedding"])


def target(vocab_size: int = 13, *, seed: int = 0) -> LoadedTarget:
    """Returns a random recurrent target."""
    model = RecurrentTarget(vocab_size)
    return LoadedTarget(model, model.init(seed), vocab_size, 512, name="recurrent")
