"""What a target or a draft head is: a frozen, hashable description from which every shape follows. Needs no JAX."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

# Sizes and positions are 32-bit on the device, and sums of a few of them must stay so.
MOST = 1_000_000_000
# A config.json that says more would fill the memory before anything can contradict it.
MOST_LAYERS = 10_000

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
class QueryScaling:
    """Queries that grow with their position: after rotation times ``1 + beta * ln(1 + floor(p / floor))``.

    Attributes:
        floor: Positions that share a factor; the first ``floor`` of them are left alone.
        beta: How fast the factor grows.
    """

    floor: int
    beta: float

    def __post_init__(self) -> None:
        _within(self, "floor", 1, MOST)
        _within(self, "beta", 0.0, 1e6)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedQuery:
    """Grouped-query attention (Ainslie et al., 2023).

    Attributes:
        num_heads: Query heads.
        num_kv_heads: ``C``, key and value heads; divides ``num_heads``.
        head_dim: ``H``; independent of ``width // num_heads``.
        rope: Rotary embedding; ``None`` for none.
        window: Tokens that each one sees, itself included; ``None`` for all before it.
        qkv_bias: Whether the q, k and v projections carry a bias.
        o_bias: Whether the output projection carries one.
        qk_norm: Whether queries and keys are RMS-normalised per head before rotation (Qwen3).
        query_scaling: Queries that grow with their position (Ministral 3); ``None`` for none.
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

    def __post_init__(self) -> None:
        _positive(self, "num_heads", "num_kv_heads")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; "
                "grouped-query attention shares each key head between a whole number of query heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs a positive even number")
        _within(self, "head_dim", 2, MOST)
        _within(self, "window", 1, MOST)

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedMLP:
    """A SwiGLU (Shazeer, 2020).

    Attributes:
        width: Its inner width.
        bias: Whether its projections carry a bias.
    """

    width: int
    bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.width <= MOST:
            raise ValueError(f"mlp width is {str(self.width)[:40]}; expected a whole number from 1 to {MOST:g}")


# One kind of each so far. Latent attention, recurrent layers and experts make them unions.
Mixer = GroupedQuery
MLP = GatedMLP


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A pre-norm residual block.

    Attributes:
        mixer: What carries information between positions.
        mlp: What works on each position alone.
    """

    mixer: Mixer
    mlp: MLP


def uniform(num_layers: int, mixer: Mixer, mlp: MLP) -> tuple[LayerConfig, ...]:
    """``num_layers`` equal layers.

    Raises:
        ValueError: There are none, or more than any model has.
    """
    if not 1 <= num_layers <= MOST_LAYERS:
        raise ValueError(f"num_layers is {str(num_layers)[:40]}; expected a whole number from 1 to {MOST_LAYERS}")
    return (LayerConfig(mixer=mixer, mlp=mlp),) * num_layers


def with_window(layer: LayerConfig, window: int | None) -> LayerConfig:
    """A layer whose tokens see the last ``window`` positions, their own included; all of them when ``None``."""
    return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, window=window))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder of pre-norm blocks, described layer by layer.

    Attributes:
        vocab_size: ``V``.
        width: ``D``, the residual stream.
        layers: ``L`` blocks, the first one first.
        max_positions: Longest sequence that the model was built for.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: Whether the output projection is the transposed embedding.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    max_positions: int = 2048
    norm_eps: float = 1e-6
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        check_stack(self)

    @property
    def num_layers(self) -> int:
        """``L``."""
        return len(self.layers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """An EAGLE-3 head with the variations that published heads have.

    Attributes:
        vocab_size: ``V``, the target's.
        width: ``D``, the head's own residual stream.
        layers: The head's layers, mostly one; the first reads the token embedding beside the features, ``2D`` wide.
            Each may have a window: a head that is trained on short texts and sees everything falls off on long ones.
        draft_vocab_size: ``W``, how many target tokens the head can propose.
        target_width: Width of the target's features.
        aux_layers: ``A`` target layers whose entering residual stream is fused, ascending.
        max_positions: Longest sequence that the head was built for.
        norm_eps: Added to the mean square in RMSNorm.
        norm_before_residual: The residual stream starts from the normalised fused features (speculators heads).
        norm_output: The output is fed back after the final norm (EAGLE-3.1) instead of before it.
        fc_norm: Each feature chunk is normalised before fusion (EAGLE-3.1).
        norm_before_fc: The concatenated features are normalised before fusion.
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
        check_stack(self)
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; expected 1 to the target's {self.vocab_size}"
            )
        if not self.aux_layers or list(self.aux_layers) != sorted(set(self.aux_layers)) or self.aux_layers[0] < 0:
            raise ValueError(
                f"aux_layers are {self.aux_layers}; expected distinct layers in ascending order, as in (2, 16, 29)"
            )
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other; a head normalises its features once")

    @property
    def num_layers(self) -> int:
        """The head's own layers."""
        return len(self.layers)


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The official choice ``2, L//2, L-3``.

    Raises:
        ValueError: The target is too shallow for three distinct layers.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 2 < num_layers // 2 < num_layers - 3:
        raise ValueError(
            f"a target of {num_layers} layers is too shallow for the default auxiliary layers {layers}; "
            "write eagle_aux_hidden_state_layer_ids into the head's config.json"
        )
    return layers


def usual_layers(target: DecoderConfig, mlp_width: int | None = None, count: int = 1) -> tuple[LayerConfig, ...]:
    """What most published heads are made of: plain layers of the target's geometry, their rotary base 10,000.

    Args:
        target: What it drafts for.
        mlp_width: Inner width of their MLPs; the target's when left out.
        count: How many.
    """
    layer = target.layers[0]
    mixer = GroupedQuery(
        num_heads=layer.mixer.num_heads, num_kv_heads=layer.mixer.num_kv_heads, head_dim=layer.mixer.head_dim
    )
    return uniform(count, mixer, GatedMLP(width=mlp_width or layer.mlp.width))


def usual_head(
    target: DecoderConfig,
    *,
    draft_vocab_size: int | None = None,
    mlp_width: int | None = None,
    aux_layers: tuple[int, ...] | None = None,
) -> Eagle3Config:
    """The head that most published ones are: one plain layer of the target's geometry and its default features.

    Args:
        target: What it drafts for.
        draft_vocab_size: ``W``; 32,000, or all that the target has, when left out.
        mlp_width: Inner width of its MLP; the target's when left out.
        aux_layers: Which features it reads; the default ones when left out.

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


def check_stack(config: Any) -> None:
    """Refuse a stack of layers with a size that is none.

    Raises:
        ValueError: ``vocab_size``, ``width``, ``num_layers``, ``max_positions`` or ``norm_eps`` is out of range.
    """
    _positive(config, "vocab_size", "width", "num_layers", "max_positions")
    # Below, it is zero in float32, and a row of zeros becomes NaN.
    _within(config, "norm_eps", 1e-37, 1.0)


def _positive(config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}; expected a positive whole number")
        _within(config, name, 1, MOST)
