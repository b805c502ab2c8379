"""Frozen, hashable descriptions of targets and draft heads.

Every shape follows from them. They need no JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

# Sizes and positions are 32-bit on the device, and sums of a few of them must fit as well.
MOST = 1_000_000_000
# A config.json with more layers would fill the memory before any other check could refuse it.
MOST_LAYERS = 10_000
# Bounds of what is added to a mean square. Below, it is zero in float32, and a row of zeros becomes
# NaN.
_EPS = (1e-37, 1.0)


def check_range(config: Any, least: int | float, most: int | float, *names: str) -> None:
    """Checks that fields are within a range; ``None`` is always allowed.

    Args:
        config: A dataclass.
        least: Smallest allowed value.
        most: Largest allowed value.
        names: Names of its fields.

    Raises:
        ValueError: A field is outside the range, or NaN.
    """
    for name in names:
        value = getattr(config, name)
        if value is not None and not least <= value <= most:
            raise ValueError(
                f"{name} is {str(value)[:40]}; expected a number from {least:g} to {most:g}"
            )


def check_sizes(config: Any, *names: str) -> None:
    """Checks that the fields ``names`` are from 1 to ``MOST``; ``None`` is always allowed.

    Raises:
        ValueError: A field is outside this range.
    """
    check_range(config, 1, MOST, *names)


RopeType = Literal["default", "linear", "proportional", "llama3", "yarn", "longrope"]

# The statistics and weights of a norm of queries and keys. per-head: statistics of each head, one
# weight vector for all heads (Qwen3). own-weights: statistics of each head, weights for each head
# (Cohere). whole: statistics of all heads together, weights for each head (OLMo-2).
QKNorm = Literal["per-head", "own-weights", "whole"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its published context extensions."""

    theta: float = 10_000.0  #: Base of the geometric progression of wavelengths.
    #: ``default``, ``linear`` (position interpolation), ``proportional`` (Gemma 4), ``llama3``,
    #: ``yarn`` (Peng et al., 2023) or ``longrope`` (Ding et al., 2024). With ``longrope``, only
    #: texts of up to ``original_max_positions`` tokens are computed.
    type: RopeType = "default"
    factor: float = 1.0  #: Factor by which the context is extended.
    #: Context length before the extension (``llama3``, ``yarn`` and ``longrope``).
    original_max_positions: int | None = None
    #: ``llama3``: wavelengths above ``original / low_freq_factor`` are fully stretched.
    low_freq_factor: float = 1.0
    #: ``llama3``: wavelengths below ``original / high_freq_factor`` do not change.
    high_freq_factor: float = 4.0
    #: ``yarn``: a dimension with more rotations than this in the context does not change.
    beta_fast: float = 32.0
    #: ``yarn``: a dimension with fewer rotations than this is fully interpolated.
    beta_slow: float = 1.0
    #: ``yarn``, ``longrope``: scale of cosine and sine; ``None`` derives it from ``factor``.
    attention_factor: float | None = None
    #: ``yarn``: numerator exponent of the derived attention factor (DeepSeek's variant).
    mscale: float | None = None
    #: ``yarn``: denominator exponent of the derived attention factor.
    mscale_all_dim: float | None = None
    #: ``yarn``: whether the correction range is rounded outwards to whole dimensions.
    truncate: bool = True
    #: Share of a head's channels that rotate, the first ones; the others do not change. With
    #: ``proportional``: of its pairs ``i`` and ``i + dim/2``, which have the wavelengths that they
    #: have if all rotate.
    partial: float = 1.0
    #: Whether channels ``2i`` and ``2i+1`` are a pair, instead of ``i`` and ``i + dim/2``.
    interleaved: bool = False
    #: ``longrope``: factor of the wavelength of each channel pair.
    short_factor: tuple[float, ...] = ()
    #: ``longrope``: the same factors for texts that are longer than ``original_max_positions``.
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.type in ("llama3", "yarn", "longrope") and not self.original_max_positions:
            raise ValueError(
                f"rope type {self.type!r} needs original_max_positions; add "
                "original_max_position_embeddings to the rope parameters of config.json"
            )
        # Beyond these bounds an angle in float32 is infinite or NaN.
        check_range(self, 1.0, 1e30, "theta")
        check_range(self, 1e-6, 1.0, "partial")
        check_range(self, 1, MOST, "original_max_positions")
        check_range(self, 1e-6, 1e6, "factor", "low_freq_factor", "high_freq_factor")
        check_range(self, 1e-6, 1e6, "beta_fast", "beta_slow", "attention_factor")
        check_range(self, 0.0, 1e6, "mscale", "mscale_all_dim")

        if self.type == "llama3" and self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor"
                f" {self.high_freq_factor}; expected the first not to be larger"
            )
        if self.type == "yarn" and self.theta == 1.0:
            raise ValueError("rope type 'yarn' needs a theta above 1; its logarithm divides")
        if self.type == "longrope" and self.original_max_positions == 1:
            raise ValueError(
                "rope type 'longrope' needs original_max_positions above 1; their logarithm divides"
            )
        if not all(1e-6 <= factor <= 1e6 for factor in (*self.short_factor, *self.long_factor)):
            raise ValueError("short_factor or long_factor has a number outside 1e-06 to 1e+06")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """A factor of rotated queries that grows with position ``p``.

    It is ``1 + beta * ln(1 + (p + offset) // floor)``.
    """

    floor: int  #: Number of neighbouring positions that share a factor.
    beta: float  #: Growth of the factor.
    offset: int = 0  #: Added to the position: 1 if positions count from 1 (Llama 4), else 0.

    def __post_init__(self) -> None:
        check_range(self, 1, MOST, "floor")
        check_range(self, 0.0, 1e6, "beta")
        check_range(self, 0, 1, "offset")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """Grouped-query attention (Ainslie et al., 2023)."""

    num_heads: int  #: Query heads.
    num_kv_heads: int  #: ``C``, key and value heads; divides ``num_heads``.
    head_dim: int  #: ``H``; independent of ``width // num_heads``.
    rope: RopeConfig | None = RopeConfig()  #: Rotary embedding; ``None`` for none.
    #: Tokens that a token attends to, itself included; ``None`` for all before it.
    window: int | None = None
    qkv_bias: bool = False  #: Whether the q, k and v projections have a bias.
    o_bias: bool = False  #: Whether the output projection has a bias.
    #: Whether queries and keys are normalised before rotation, by the model's kind of norm.
    qk_norm: bool = False
    #: Growth of queries with their position (Ministral 3, Llama 4); ``None`` for none.
    query_scaling: QueryScaling | None = None
    #: Length of a chunk of positions; a token attends to the earlier tokens of its chunk. ``None``:
    #: no chunks.
    chunk: int | None = None
    #: Whether queries and keys are divided by their root mean square *after* rotation (Llama 4,
    #: Muse Glimmer).
    qk_l2_norm: bool = False
    #: Whether each head has one more logit in its softmax, without a value (gpt-oss).
    sinks: bool = False
    #: Whether the projection of the queries also gives a gate of their shape. Its sigmoid
    #: multiplies the output of attention (Qwen3-Next, Muse Glimmer).
    output_gate: bool = False
    #: Scores become ``softcap * tanh(score / softcap)`` (Gemma 2); ``None`` for no cap.
    softcap: float | None = None
    scale: float | None = None  #: Factor of the scores; ``H ** -0.5`` when ``None``.
    qk_norm_kind: QKNorm = "per-head"  #: Statistics and weights of the norm of queries and keys.
    #: Whether values are divided by their root mean square (Gemma 4).
    value_norm: bool = False
    #: Whether the projection of the keys, before norm and rotation, also gives the values (Gemma
    #: 4).
    keys_as_values: bool = False
    #: Whether the layer has no keys and values, and attends to those of an earlier layer:
    #: ``key_sources`` (Gemma 4).
    shares_keys: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads};"
                " grouped-query attention shares each key head between a whole number of query"
                " heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"head_dim is {self.head_dim}; rotary embedding needs a positive even number"
            )
        check_range(self, 1, MOST, "head_dim", "window", "chunk")
        check_range(self, 1e-6, 1e6, "softcap", "scale")

        rope = self.rope
        if rope is not None and rope.type == "longrope":
            pairs = int(self.head_dim * rope.partial) // 2
            if not len(rope.short_factor) == len(rope.long_factor) == pairs:
                raise ValueError(
                    f"short_factor has {len(rope.short_factor)} and long_factor"
                    f" {len(rope.long_factor)} numbers; expected {pairs} each, one for a pair of"
                    " rotating channels"
                )

        if self.window is not None and self.chunk is not None:
            raise ValueError(
                f"a window of {self.window} and chunks of {self.chunk} exclude each other"
            )
        if self.qk_norm and self.qk_l2_norm:
            raise ValueError(
                "qk_norm and qk_l2_norm exclude each other; queries and keys are normalised once"
            )
        if self.qk_norm_kind != "per-head" and not self.qk_norm:
            raise ValueError(f"qk_norm_kind is {self.qk_norm_kind!r} without qk_norm; set qk_norm")

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_projected(self) -> int:
        """Heads that are projected for a key head and its values: 2, 1, or none."""
        return 0 if self.shares_keys else 1 if self.keys_as_values else 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434).

    Keys and values are linear in one latent.
    """

    num_heads: int  #: Number of heads.
    q_rank: int | None  #: Width of the queries' latent; ``None`` if queries are projected directly.
    #: ``r``, width of the latent that keys and values share. The cache holds it and the
    #: ``rope_dim`` channels of a rotated key that all heads share.
    kv_rank: int
    nope_dim: int  #: Channels of a head's query and key that do not rotate.
    rope_dim: int  #: ``dr``, channels of a head's query and key that rotate.
    value_dim: int  #: Channels of a head's value.
    #: Rotary embedding of the ``rope_dim`` channels.
    rope: RopeConfig = RopeConfig(interleaved=True)
    #: Factor of the scores; ``(nope_dim + rope_dim) ** -0.5`` when ``None``.
    scale: float | None = None
    bias: bool = False  #: Whether the projections to the latents and the output have a bias.
    #: Number of keys that the index of the published model chooses. Texts of at most this length
    #: need no index; longer texts are refused. ``None``: the model has no index.
    index_topk: int | None = None
    #: Added to the mean square in the norms of the latents. Published targets have this number,
    #: whatever their other norms have; draft heads have that of their other norms.
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_sizes(
            self,
            "num_heads",
            "q_rank",
            "kv_rank",
            "nope_dim",
            "rope_dim",
            "value_dim",
            "index_topk",
        )
        check_range(self, 1e-6, 1e6, "scale")
        check_range(self, 1e-37, 1.0, "norm_eps")
        if self.rope_dim % 2:
            raise ValueError(
                f"rope_dim is {self.rope_dim}; rotary embedding needs a positive even number"
            )

    @property
    def channels(self) -> int:
        """``r + dr``, channels of a token in the cache."""
        return self.kv_rank + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """A gated delta net (Yang et al., 2024, arXiv 2412.06464) after a short causal convolution."""

    num_key_heads: int  #: Heads of queries and keys; divides ``num_value_heads``.
    num_value_heads: int  #: Heads of values, and of states.
    key_dim: int  #: ``dk``, channels of a query and a key.
    value_dim: int  #: ``dv``, channels of a value.
    kernel: int = 4  #: Inputs that the convolution reads, the current one included.

    def __post_init__(self) -> None:
        check_sizes(self, "num_key_heads", "num_value_heads", "key_dim", "value_dim")
        check_range(self, 2, 64, "kernel")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads {self.num_value_heads} is not a multiple of num_key_heads"
                f" {self.num_key_heads}; each key head serves a whole number of value heads"
            )

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads


# gelu-tanh: the tanh approximation of GELU (Gemma).
Activation = Literal["silu", "gelu-tanh"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """A gated MLP (Shazeer, 2020), by default a SwiGLU."""

    width: int  #: Its inner width.
    bias: bool = False  #: Whether its projections have a bias.
    activation: Activation = "silu"  #: Activation of the gate.

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MOST:
            raise ValueError(
                f"mlp width is {str(self.width)[:40]}; expected a whole number from 1 to {MOST:g}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """How the experts of a token and their weights follow from its logits."""

    #: Whether scores are the softmax over logits; otherwise they are the sigmoid of each logit.
    is_softmax: bool
    #: Whether only the ``k`` largest logits have scores, which are the weights. Otherwise all
    #: logits have scores, and the ``k`` largest scores are chosen.
    chosen_only: bool = False
    #: Whether a number for each expert is added to the scores for the choice of groups and then of
    #: experts (DeepSeek-V3). It does not enter the weights. Logits are then in float32.
    has_correction: bool = False
    #: Whether a weight multiplies the input of an expert instead of its output (Llama 4).
    weighs_input: bool = False


RouterName = Literal["softmax", "sigmoid", "softmax-of-chosen", "sigmoid-of-input"]
ROUTERS: dict[RouterName, Router] = {
    "softmax": Router(is_softmax=True),
    "sigmoid": Router(is_softmax=False, has_correction=True),
    "softmax-of-chosen": Router(is_softmax=True, chosen_only=True),
    "sigmoid-of-input": Router(is_softmax=False, chosen_only=True, weighs_input=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts: a router chooses ``k`` of ``E`` small gated MLPs for every token."""

    num_experts: int  #: ``E``, number of experts.
    per_token: int  #: ``k``, number of experts per token.
    width: int  #: Inner width of an expert.
    router: RouterName  #: Key of ``ROUTERS``.
    #: Whether the weights of a token are divided by their sum (``softmax``, ``sigmoid``).
    normalise: bool = True
    scaling: float = 1.0  #: Factor of the weights after that.
    groups: int = 1  #: Groups of neighbouring experts; whole groups are chosen first (``sigmoid``).
    kept_groups: int = 1  #: Number of groups that are chosen.
    #: Inner width of an additional MLP that every token goes through; 0 for none.
    shared_width: int = 0
    #: Whether the sigmoid of one number per token multiplies that MLP's output.
    shared_gate: bool = False
    bias: bool = False  #: Whether router and experts have biases.
    #: Clamped gates (gpt-oss): ``(up + 1) * gate * sigmoid(1.702 * gate)`` with ``gate <= limit``
    #: and ``|up| <= limit``. With ``None``, ``silu(gate) * up``.
    limit: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "num_experts", "per_token", "width", "groups", "kept_groups")
        check_range(self, 0, MOST, "shared_width")
        check_range(self, 1e-6, 1e6, "scaling", "limit")
        if self.router not in ROUTERS:
            raise ValueError(f"router is {self.router!r}; expected one of {', '.join(ROUTERS)}")
        if self.per_token > self.num_experts:
            raise ValueError(
                f"{self.per_token} experts per token of {self.num_experts}; expected at most as"
                " many"
            )
        if self.num_experts % self.groups or self.kept_groups > self.groups:
            raise ValueError(
                f"{self.num_experts} experts in {self.groups} groups of which {self.kept_groups}"
                " are kept; expected groups of one size, and no more kept than there are"
            )

        # A group counts by the sum of its two best scores.
        fits = self.num_experts >= 2 * self.groups
        if self.groups > 1 and not (fits and self.routing.has_correction):
            raise ValueError(
                f"{self.num_experts} experts in {self.groups} groups of a {self.router} router;"
                " expected a sigmoid router and at least two experts a group"
            )
        if self.per_token > self.num_experts // self.groups * self.kept_groups:
            raise ValueError(f"{self.per_token} experts per token; the groups kept have fewer")
        if self.shared_gate and not self.shared_width:
            raise ValueError("shared_gate without a shared expert; give shared_width")

    @property
    def routing(self) -> Router:
        """What :attr:`router` names."""
        return ROUTERS[self.router]


Mixer = GroupedQuery | Latent | GatedDelta
MLP = GatedMLP | Experts

# How a norm multiplies y = x / sqrt(mean(x²) + eps) by its weight w. plain: w · y in the type of x.
# float32: w · y before the cast to that type. zero-centred: (1 + w) · y before the cast. layer: the
# mean of x is subtracted first, then as float32; it is a LayerNorm without bias.
NormKind = Literal["plain", "float32", "zero-centred", "layer"]

# Which tensors of a block are normalised. before: the inputs of mixer and MLP (Llama). after: their
# outputs, before the residual sum (OLMo-2). around: inputs and outputs (Gemma 2). parallel: one
# norm, whose output is the input of both mixer and MLP (Cohere).
NormPlaces = Literal["before", "after", "around", "parallel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A residual block, by default with norms before mixer and MLP."""

    mixer: Mixer  #: The part that moves information between positions.
    mlp: MLP  #: The part that treats every position separately.
    norms: NormPlaces = "before"  #: Which tensors are normalised.
    #: Added to the mean square in the norms of outputs; ``None`` for that of the model (Muse
    #: Glimmer).
    post_norm_eps: float | None = None
    #: Factor of the outputs of mixer and MLP before they are added to the residual stream
    #: (Granite).
    residual_scale: float = 1.0
    #: Width of the vector that the layer reads for each token besides the residual stream (Gemma 4
    #: E); 0 for none.
    input_width: int = 0
    #: Whether a number of the checkpoint multiplies the residual stream after the layer (Gemma 4).
    output_scale: bool = False

    def __post_init__(self) -> None:
        check_range(self, 1e-6, 1e6, "residual_scale")
        check_range(self, *_EPS, "post_norm_eps")
        check_range(self, 0, MOST, "input_width")


def uniform(num_layers: int, mixer: Mixer, mlp: MLP) -> tuple[LayerConfig, ...]:
    """Returns ``num_layers`` equal layers.

    Raises:
        ValueError: ``num_layers`` is not from 1 to ``MOST_LAYERS``.
    """
    if not 1 <= num_layers <= MOST_LAYERS:
        raise ValueError(
            f"num_layers is {str(num_layers)[:40]}; expected a whole number from 1 to {MOST_LAYERS}"
        )
    return (LayerConfig(mixer=mixer, mlp=mlp),) * num_layers


def with_window(layer: LayerConfig, window: int | None) -> LayerConfig:
    """Returns the layer with attention to the last ``window`` positions; ``None`` for all.

    A token's own position counts.
    """
    mixer = dataclasses.replace(grouped(layer), window=window)
    return dataclasses.replace(layer, mixer=mixer)


def grouped(layer: LayerConfig) -> GroupedQuery:
    """Returns the mixer of a layer of grouped-query attention.

    Raises:
        ValueError: The layer has another mixer.
    """
    return _as(layer.mixer, GroupedQuery, "grouped-query attention")


def heads_of(layer: LayerConfig) -> tuple[int, int]:
    """Returns the number of key heads of a layer of grouped-query attention, and their size."""
    mixer = grouped(layer)
    return mixer.num_kv_heads, mixer.head_dim


def key_sources(layers: Sequence[LayerConfig]) -> list[int | None]:
    """Returns for each layer that shares keys the layer that has them; ``None`` for other layers.

    It is the last layer before it with keys and the same window.

    Raises:
        ValueError: There is none, or its key heads have another number or size.
    """
    # The last layer so far for each window.
    latest: dict[int | None, int] = {}
    sources: list[int | None] = []
    for index, layer in enumerate(layers):
        mixer = layer.mixer
        source = None
        if isinstance(mixer, GroupedQuery) and mixer.shares_keys:
            source = latest.get(mixer.window)
            if source is None or heads_of(layers[source]) != heads_of(layer):
                raise ValueError(
                    f"layer {index} shares keys; expected an earlier layer with the same window and"
                    f" {mixer.num_kv_heads} key heads of {mixer.head_dim} channels"
                )
        elif isinstance(mixer, GroupedQuery):
            latest[mixer.window] = index
        sources.append(source)
    return sources


def gated(layer: LayerConfig) -> GatedMLP:
    """Returns the dense MLP of a layer.

    Raises:
        ValueError: The layer has another MLP.
    """
    return _as(layer.mlp, GatedMLP, "a dense MLP")


def _as(part: Any, kind: Any, words: str) -> Any:
    if not isinstance(part, kind):
        raise ValueError(f"a layer of {type(part).__name__} where {words} is needed")
    return part


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder, described layer by layer."""

    vocab_size: int  #: ``V``.
    width: int  #: ``D``, width of the residual stream.
    layers: tuple[LayerConfig, ...]  #: ``L`` blocks, in order.
    max_positions: int = 2048  #: Longest sequence that the model was built for.
    norm_eps: float = 1e-6  #: Added to the mean square in RMSNorm.
    tie_embeddings: bool = False  #: Whether the output projection is the transposed embedding.
    norm_kind: NormKind = "plain"  #: How every norm of the model multiplies by its weight.
    #: How the norm of the last output multiplies; ``None`` as the others (Muse Glimmer).
    final_norm_kind: NormKind | None = None
    #: Whether the residual stream starts from the embedding divided by its root mean square (Muse
    #: Glimmer). Draft heads that borrow the embedding read it without that.
    embedding_norm: bool = False
    #: Tokens that stand for images or videos. In a text they enter as token 0 (Muse Glimmer).
    media_tokens: tuple[int, ...] = ()
    #: Factor of the embedding at the start of the residual stream. Draft heads that borrow the
    #: embedding read it without the factor, as in vLLM and SGLang.
    embedding_scale: float = 1.0
    logit_scale: float = 1.0  #: Factor of the logits.
    #: Logits become ``softcap * tanh(logit / softcap)`` (Gemma 2); ``None`` for no cap.
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        check_stack(self)
        check_range(self, 1e-6, 1e6, "embedding_scale", "logit_scale", "logit_softcap")
        widths = {layer.input_width for layer in self.layers}
        if len(widths) > 1:
            raise ValueError(
                f"input_width is {sorted(widths)}; expected the same width in every layer"
            )
        key_sources(self.layers)

    @property
    def num_layers(self) -> int:
        """``L``."""
        return len(self.layers)

    @property
    def input_width(self) -> int:
        """Width of a layer's vector for each token; 0 for none."""
        return self.layers[0].input_width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head with the variations that published heads have.

    Attributes:
        vocab_size: ``V``, the target's.
        width: ``D``, width of the head's residual stream.
        layers: The head's layers, mostly one. The input of the first is the token embedding and the
            features, joined to ``2D``. Their attention is grouped-query or latent. Of the first, a
            layer may have a window: without one, a head trained on short texts drafts worse on long
            ones.
        draft_vocab_size: ``W``, number of target tokens that the head can propose.
        target_width: Width of the target's features.
        aux_layers: ``A`` target layers whose entering residual stream is fused, ascending.
        max_positions: Longest sequence that the head was built for.
        norm_eps: Added to the mean square in RMSNorm.
        norm_before_residual: Whether the residual stream starts from the normalised fused features
            (speculators heads).
        norm_output: Whether the output is fed back after the final norm (EAGLE-3.1) instead of
            before it.
        fc_norm: Whether each feature chunk is normalised before fusion (EAGLE-3.1).
        norm_before_fc: Whether the concatenated features are normalised before fusion.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    draft_vocab_size: int
    target_width: int
    aux_layers: tuple[int, ...]
    max_positions: int = 2048
    norm_eps: float = 1e-6
    norm_before_residual: bool = False
    norm_output: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False

    def __post_init__(self) -> None:
        check_head(self)
        check_drafting(self)
        for layer in self.layers:
            if not isinstance(layer.mixer, GroupedQuery | Latent):
                raise ValueError(
                    f"a layer of {type(layer.mixer).__name__} in an EAGLE-3 head; expected"
                    " grouped-query or latent attention"
                )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc exclude each other; a head normalises its features once"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers of the head."""
        return len(self.layers)


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Returns the layers of the official code, ``2, L//2, L-3``.

    Raises:
        ValueError: The target is too shallow for three distinct layers.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 2 < num_layers // 2 < num_layers - 3:
        raise ValueError(
            f"a target of {num_layers} layers is too shallow for the default auxiliary layers"
            f" {layers}; write eagle_aux_hidden_state_layer_ids into the head's config.json"
        )
    return layers


def usual_layers(
    target: DecoderConfig, mlp_width: int | None = None, count: int = 1
) -> tuple[LayerConfig, ...]:
    """Returns layers as most published heads have them: the target's sizes, and rotary base 10,000.

    If the target has no grouped-query attention, the heads have 128 channels, or there is one head.
    If it has no dense MLP, the inner width is four times its width.

    Args:
        target: The target.
        mlp_width: Inner width of the MLPs. Default: that of the target.
        count: Number of layers.
    """
    width = target.width
    mixers = [layer.mixer for layer in target.layers if isinstance(layer.mixer, GroupedQuery)]
    mlps = [layer.mlp for layer in target.layers if isinstance(layer.mlp, GatedMLP)]
    if mixers:
        mixer = mixers[0]
    else:
        heads = width // 128 if width % 128 == 0 else 1
        mixer = GroupedQuery(num_heads=heads, num_kv_heads=heads, head_dim=width // heads)

    mlp = mlps[0] if mlps else GatedMLP(width=4 * width)
    plain = GroupedQuery(
        num_heads=mixer.num_heads, num_kv_heads=mixer.num_kv_heads, head_dim=mixer.head_dim
    )
    return uniform(count, plain, GatedMLP(width=mlp_width or mlp.width))


def usual_head(
    target: DecoderConfig,
    *,
    draft_vocab_size: int | None = None,
    mlp_width: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
) -> Eagle3Config:
    """Returns the configuration of most published heads.

    They have one layer of the target's sizes, and read its default features.

    Args:
        target: The target.
        draft_vocab_size: ``W``. Default: 32,000, or the target's vocabulary if that is smaller.
        mlp_width: Inner width of the MLP. Default: that of the target.
        aux_layers: Target layers whose features the head reads. Default: ``default_aux_layers``.

    Raises:
        ValueError: ``aux_layers`` is left out and the target has fewer than 8 layers.
    """
    return Eagle3Config(
        vocab_size=target.vocab_size,
        width=target.width,
        layers=usual_layers(target, mlp_width),
        draft_vocab_size=draft_vocab_size or min(32_000, target.vocab_size),
        target_width=target.width,
        aux_layers=aux_layers or default_aux_layers(target.num_layers),
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
    )


def check_drafting(config: Any) -> None:
    """Checks ``draft_vocab_size`` and ``aux_layers``.

    Raises:
        ValueError: The draft vocabulary is larger than the target's, or the layers are not in
            ascending order.
    """
    if not 1 <= config.draft_vocab_size <= config.vocab_size:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab_size}; expected 1 to the target's"
            f" {config.vocab_size}"
        )
    layers = config.aux_layers
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0:
        raise ValueError(
            f"aux_layers are {layers}; expected distinct layers in ascending order, as in (2,"
            " 16, 29)"
        )


def check_head(config: Any) -> None:
    """Checks the layers of a draft head.

    Raises:
        ValueError: As :func:`check_stack`; or the first layer has norms other than ``before``, or a
            residual factor.
    """
    check_stack(config)
    first = config.layers[0] if config.layers else None
    if first is not None and (first.norms, first.residual_scale) != ("before", 1.0):
        raise ValueError(
            f"the head's first layer has norms {first.norms!r} and residual_scale"
            f" {first.residual_scale}; expected 'before' and 1.0, so build the head's layers with"
            " usual_layers"
        )


def check_stack(config: Any) -> None:
    """Checks the sizes and ``norm_eps`` of a stack of layers.

    Raises:
        ValueError: A size is below 1, or ``norm_eps`` is out of range.
    """
    check_sizes(config, "vocab_size", "width", "num_layers", "max_positions")
    check_range(config, *_EPS, "norm_eps")
