"""How large a layer is, by its kind of mixer and of MLP."""

from __future__ import annotations

import dataclasses

from eagle3_jax.models.config import Experts, GatedDelta, GatedMLP, GroupedQuery, Latent, LayerConfig
from eagle3_jax.models.config.stacks import MLP, Mixer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """Numbers in a layer, or in several together, by what happens to them.

    Attributes:
        query_output: Matrices that are divided by query heads: queries, outputs, and what expands a latent.
        key_value: Matrices that are divided by key heads, as far as there are some; all that leads to a latent.
        mlp: Gate, up and down projections that every token goes through.
        experts: The same, and their biases, of all experts together.
        routers: What chooses experts, and gates of shared ones.
        vectors: Norms and biases, sinks, convolutions, decays.
        cache_values_per_token: What a token adds to the caches: a key and a value, ``2·C·H``, or a latent, ``r + dr``.
        state_values: What a sequence has whatever its length, in float32: the states of recurrences, ``Hv·dk·dv``.
        window_values: The inputs that a convolution looks back at, ``(K - 1)·(2·Hk·dk + Hv·dv)``.
    """

    query_output: int = 0
    key_value: int = 0
    mlp: int = 0
    experts: int = 0
    routers: int = 0
    vectors: int = 0
    cache_values_per_token: int = 0
    state_values: int = 0
    window_values: int = 0

    def __add__(self, other: LayerSizes) -> LayerSizes:
        """Of both together."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return LayerSizes(**dict(zip(self.names(), (one + two for one, two in pairs), strict=True)))

    def times(self, count: int) -> LayerSizes:
        """Of ``count`` such layers."""
        return LayerSizes(**{name: count * getattr(self, name) for name in self.names()})

    @classmethod
    def names(cls) -> list[str]:
        """Of the fields."""
        return [field.name for field in dataclasses.fields(cls)]


def layer_sizes(layer: LayerConfig, *, inputs: int, width: int) -> LayerSizes:
    """Of one layer.

    Args:
        layer: Its description.
        inputs: Width that its mixer reads; twice the residual stream's in the first layer of an EAGLE-3 head.
        width: ``D``, of the residual stream.
    """
    norms = LayerSizes(vectors=inputs + width)  # before the mixer and before the MLP
    return norms + _mixer(layer.mixer, inputs, width) + _mlp(layer.mlp, width)


def _mixer(mixer: Mixer, inputs: int, width: int) -> LayerSizes:
    if isinstance(mixer, Latent):
        return _latent(mixer, inputs, width)
    if isinstance(mixer, GatedDelta):
        return _delta(mixer, inputs, width)
    return _grouped(mixer, inputs, width)


def _grouped(mixer: GroupedQuery, inputs: int, width: int) -> LayerSizes:
    attended, kv = mixer.num_heads * mixer.head_dim, 2 * mixer.num_kv_heads * mixer.head_dim
    queries = (2 if mixer.output_gate else 1) * attended
    vectors = 2 * mixer.head_dim if mixer.qk_norm else 0
    vectors += queries + kv if mixer.qkv_bias else 0
    vectors += width if mixer.o_bias else 0
    vectors += mixer.num_heads if mixer.sinks else 0
    return LayerSizes(
        query_output=inputs * queries + attended * width,
        key_value=inputs * kv,
        vectors=vectors,
        cache_values_per_token=kv,
    )


def _latent(mixer: Latent, inputs: int, width: int) -> LayerSizes:
    heads, r, latent = mixer.num_heads, mixer.kv_rank, mixer.kv_rank + mixer.rope_dim
    queries = heads * (mixer.nope_dim + mixer.rope_dim)
    expanded = heads * (mixer.nope_dim + mixer.value_dim) * r + heads * mixer.value_dim * width
    vectors = r + (latent + width if mixer.bias else 0)
    if mixer.q_rank is None:
        to_queries, shared = inputs * queries, 0
    else:
        to_queries, shared = mixer.q_rank * queries, inputs * mixer.q_rank
        vectors += mixer.q_rank * (2 if mixer.bias else 1)  # a norm, and a bias
    return LayerSizes(
        query_output=to_queries + expanded,
        key_value=shared + inputs * latent,
        vectors=vectors,
        cache_values_per_token=latent,
    )


def _delta(mixer: GatedDelta, inputs: int, width: int) -> LayerSizes:
    values, heads = mixer.num_value_heads * mixer.value_dim, mixer.num_value_heads
    channels = 2 * mixer.num_key_heads * mixer.key_dim + values
    return LayerSizes(
        # queries, keys and values; their gate; two numbers for every state; the output
        query_output=inputs * (channels + values + 2 * heads) + values * width,
        vectors=channels * mixer.kernel + 2 * heads + mixer.value_dim,
        state_values=heads * mixer.key_dim * mixer.value_dim,
        window_values=(mixer.kernel - 1) * channels,
    )


def _mlp(mlp: MLP, width: int) -> LayerSizes:
    if isinstance(mlp, GatedMLP):
        return LayerSizes(mlp=3 * width * mlp.width, vectors=2 * mlp.width + width if mlp.bias else 0)
    return LayerSizes(
        mlp=3 * width * mlp.shared_width,
        experts=mlp.num_experts * (3 * width * mlp.width + (2 * mlp.width + width if mlp.bias else 0)),
        routers=mlp.num_experts * width + (width if mlp.shared_gate else 0),
        vectors=mlp.num_experts * (mlp.bias + (mlp.router == "sigmoid")),  # a bias, and a correction
    )


def share_of_experts(mlp: MLP, tokens: int) -> float:
    """The share of a layer's experts that so many tokens go through, ``1 - (1 - k/E)^N``; 1 where there are none.

    It is the mean for tokens that choose independently and evenly. Neighbours in a text choose alike and experts are
    not equally popular, so a real forward reads fewer.

    Args:
        mlp: Of the layer.
        tokens: ``N``.
    """
    if not isinstance(mlp, Experts):
        return 1.0
    return 1.0 - (1.0 - mlp.per_token / mlp.num_experts) ** tokens


def dividing_heads(mixer: Mixer) -> int:
    """Heads that accelerators divide between them: of queries, or of keys where a recurrence has fewer of those."""
    return mixer.num_key_heads if isinstance(mixer, GatedDelta) else mixer.num_heads


def key_heads(mixer: Mixer) -> int:
    """Heads that keys and values are divided by: a latent is one."""
    if isinstance(mixer, Latent):
        return 1
    return mixer.num_key_heads if isinstance(mixer, GatedDelta) else mixer.num_kv_heads


def inner_width(layer: LayerConfig) -> int:
    """The inner vectors of a token in a layer, together."""
    mixer, mlp = layer.mixer, layer.mlp
    inner = 2 * mlp.width if isinstance(mlp, GatedMLP) else 2 * (mlp.per_token * mlp.width + mlp.shared_width)
    if isinstance(mixer, Latent):  # each head's query, and what it attended to, in the latent's space
        return inner + 2 * mixer.num_heads * (mixer.kv_rank + mixer.rope_dim)
    if isinstance(mixer, GatedDelta):
        return inner + 2 * mixer.num_key_heads * mixer.key_dim + 2 * mixer.num_value_heads * mixer.value_dim
    gate = mixer.num_heads * mixer.head_dim if mixer.output_gate else 0
    return inner + (mixer.num_heads + 2 * mixer.num_kv_heads) * mixer.head_dim + gate


def keys_read(mixer: Mixer, context: int, tokens: int) -> int:
    """Keys of a sequence that any of its new tokens sees, the new ones included; none in a recurrence."""
    if isinstance(mixer, GatedDelta):
        return 0
    if isinstance(mixer, GroupedQuery) and mixer.window is not None:
        return min(context, mixer.window - 1) + tokens
    if isinstance(mixer, GroupedQuery) and mixer.chunk is not None:
        return context % mixer.chunk + tokens
    return context + tokens


def mixing_flops(mixer: Mixer, context: int, tokens: int) -> float:
    """Operations in which new tokens meet what stands before them and each other, or a state.

    In attention ``4·heads·H`` for every pair of a query and a key that it sees: a product with the key and one with the
    value. With latents ``2·heads·(2·r + dr)``, in the absorbed form. In a recurrence ``6·Hv·dk·dv`` for every token:
    what the state says of its key, the change, and what it says of the query.
    """
    if isinstance(mixer, GatedDelta):
        return 6.0 * tokens * mixer.num_value_heads * mixer.key_dim * mixer.value_dim
    pairs = _pairs(mixer, context, tokens)
    if isinstance(mixer, Latent):
        return 2.0 * pairs * mixer.num_heads * (2 * mixer.kv_rank + mixer.rope_dim)
    return 4.0 * pairs * mixer.num_heads * mixer.head_dim


def _pairs(mixer: GroupedQuery | Latent, context: int, tokens: int) -> float:
    """Queries times the keys that each of them meets."""
    window = mixer.window if isinstance(mixer, GroupedQuery) else None
    if isinstance(mixer, GroupedQuery) and mixer.chunk is not None:
        return float(sum(position % mixer.chunk + 1 for position in range(context, context + tokens)))
    whole = tokens if window is None else min(max(window - context, 0), tokens)  # the first ones, which see it all
    return whole * (context + (whole + 1) / 2) + (tokens - whole) * (window or 0)
