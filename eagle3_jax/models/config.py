"""What a target transformer is: one frozen, hashable description from which every shape follows."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

# Sizes and positions are 32-bit on the device, and sums of a few of them must stay so.
MOST = 1_000_000_000

RopeType = Literal["default", "linear", "llama3", "yarn"]


def _within(config: Any, name: str, least: int | float, most: int | float) -> None:
    """Refuse a number outside its range, NaN included; ``None`` is none."""
    value = getattr(config, name)
    if value is not None and not least <= value <= most:
        raise ValueError(f"{name} is {str(value)[:40]}; expected a number from {least:g} to {most:g}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and its published context extensions.

    Attributes:
        theta: Base of the geometric progression of wavelengths.
        type: ``default``, ``linear`` (position interpolation), ``llama3`` or ``yarn`` (Peng et al., 2023).
        factor: How many times the context is extended.
        original_max_positions: Context length before the extension (``llama3`` and ``yarn``).
        low_freq_factor: ``llama3``: wavelengths above ``original / low_freq_factor`` are fully stretched.
        high_freq_factor: ``llama3``: wavelengths below ``original / high_freq_factor`` are left alone.
        beta_fast: ``yarn``: rotations within the context above which a dimension is left alone.
        beta_slow: ``yarn``: rotations below which a dimension is fully interpolated.
        attention_factor: ``yarn``: scale of cosine and sine; ``None`` derives it from ``factor``.
        mscale: ``yarn``: numerator exponent of the derived attention factor (DeepSeek's variant).
        mscale_all_dim: ``yarn``: denominator exponent of the derived attention factor.
        truncate: ``yarn``: whether the correction range is rounded outwards to whole dimensions.
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

    def __post_init__(self) -> None:
        if self.type in ("llama3", "yarn") and not self.original_max_positions:
            raise ValueError(
                f"rope type {self.type!r} needs original_max_positions; add "
                "original_max_position_embeddings to the rope parameters of config.json"
            )
        # Beyond these bounds an angle in float32 is infinite or NaN.
        _within(self, "theta", 1.0, 1e30)
        _within(self, "factor", 1e-6, 1e6)
        _within(self, "original_max_positions", 1, MOST)
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            _within(self, name, 1e-6, 1e6)
        _within(self, "mscale", 0.0, 1e6)
        _within(self, "mscale_all_dim", 0.0, 1e6)
        if self.type == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}; "
                "expected the first to be smaller"
            )
        if self.type == "yarn" and self.theta == 1.0:
            raise ValueError("rope type 'yarn' needs a theta above 1; its logarithm divides")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A Llama-style decoder: pre-norm blocks of grouped-query attention and SwiGLU.

    Attributes:
        vocab_size: ``V``.
        width: ``D``, the residual stream.
        mlp_width: Inner width of the SwiGLU.
        num_layers: ``L``.
        num_heads: Query heads.
        num_kv_heads: ``C``, key and value heads; divides ``num_heads``.
        head_dim: ``H``; independent of ``width // num_heads``.
        rope: Rotary embedding.
        max_positions: Longest sequence that the model was built for.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: Whether the output projection is the transposed embedding.
        attention_bias: Whether q, k, v and o projections carry a bias.
        mlp_bias: Whether the SwiGLU projections carry a bias.
        qk_norm: Whether queries and keys are RMS-normalised per head before rotation (Qwen3).
    """

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig = RopeConfig()
    max_positions: int = 2048
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "mlp_width", "num_layers", "num_heads", "num_kv_heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive whole number")
            _within(self, name, 1, MOST)
        # Below, it is zero in float32, and a row of zeros becomes NaN.
        _within(self, "norm_eps", 1e-37, 1.0)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "grouped-query attention shares each key head between a whole number of query heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs a positive even number")
        _within(self, "head_dim", 2, MOST)
