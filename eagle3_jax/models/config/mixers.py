"""What carries information between positions: attention, latent attention, a recurrent state."""

from __future__ import annotations

import dataclasses
from typing import Literal

from eagle3_jax.models.config.ranges import MOST, positive, within

RopeType = Literal["default", "linear", "llama3", "yarn", "longrope"]

# The statistics and weights of a norm of queries and keys. per-head: statistics of each head, one weight vector for all
# heads (Qwen3); own-weights: statistics of each head, and weights for each head (Cohere); whole: statistics of all
# heads together, and weights for each head (OLMo-2).
QKNorm = Literal["per-head", "own-weights", "whole"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its published context extensions.

    Attributes:
        theta: Base of the geometric progression of wavelengths.
        type: ``default``, ``linear`` (position interpolation), ``llama3``, ``yarn`` (Peng et al., 2023) or ``longrope``
            (Ding et al., 2024), of which texts up to ``original_max_positions`` are computed.
        factor: How many times the context is extended.
        original_max_positions: Context length before the extension (``llama3``, ``yarn`` and ``longrope``).
        low_freq_factor: ``llama3``: wavelengths above ``original / low_freq_factor`` are fully stretched.
        high_freq_factor: ``llama3``: wavelengths below ``original / high_freq_factor`` are left alone.
        beta_fast: ``yarn``: rotations within the context above which a dimension is left alone.
        beta_slow: ``yarn``: rotations below which a dimension is fully interpolated.
        attention_factor: ``yarn``, ``longrope``: scale of cosine and sine; ``None`` derives it from ``factor``.
        mscale: ``yarn``: numerator exponent of the derived attention factor (DeepSeek's variant).
        mscale_all_dim: ``yarn``: denominator exponent of the derived attention factor.
        truncate: ``yarn``: whether the correction range is rounded outwards to whole dimensions.
        partial: Share of a head's channels that rotate, the first ones; the others pass as they are.
        interleaved: Whether neighbours ``2i, 2i+1`` are a pair, instead of ``i, i + dim/2``.
        short_factor: ``longrope``: how many times the wavelength of each channel pair is stretched.
        long_factor: ``longrope``: the same for texts that are longer than ``original_max_positions``.
    """

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial: float = 1.0
    interleaved: bool = False
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.type in ("llama3", "yarn", "longrope") and not self.original_max_positions:
            raise ValueError(
                f"rope type {self.type!r} needs original_max_positions; add "
                "original_max_position_embeddings to the rope parameters of config.json"
            )
        # Beyond these bounds an angle in float32 is infinite or NaN.
        within(self, "theta", 1.0, 1e30)
        within(self, "factor", 1e-6, 1e6)
        within(self, "partial", 1e-6, 1.0)
        within(self, "original_max_positions", 1, MOST)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            within(self, name, 1e-6, 1e6)
        within(self, "mscale", 0.0, 1e6)
        within(self, "mscale_all_dim", 0.0, 1e6)
        if self.type == "llama3" and self.low_freq_factor > self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}; "
                "expected the first not to be larger"
            )
        if self.type == "yarn" and self.theta == 1.0:
            raise ValueError("rope type 'yarn' needs a theta above 1; its logarithm divides")
        if self.type == "longrope" and self.original_max_positions == 1:
            raise ValueError("rope type 'longrope' needs original_max_positions above 1; their logarithm divides")
        if not all(1e-6 <= one <= 1e6 for one in (*self.short_factor, *self.long_factor)):
            raise ValueError("short_factor or long_factor has a number outside 1e-06 to 1e+06")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScaling:
    """Queries that grow with their position: after rotation times ``1 + beta * ln(1 + floor((p + offset) / floor))``.

    Attributes:
        floor: Positions that share a factor.
        beta: How fast the factor grows.
        offset: Added to the position: 1 where the first position counts as the first (Llama 4).
    """

    floor: int
    beta: float
    offset: int = 0

    def __post_init__(self) -> None:
        within(self, "floor", 1, MOST)
        within(self, "beta", 0.0, 1e6)
        within(self, "offset", 0, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """Grouped-query attention (Ainslie et al., 2023).

    Attributes:
        num_heads: Query heads.
        num_kv_heads: ``C``, key and value heads; divides ``num_heads``.
        head_dim: ``H``; independent of ``width // num_heads``.
        rope: Rotary embedding; ``None`` for none.
        window: Tokens that each one sees, itself included; ``None`` for all before it.
        chunk: Positions are cut into runs of so many, and a token sees those of its own; ``None`` for all before it.
        qkv_bias: Whether the q, k and v projections carry a bias.
        o_bias: Whether the output projection carries one.
        qk_norm: Whether queries and keys are normalised before rotation, by the model's kind of norm.
        qk_norm_kind: What such a norm covers.
        query_scaling: Queries that grow with their position (Ministral 3, Llama 4); ``None`` for none.
        qk_l2_norm: Whether queries and keys are divided by their root mean square *after* rotation (Llama 4).
        sinks: Whether each head has one more logit in its softmax, which no value belongs to (gpt-oss).
        output_gate: Whether the queries' projection gives a gate of their shape too, whose sigmoid multiplies what is
            attended (Qwen3-Next).
        softcap: Scores become ``softcap * tanh(score / softcap)`` (Gemma 2); ``None`` for none.
        scale: Of the scores; ``H ** -0.5`` when ``None``.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None = RopeConfig()
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    query_scaling: QueryScaling | None = None
    chunk: int | None = None
    qk_l2_norm: bool = False
    sinks: bool = False
    output_gate: bool = False
    softcap: float | None = None
    scale: float | None = None
    qk_norm_kind: QKNorm = "per-head"

    def __post_init__(self) -> None:
        positive(self, "num_heads", "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "grouped-query attention shares each key head between a whole number of query heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs a positive even number")
        within(self, "head_dim", 2, MOST)
        within(self, "window", 1, MOST)
        within(self, "chunk", 1, MOST)
        within(self, "softcap", 1e-6, 1e6)
        within(self, "scale", 1e-6, 1e6)
        pairs, rope = 0 if self.rope is None else int(self.head_dim * self.rope.partial) // 2, self.rope
        if rope is not None and rope.type == "longrope" and {len(rope.short_factor), len(rope.long_factor)} != {pairs}:
            raise ValueError(
                f"short_factor has {len(rope.short_factor)} and long_factor {len(rope.long_factor)} numbers; "
                f"expected {pairs} each, one for a pair of rotating channels"
            )
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"a window of {self.window} and chunks of {self.chunk} exclude each other")
        if self.qk_norm and self.qk_l2_norm:
            raise ValueError("qk_norm and qk_l2_norm exclude each other; queries and keys are normalised once")
        if self.qk_norm_kind != "per-head" and not self.qk_norm:
            raise ValueError(f"qk_norm_kind is {self.qk_norm_kind!r} without qk_norm; set qk_norm")

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, 2024, arXiv 2405.04434): keys and values are read off one latent.

    Attributes:
        num_heads: Heads.
        q_rank: Width of the queries' latent; ``None`` where queries are projected directly.
        kv_rank: ``r``, width of the latent that keys and values share; what the cache holds of a token beside
            ``rope_dim`` channels of a rotated key that all heads share.
        nope_dim: Channels of a head's query and key that do not rotate.
        rope_dim: Channels that do.
        value_dim: Channels of a head's value.
        rope: Of the rotated channels.
        scale: Of the scores; ``(nope_dim + rope_dim) ** -0.5`` when ``None``.
        bias: Whether the projections to the latents and the output carry a bias.
        index_topk: The published model attends to so many keys, which an index chooses; up to as many tokens that is
            plain attention, and longer texts are refused. ``None`` where it attends to all.
    """

    num_heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeConfig = RopeConfig(interleaved=True)
    scale: float | None = None
    bias: bool = False
    index_topk: int | None = None

    def __post_init__(self) -> None:
        positive(self, "num_heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim", "index_topk")
        within(self, "scale", 1e-6, 1e6)
        if self.rope_dim % 2:
            raise ValueError(f"rope_dim is {self.rope_dim}; rotary embedding needs a positive even number")

    @property
    def channels(self) -> int:
        """``r + dr``, what the cache holds of a token."""
        return self.kv_rank + self.rope_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDelta:
    """A gated delta net (Yang et al., 2024, arXiv 2412.06464) behind a short causal convolution.

    Attributes:
        num_key_heads: Heads of queries and keys; divides ``num_value_heads``.
        num_value_heads: Heads of values, and of states.
        key_dim: ``dk``, channels of a query and a key.
        value_dim: ``dv``, channels of a value.
        kernel: Inputs that the convolution reads, the present one included.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4

    def __post_init__(self) -> None:
        positive(self, "num_key_heads", "num_value_heads", "key_dim", "value_dim")
        within(self, "kernel", 2, 64)
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads {self.num_value_heads} is not a multiple of num_key_heads {self.num_key_heads}; "
                "each key head serves a whole number of value heads"
            )

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads
