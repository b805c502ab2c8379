"""Fields of Hugging Face ``config.json`` files that targets and heads share, both ways.

A field whose absence would change the mathematics is required. The exceptions are those that the published format
itself defines as optional, because checkpoints in use omit them: the number of key heads (as many as query heads), the
head dimension (width over heads), biases (none), the rotary base (10000) and the activation (SiLU).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.hf_rope import read_rope, rope_fields
from eagle3_jax.models.config import (
    MLP,
    MOST_LAYERS,
    DecoderConfig,
    Eagle3Config,
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    Mixer,
    NormKind,
    QueryScaling,
    RopeConfig,
    gated,
    grouped,
    uniform,
    with_window,
)

_LAYER_TYPES = _FULL, _SLIDING = ("full_attention", "sliding_attention")


def refuse_unsupported(fields: Fields) -> None:
    """Refuse what no family of ours computes.

    Raises:
        CheckpointError: Another activation, or scaled logits.
    """
    activation = fields.get("hidden_act")
    if activation not in (None, "silu", "swish"):
        raise CheckpointError(f"{fields.where}: hidden_act is {short(activation)}; only 'silu' is supported")
    scale = fields.number("logit_scale", 1.0)
    if scale != 1.0:
        raise CheckpointError(f"{fields.where}: logit_scale is {scale}; only unscaled logits are supported")


def refuse_windows(fields: Fields) -> None:
    """Refuse sliding windows, where the architecture has none.

    Raises:
        CheckpointError: There is one.
    """
    layer_types = fields.words("layer_types")
    windowed = sorted(set(layer_types) - {"full_attention"})
    if windowed:
        raise CheckpointError(f"{fields.where}: layer_types has {windowed[0]!r}; only full attention is supported")
    window = fields.get("sliding_window")
    if fields.flag("use_sliding_window", default=window is not None and not layer_types):
        raise CheckpointError(f"{fields.where}: sliding_window is {short(window)}; only full attention is supported")


def refuse_quantised(fields: Fields) -> None:
    """Refuse weights that are not read.

    Raises:
        CheckpointError: They are quantised.
    """
    if fields.get("quantization_config") is not None:
        raise CheckpointError(f"{fields.where}: quantization_config is set; give the checkpoint before quantisation")


def read_mixer(
    fields: Fields,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
    rope: RopeConfig | None = None,
    query_scaling: QueryScaling | None = None,
) -> GroupedQuery:
    """Attention that sees everything before it.

    Args:
        fields: The geometry.
        qkv_bias: Of the family.
        o_bias: Of the family.
        qk_norm: Of the family.
        rope: Rotary embedding, if it has been read already.
        query_scaling: Of the family.

    Raises:
        CheckpointError: A field is missing or malformed.
    """
    width, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    if fields.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"{fields.where}: hidden_size {width} is not a multiple of num_attention_heads {heads}; add head_dim"
        )
    with read_from(fields.where):
        return GroupedQuery(
            num_heads=heads,
            num_kv_heads=fields.size("num_key_value_heads", heads),
            head_dim=fields.size("head_dim", width // heads),
            rope=rope or read_rope(fields),
            qkv_bias=qkv_bias,
            o_bias=o_bias,
            qk_norm=qk_norm,
            query_scaling=query_scaling,
        )


def read_mlp(fields: Fields, *, bias: bool = False) -> GatedMLP:
    """The SwiGLU.

    Raises:
        CheckpointError: Its width is missing or malformed.
    """
    with read_from(fields.where):
        return GatedMLP(width=fields.size("intermediate_size"), bias=bias)


def read_window(fields: Fields) -> int | None:
    """``sliding_window``, which the file must name: null is none, and absent means a default of the family."""
    fields.require("sliding_window")
    return None if fields.get("sliding_window") is None else fields.size("sliding_window")


def read_types(
    fields: Fields, known: Sequence[str], num_layers: int, *, name: str = "layer_types", owner: str = ""
) -> list[str]:
    """The kind of every layer, as a list in the file names them; empty where there is no list.

    Args:
        fields: Where the list is.
        known: Kinds that there are.
        num_layers: How many layers it must name.
        name: Of the list.
        owner: What says how many layers there are, in words; ``num_hidden_layers`` when left out.

    Raises:
        CheckpointError: The kinds are not one for each layer, or one of them is unknown.
    """
    types = fields.words(name)
    if types and len(types) != num_layers:
        owner = owner or f"num_hidden_layers is {num_layers}"
        raise CheckpointError(f"{fields.where}: {name} names {len(types)} layers but {owner}; they must agree")
    unknown = [kind for kind in types if kind not in known]
    if unknown:
        raise CheckpointError(f"{fields.where}: {name} has {short(unknown[0])}; expected {' or '.join(known)}")
    return list(types)


def read_windows(
    fields: Fields, window: int | None, slides: Callable[[int], bool], num_layers: int | None = None
) -> list[int | None]:
    """The window of every layer.

    Args:
        fields: The geometry; ``layer_types`` decides where it is there.
        window: Of the layers that slide.
        slides: Which do, where there are no ``layer_types``.
        num_layers: How many there are, where ``num_hidden_layers`` is no witness.

    Raises:
        CheckpointError: The types are not one for each layer, name a kind that is none, or slide without a window.
    """
    count = num_layers or read_num_layers(fields)
    types = read_types(fields, _LAYER_TYPES, count, owner="" if num_layers is None else f"the head has {count}")
    if not types:
        return [window if slides(layer) else None for layer in range(count)]
    if window is None and _SLIDING in types:
        raise CheckpointError(f"{fields.where}: layer_types has {_SLIDING!r}, but no sliding_window is switched on")
    return [window if kind == _SLIDING else None for kind in types]


def read_decoder(
    fields: Fields, mixer: Mixer, mlp: MLP, *, windows: Sequence[int | None] | None = None
) -> DecoderConfig:
    """A target of layers that differ at most in their windows.

    Args:
        fields: The geometry.
        mixer: Of every layer.
        mlp: Of every layer.
        windows: Of each layer; none when left out.

    Raises:
        CheckpointError: A field is missing, malformed or unsupported.
    """
    with read_from(fields.where):
        if windows is None:
            layers = uniform(read_num_layers(fields), mixer, mlp)
        else:
            layers = tuple(with_window(LayerConfig(mixer=mixer, mlp=mlp), one) for one in windows)
    return decoder_of(fields, layers)


def decoder_of(fields: Fields, layers: Sequence[LayerConfig], *, norm_kind: NormKind = "plain") -> DecoderConfig:
    """A target of these layers.

    Args:
        fields: What it has beside them.
        layers: One after the other.
        norm_kind: Of the family.

    Raises:
        CheckpointError: A field is missing, malformed or unsupported.
    """
    refuse_unsupported(fields)
    with read_from(fields.where):
        return DecoderConfig(
            layers=tuple(layers),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            norm_kind=norm_kind,
            **read_stack(fields),
        )


def read_num_layers(fields: Fields) -> int:
    """``num_hidden_layers``, no more than any model has.

    Raises:
        CheckpointError: It is missing or malformed.
    """
    count = fields.size("num_hidden_layers")
    if count > MOST_LAYERS:
        raise CheckpointError(f"{fields.where}: num_hidden_layers is {count}; expected at most {MOST_LAYERS:,}")
    return count


def read_stack(fields: Fields) -> dict[str, Any]:
    """What a target and a head have beside their layers, as arguments of their configurations.

    Raises:
        CheckpointError: A field is missing or malformed.
    """
    return {
        "vocab_size": fields.size("vocab_size"),
        "width": fields.size("hidden_size"),
        # The bound on the context does not enter the mathematics; 2048 is what LlamaConfig says.
        "max_positions": fields.size("max_position_embeddings", 2048),
        "norm_eps": fields.number("rms_norm_eps"),
    }


def stack_fields(config: Any, dtype: str) -> dict[str, Any]:
    """Returns the geometry as a Hugging Face configuration, which describes one layer for all of them.

    A family whose layers differ in more, or are of other kinds, adds its own fields to these.

    Args:
        config: Of a target or of any head: it has ``layers``.
        dtype: Of the stored weights.

    Raises:
        CheckpointError: transformers would not read it.
    """
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    mlp = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, GatedMLP)), None)
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, GroupedQuery)]
    if mlp is not None:
        fields["intermediate_size"] = mlp.width
    if mixers:
        # Where only some layers rotate, those say how.
        rotating = next((mixer for mixer in mixers if mixer.rope is not None), mixers[0])
        fields |= _attention_fields(rotating, config.width)
    return fields


def _attention_fields(mixer: GroupedQuery, width: int) -> dict[str, Any]:
    if width % mixer.num_heads:
        raise CheckpointError(
            f"width {width} is not a multiple of num_heads {mixer.num_heads}; the Hugging Face layout "
            "cannot express that (transformers refuses such a config.json), use --to jax"
        )
    return {
        "num_attention_heads": mixer.num_heads,
        "num_key_value_heads": mixer.num_kv_heads,
        "head_dim": mixer.head_dim,
        **rope_fields(mixer.rope),
    }


def layer_types(config: DecoderConfig | Eagle3Config) -> list[str]:
    """``layer_types`` of a target or a head."""
    return [_FULL if grouped(layer).window is None else _SLIDING for layer in config.layers]


def read_head_windows(fields: Fields, num_layers: int, *, switched: bool) -> list[int | None]:
    """The window of every layer of a head, whose ``layer_types`` alone name the layers that slide.

    Without them vLLM takes the window of the target's cache, whatever the head's file says; such a file is refused.

    Args:
        fields: The geometry.
        num_layers: Of the head.
        switched: Whether a window counts only where ``use_sliding_window`` is set, as in Qwen3's configuration.

    Raises:
        CheckpointError: The types do not fit the layers, or there is a window that no type refers to.
    """
    types = fields.words("layer_types")
    if not types and fields.flag("use_sliding_window", default=fields.get("sliding_window") is not None):
        raise CheckpointError(
            f"{fields.where}: sliding_window is {short(fields.get('sliding_window'))}, but no layer_types say which of "
            "the head's layers slide, and engines disagree; add them"
        )
    if set(types) <= {_FULL}:
        return [None] * num_layers
    is_on = _SLIDING in types and fields.flag("use_sliding_window", default=not switched)
    return read_windows(fields, read_window(fields) if is_on else None, lambda _: False, num_layers)


def head_window_fields(config: Eagle3Config) -> dict[str, Any]:
    """The same on the way out; nothing where all layers see everything.

    Raises:
        CheckpointError: The windows differ, which the layout has one field for.
    """
    windows = {grouped(layer).window for layer in config.layers} - {None}
    if not windows:
        return {}
    if len(windows) > 1:
        raise CheckpointError(
            f"the head's layers have windows of {sorted(windows)} tokens; this layout has one size for all, "  # type: ignore[type-var]
            "use --to jax"
        )
    return {"layer_types": layer_types(config), "sliding_window": windows.pop()}


def bias_fields(layer: LayerConfig) -> dict[str, bool]:
    """Biases as Llama's configuration says them: one flag for all four projections of attention."""
    return {"attention_bias": grouped(layer).qkv_bias, "mlp_bias": gated(layer).bias}
