"""Layers, and the stacks of them that targets and draft heads are."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, Protocol, runtime_checkable

from eagle3_jax.models.config.mixers import GatedDelta, GroupedQuery, Latent
from eagle3_jax.models.config.mlps import Experts, GatedMLP
from eagle3_jax.models.config.ranges import MOST_LAYERS, positive, within

Mixer = GroupedQuery | Latent | GatedDelta
MLP = GatedMLP | Experts

# How a norm multiplies y = x / sqrt(mean(x²) + eps) by its weight w. plain: w · y in the type of x; float32: w · y
# before the cast to it; zero-centred: (1 + w) · y before the cast; layer: float32 after the mean of x is subtracted, a
# LayerNorm without bias.
NormKind = Literal["plain", "float32", "zero-centred", "layer"]

# Places of a block's norms. before: of the inputs of mixer and MLP (Llama); after: of their outputs, before these are
# added (OLMo-2); around: of both (Gemma 2). parallel: one norm, whose output mixer and MLP both read (Cohere).
NormPlaces = Literal["before", "after", "around", "parallel"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A residual block, by default with norms before mixer and MLP.

    Attributes:
        mixer: What carries information between positions.
        mlp: What works on each position alone.
        norms: Places of its norms.
        residual_scale: Factor of the outputs of mixer and MLP before they are added to the residual stream (Granite).
    """

    mixer: Mixer
    mlp: MLP
    norms: NormPlaces = "before"
    residual_scale: float = 1.0

    def __post_init__(self) -> None:
        within(self, "residual_scale", 1e-6, 1e6)


@runtime_checkable
class Layered(Protocol):
    """Whatever is described by a mixer and an MLP, as :class:`LayerConfig` is."""

    @property
    def mixer(self) -> Mixer:
        """What carries information between positions."""
        ...

    @property
    def mlp(self) -> MLP:
        """What works on each position alone."""
        ...


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
    return dataclasses.replace(layer, mixer=dataclasses.replace(grouped(layer), window=window))


def grouped(layer: Layered) -> GroupedQuery:
    """The mixer of a layer of grouped-query attention.

    Raises:
        ValueError: It is of another kind.
    """
    return _as(layer.mixer, GroupedQuery, "grouped-query attention")


def gated(layer: Layered) -> GatedMLP:
    """The MLP of a layer that has a dense one.

    Raises:
        ValueError: It is of another kind.
    """
    return _as(layer.mlp, GatedMLP, "a dense MLP")


def _as(part: Any, kind: Any, words: str) -> Any:
    if not isinstance(part, kind):
        raise ValueError(f"a layer of {type(part).__name__} where {words} is needed")
    return part


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder, described layer by layer.

    Attributes:
        vocab_size: ``V``.
        width: ``D``, the residual stream.
        layers: ``L`` blocks, the first one first.
        max_positions: Longest sequence that the model was built for.
        norm_eps: Added to the mean square in RMSNorm.
        tie_embeddings: Whether the output projection is the transposed embedding.
        norm_kind: How every norm of the model multiplies by its weight.
        embedding_scale: Factor of the embedding where it enters the residual stream. Draft heads that borrow the
            embedding read it without the factor, as in vLLM and SGLang.
        logit_scale: Factor of the logits.
        logit_softcap: Logits become ``softcap * tanh(logit / softcap)`` (Gemma 2); ``None`` for none.
    """

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    max_positions: int = 2048
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    norm_kind: NormKind = "plain"
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        check_stack(self)
        for name in ("embedding_scale", "logit_scale", "logit_softcap"):
            within(self, name, 1e-6, 1e6)

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
        check_head(self)
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

    A target without plain attention, or without a dense MLP, lends what comes nearest: heads of 128 channels (or one
    head), and an MLP of four widths.

    Args:
        target: What it drafts for.
        mlp_width: Inner width of their MLPs; the target's when left out.
        count: How many.
    """
    width = target.width
    mixer = next((layer.mixer for layer in target.layers if isinstance(layer.mixer, GroupedQuery)), None)
    if mixer is None:
        heads = width // 128 if width % 128 == 0 else 1
        mixer = GroupedQuery(num_heads=heads, num_kv_heads=heads, head_dim=width // heads)
    mlp = next((layer.mlp for layer in target.layers if isinstance(layer.mlp, GatedMLP)), GatedMLP(width=4 * width))
    plain = GroupedQuery(num_heads=mixer.num_heads, num_kv_heads=mixer.num_kv_heads, head_dim=mixer.head_dim)
    return uniform(count, plain, GatedMLP(width=mlp_width or mlp.width))


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


def check_head(config: Any) -> None:
    """Refuse what :func:`check_stack` does, and layers of targets that the first layer of a head is not.

    Raises:
        ValueError: Additionally, the first layer has other norms than those before its parts, or a residual factor.
    """
    check_stack(config)
    first = config.layers[0] if config.layers else None
    if first is not None and (first.norms, first.residual_scale) != ("before", 1.0):
        raise ValueError(
            f"the head's first layer has norms {first.norms!r} and residual_scale {first.residual_scale}; expected "
            "'before' and 1.0, so build the head's layers with usual_layers"
        )


def check_stack(config: Any) -> None:
    """Refuse a stack of layers with a size that is none.

    Raises:
        ValueError: ``vocab_size``, ``width``, ``num_layers``, ``max_positions`` or ``norm_eps`` is out of range.
    """
    positive(config, "vocab_size", "width", "num_layers", "max_positions")
    # Below, it is zero in float32, and a row of zeros becomes NaN.
    within(config, "norm_eps", 1e-37, 1.0)
