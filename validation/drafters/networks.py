"""The network of every drafting method that vLLM runs, over tensors of the names that vLLM reads.

Written from the papers and from vLLM's conventions, for training the tiny heads: whole sequences, no cache, and nothing
of the library's own drafters, which are compared with these heads. ``n`` is the anchor: the tokens ``x_0 .. x_n`` are
known, and the target's states up to that of ``x_{n-1}``. Every network gives logits ``[B T K V]``, whose entry
``(n, k - 1)`` is for the token at ``n + k``, drafted as if ``x_n .. x_{n+k-1}`` had been accepted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

EPS, THETA = 1e-5, 10_000.0

Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Text:
    """Sequences, and what the target saw in them.

    Attributes:
        tokens: ``[B T]``.
        states: Of every layer, the embedding first and the last before the final norm: ``[B T L+1 D]``.
        final: After the final norm, ``[B T D]``.
        embedding: The target's, ``[V D]``.
        output: The target's output matrix, ``[V D]``.
    """

    tokens: Int[Array, "B T"]
    states: Float[Array, "B T layers D"]
    final: Float[Array, "B T D"]
    embedding: Float[Array, "V D"]
    output: Float[Array, "V D"]

    def ahead(self, steps: int) -> Int[Array, "B T"]:
        """The token ``steps`` further, at the place of every token; the last stands in where there is none."""
        places = jnp.minimum(jnp.arange(self.tokens.shape[1]) + steps, self.tokens.shape[1] - 1)
        return self.tokens[:, places]


@dataclasses.dataclass(frozen=True)
class Heads:
    """Shape of an attention: query heads, key/value heads, and the width of each."""

    queries: int = 4
    keys: int = 2
    width: int = 32


def linear(weights: Weights, name: str, x: Array) -> Array:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def norm(weights: Weights, name: str, x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weights[f"{name}.weight"]


def rotate(x: Float[Array, "B T heads H"], positions: Int[Array, " T"]) -> Array:
    """Rotary embedding, the two halves of a head paired."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * THETA ** (-jnp.arange(half) / half)
    one, other = x[..., :half], x[..., half:]
    return jnp.concatenate(
        [one * jnp.cos(angles) - other * jnp.sin(angles), other * jnp.cos(angles) + one * jnp.sin(angles)], axis=-1
    )


def attention(
    weights: Weights,
    name: str,
    asking: Float[Array, "B R W"],
    positions: Int[Array, " R"],
    mask: Bool[Array, "R S"],
    heads: Heads,
    *,
    asked: Float[Array, "B S W"] | None = None,
    asked_positions: Int[Array, " S"] | None = None,
    norm_heads: bool = False,
) -> Float[Array, "B R D"]:
    """Attention of rows to rows; to themselves unless ``asked`` says otherwise."""
    asked = asking if asked is None else asked
    asked_positions = positions if asked_positions is None else asked_positions

    def split(which: str, x: Array, count: int) -> Array:
        return linear(weights, f"{name}.{which}_proj", x).reshape(*x.shape[:2], count, heads.width)

    queries, keys = split("q", asking, heads.queries), split("k", asked, heads.keys)
    values = split("v", asked, heads.keys)
    if norm_heads:
        queries, keys = norm(weights, f"{name}.q_norm", queries), norm(weights, f"{name}.k_norm", keys)
    queries, keys = rotate(queries, positions), rotate(keys, asked_positions)
    grouped = queries.reshape(*queries.shape[:2], heads.keys, -1, heads.width)
    scores = jnp.einsum("brkgh,bskh->bkgrs", grouped, keys) * heads.width**-0.5
    shares = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    found = jnp.einsum("bkgrs,bskh->brkgh", shares, values).reshape(*asking.shape[:2], -1)
    return linear(weights, f"{name}.o_proj", found)


def feed_forward(weights: Weights, name: str, residual: Array) -> Array:
    """Norm, SwiGLU and residual: the second half of a layer."""
    x = norm(weights, f"{name}.post_attention_layernorm", residual)
    gated = jax.nn.silu(linear(weights, f"{name}.mlp.gate_proj", x)) * linear(weights, f"{name}.mlp.up_proj", x)
    return residual + linear(weights, f"{name}.mlp.down_proj", gated)


def rows_of(length: int, depths: int, start: int) -> tuple[Array, Array]:
    """Positions and mask of the rows ``(n, d)``, depth by depth, of a head that runs along its own proposals.

    A row sees the rows of depth 0 of all anchors up to its own, and those of its own anchor up to its own depth.
    """
    anchor = jnp.tile(jnp.arange(length), depths)
    depth = jnp.repeat(jnp.arange(depths), length)
    confirmed = (depth[None] == 0) & (anchor[None] <= anchor[:, None])
    own = (anchor[None] == anchor[:, None]) & (depth[None] <= depth[:, None])
    return anchor + depth + start, confirmed | own


def run_along(
    step: Callable[[Array, Array, Array, Array], Array], text: Text, features: Float[Array, "B T D"], depths: int
) -> Float[Array, "B T K D"]:
    """Feed a head its own states. Anchor ``n`` starts from the feature of ``n - 1`` beside the token ``x_n``.

    Args:
        step: ``(embedded, states, positions, mask) -> states``, all rows at once.
        text: What is drafted for.
        features: Of every position.
        depths: ``K``.
    """
    fed, states = [], [features[:, :-1]]
    length = features.shape[1] - 1
    for depth in range(depths):
        fed.append(text.embedding[text.ahead(depth)[:, 1:]])
        positions, mask = rows_of(length, depth + 1, 0)
        found = step(jnp.concatenate(fed, axis=1), jnp.concatenate(states, axis=1), positions, mask)
        states.append(found[:, -length:])
    return _anchored(jnp.stack(states[1:], axis=2))


def _anchored(rows: Array) -> Array:
    """Rows of the anchors 1, 2, ...; there is none at 0."""
    return jnp.pad(rows, [(0, 0), (1, 0), *[(0, 0)] * (rows.ndim - 2)])


# ------------------------------------------------------------------------------------------------ the methods


def language_model(weights: Weights, text: Text, depths: int, *, heads: Heads) -> Array:
    """A small decoder of its own: what it drafts for ``n + k`` stands in its row ``n + k - 1``."""
    length = text.tokens.shape[1]
    positions, mask = jnp.arange(length), jnp.tril(jnp.ones((length, length), bool))
    stream, layer = weights["model.embed_tokens.weight"][text.tokens], 0
    while f"model.layers.{layer}.input_layernorm.weight" in weights:
        name = f"model.layers.{layer}"
        x = norm(weights, f"{name}.input_layernorm", stream)
        stream += attention(weights, f"{name}.self_attn", x, positions, mask, heads)
        stream, layer = feed_forward(weights, name, stream), layer + 1
    logits = norm(weights, "model.norm", stream) @ weights["model.embed_tokens.weight"].T
    return jnp.stack([jnp.roll(logits, -depth, axis=1) for depth in range(depths)], axis=2)


def medusa(weights: Weights, text: Text, depths: int) -> Array:
    """Head ``k`` reads the state of ``n - 1`` alone; it does not know ``x_n``."""
    state = text.final[:, :-1]
    logits = []
    for head in range(depths):
        stream = state + jax.nn.silu(linear(weights, f"blocks.{head}.layers.0", state))
        logits.append(linear(weights, f"lm_heads.{head}", stream))
    return _anchored(jnp.stack(logits, axis=2))


def eagle(weights: Weights, text: Text, depths: int, *, heads: Heads) -> Array:
    """EAGLE-1: embedding and state after the final norm through ``fc``; no norm before attention or output."""

    def step(embedded: Array, states: Array, positions: Array, mask: Array) -> Array:
        stream = linear(weights, "fc", jnp.concatenate([embedded, states], axis=-1))
        stream += attention(weights, "layers.0.self_attn", stream, positions, mask, heads)
        return feed_forward(weights, "layers.0", stream)

    return run_along(step, text, text.final, depths) @ text.output.T


def mtp(weights: Weights, text: Text, depths: int, *, heads: Heads) -> Array:
    """MiMo's module: the state first, the embedding zero at position 0; what leaves the last norm is fed back."""
    name = "model.mtp_layers.0"

    def step(embedded: Array, states: Array, positions: Array, mask: Array) -> Array:
        embedded = jnp.where(positions[:, None] == 0, 0.0, embedded)
        both = [norm(weights, f"{name}.hidden_layernorm", states), norm(weights, f"{name}.token_layernorm", embedded)]
        stream = linear(weights, f"{name}.input_proj", jnp.concatenate(both, axis=-1))
        x = norm(weights, f"{name}.input_layernorm", stream)
        stream += attention(weights, f"{name}.self_attn", x, positions, mask, heads)
        return norm(weights, f"{name}.final_layernorm", feed_forward(weights, name, stream))

    return run_along(step, text, text.final, depths) @ text.output.T


def parallel_eagle(
    weights: Weights, text: Text, depths: int, *, heads: Heads, aux: tuple[int, ...], mask_id: int
) -> Array:
    """P-EAGLE: EAGLE-3 whose look-ahead rows hold a mask token and a learned state, so that one forward serves all."""
    features = text.states[:, :-1, jnp.array(aux)]
    batch, length = features.shape[:2]
    fused = linear(weights, "fc", features.reshape(batch, length, -1))
    unknown = linear(weights, "fc", weights["mask_hidden"].reshape(-1))
    tokens = jnp.concatenate([text.tokens[:, 1:], jnp.full((batch, length * (depths - 1)), mask_id)], axis=1)
    ahead = jnp.broadcast_to(unknown, (batch, length * (depths - 1), len(unknown)))
    stream = jnp.concatenate([fused, ahead], axis=1)
    positions, mask = rows_of(length, depths, 0)
    embedded = norm(weights, "layers.0.input_layernorm", text.embedding[tokens])
    x = jnp.concatenate([embedded, norm(weights, "layers.0.hidden_norm", stream)], axis=-1)
    for layer in range(2):
        name = f"layers.{layer}"
        x = norm(weights, f"{name}.input_layernorm", stream) if layer else x
        stream = stream + attention(weights, f"{name}.self_attn", x, positions, mask, heads)
        stream = feed_forward(weights, name, stream)
    logits = linear(weights, "lm_head", norm(weights, "norm", stream))
    return _anchored(logits.reshape(batch, depths, length, -1).swapaxes(1, 2))


def block_diffusion(
    weights: Weights, text: Text, depths: int, *, heads: Heads, aux: tuple[int, ...], mask_id: int, causal: bool
) -> Array:
    """DFlash; with ``causal``, JetSpec. Row ``(n, k)`` holds a mask at position ``n + k`` and predicts that token."""
    batch, length = text.tokens.shape
    features = text.states[:, :, jnp.array(aux)].reshape(batch, length, -1)
    context = norm(weights, "hidden_norm", linear(weights, "fc", features))
    masks = jnp.full((batch, length * depths), mask_id)
    stream = text.embedding[jnp.concatenate([text.tokens, masks], axis=1)]
    anchor, depth = jnp.tile(jnp.arange(length), depths + 1), jnp.repeat(jnp.arange(depths + 1), length)
    before = jnp.arange(length)[None] < anchor[:, None]
    block = anchor[None] == anchor[:, None]
    block &= depth[None] <= depth[:, None] if causal else True
    mask, positions = jnp.concatenate([before, block], axis=1), anchor + depth
    everywhere = jnp.concatenate([jnp.arange(length), positions])
    for layer in range(2):
        name = f"layers.{layer}"
        x = norm(weights, f"{name}.input_layernorm", stream)
        stream += attention(
            weights,
            f"{name}.self_attn",
            x,
            positions,
            mask,
            heads,
            asked=jnp.concatenate([context, x], axis=1),
            asked_positions=everywhere,
            norm_heads=True,
        )
        stream = feed_forward(weights, name, stream)
    logits = norm(weights, "norm", stream) @ text.output.T
    return logits.reshape(batch, depths + 1, length, -1).swapaxes(1, 2)[:, :, 1:]
