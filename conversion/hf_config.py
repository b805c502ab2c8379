"""Fields of Hugging Face ``config.json`` files that targets and heads share.

A ``read_`` function reads each part and a ``_fields`` function writes it. A field whose absence
would change the mathematics is required. The exceptions are fields that the published format
defines as optional and that checkpoints in use omit: the number of key heads (as many as query
heads), the head dimension (width over heads), biases (none), the rotary base (10000) and the
activation (SiLU).

Every function raises a ``CheckpointError`` for a field that is missing, malformed or unsupported,
and for a configuration that the format cannot express. The message names the field and the file.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields, agreed, read_from
from eagle3_jax.models.config import (
    MLP,
    MOST_LAYERS,
    Activation,
    DecoderConfig,
    Experts,
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    Mixer,
    NormKind,
    RopeConfig,
    RouterName,
    gated,
    grouped,
    with_window,
)

LAYER_TYPES = _FULL, SLIDING = ("full_attention", "sliding_attention")
_ORIGINAL = "original_max_position_embeddings"
_OUR_NAMES = {_ORIGINAL: "original_max_positions"}
# The parameters of each type of rotary embedding, and the functions that read them. The two betas
# of yarn are the constants of the paper. Its other optional parameters are derived from the factor.
_ROPE_PARAMETERS: dict[str, dict[str, Callable[[Fields, str], Any]]] = {
    "default": {},
    "linear": {"factor": Fields.number},
    "proportional": {"factor": lambda rope, name: rope.number(name, 1.0)},
    "llama3": {
        "factor": Fields.number,
        _ORIGINAL: Fields.integer,
        "low_freq_factor": Fields.number,
        "high_freq_factor": Fields.number,
    },
    "yarn": {
        "factor": Fields.number,
        _ORIGINAL: Fields.integer,
        "beta_fast": lambda rope, name: rope.number(name, 32.0),
        "beta_slow": lambda rope, name: rope.number(name, 1.0),
        # null means false in transformers.
        "truncate": lambda rope, name: rope.flag(name, name not in rope.values),
        "attention_factor": Fields.optional_number,
        "mscale": Fields.optional_number,
        "mscale_all_dim": Fields.optional_number,
    },
    "longrope": {
        _ORIGINAL: Fields.integer,
        "short_factor": Fields.numbers,
        "long_factor": Fields.numbers,
        "factor": Fields.optional_number,
        "attention_factor": Fields.optional_number,
    },
}
#: The value of a field that a family's files must not have.
ABSENT = object()
# Types without a limit of the text length.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}.union(
    *_ROPE_PARAMETERS.values()
)
# Names of the number of experts. transformers and publishers write different ones.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def refuse_unsupported(
    fields: Fields, *, hidden_act: str = "silu", scales_logits: bool = False, causal: bool = True
) -> None:
    """Refuses what the family does not compute.

    These are activations, scaled logits, layers of different sizes and other kinds of attention.
    ``causal`` means that attention must be causal, as in every target. A block drafter reads that
    setting itself.
    """
    if causal:
        refuse_bidirectional(fields)
    if fields.get("per_layer_config"):
        raise fields.wrong("per_layer_config", "fields of single layers are not supported")
    # Both are names of one function.
    if (fields.get("hidden_act"), hidden_act) != ("swish", "silu"):
        fields.only(hidden_act=hidden_act)
    if not scales_logits:
        fields.only(logit_scale=1.0)


def refuse_bidirectional(fields: Fields) -> None:
    """Refuses ``is_causal`` unless it is true; else transformers attends in both directions."""
    # null counts as false there.
    if fields.values.get("is_causal", True) is not True:
        raise fields.wrong("is_causal", "only causal attention is supported")


def refuse_windows(fields: Fields) -> None:
    """Refuses sliding windows, for an architecture without them."""
    layer_types = fields.words("layer_types")
    windowed = sorted(set(layer_types) - {"full_attention"})
    if windowed:
        raise CheckpointError(
            f"{fields.where}: layer_types has {windowed[0]!r}; only full attention is supported"
        )
    if fields.flag(
        "use_sliding_window", default=fields.get("sliding_window") is not None and not layer_types
    ):
        raise fields.wrong("sliding_window", "only full attention is supported")


def read_mixer(fields: Fields, *, rope: RopeConfig | None = None, **features: Any) -> GroupedQuery:
    """Reads grouped-query attention without a window.

    Args:
        fields: The fields of the configuration with the sizes of the model.
        rope: Rotary embedding. Default: read from ``fields``.
        features: Further arguments of :class:`GroupedQuery`, such as ``qkv_bias``.
    """
    width = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
    if fields.get("head_dim") is None and width % heads:
        raise CheckpointError(
            f"{fields.where}: hidden_size {width} is not a multiple of num_attention_heads {heads};"
            " add head_dim"
        )

    with read_from(fields.where):
        return GroupedQuery(
            num_heads=heads,
            num_kv_heads=fields.size("num_key_value_heads", heads),
            head_dim=fields.size("head_dim", width // heads),
            rope=rope or read_rope(fields),
            **features,
        )


def read_biased_mixer(fields: Fields, **features: Any) -> GroupedQuery:
    """Reads attention whose four projections all have a bias, or none; see :func:`read_mixer`."""
    bias = fields.flag("attention_bias")
    return read_mixer(fields, qkv_bias=bias, o_bias=bias, **features)


def read_mlp(fields: Fields, *, bias: bool = False, activation: Activation = "silu") -> GatedMLP:
    """Reads the gated MLP."""
    with read_from(fields.where):
        return GatedMLP(width=fields.size("intermediate_size"), bias=bias, activation=activation)


def read_window(fields: Fields) -> int | None:
    """Reads ``sliding_window``, where null means no window.

    The file must have the field, because its default differs by family.
    """
    fields.require("sliding_window")
    return fields.optional_size("sliding_window")


def read_types(
    fields: Fields,
    known: Sequence[str],
    num_layers: int,
    *,
    name: str = "layer_types",
    owner: str = "",
) -> list[str]:
    """Reads the kind of every layer from a list of the file; an empty list if there is none.

    Args:
        fields: The fields of the configuration.
        known: The supported kinds.
        num_layers: Number of layers.
        name: Name of the list.
        owner: The source of the number of layers, in messages. Default: ``num_hidden_layers``.
    """
    types = fields.words(name)
    if types and len(types) != num_layers:
        owner = owner or f"num_hidden_layers is {num_layers}"
        raise CheckpointError(
            f"{fields.where}: {name} names {len(types)} layers but {owner}; they must agree"
        )
    unknown = [kind for kind in types if kind not in known]
    if unknown:
        raise CheckpointError(
            f"{fields.where}: {name} has {short(unknown[0])}; expected {' or '.join(known)}"
        )
    return list(types)


def read_windows(
    fields: Fields, window: int | None, slides: Callable[[int], bool], num_layers: int | None = None
) -> list[int | None]:
    """Reads the window of every layer from ``layer_types``.

    Args:
        fields: The fields of the configuration.
        window: The window of the layers that have one; ``None`` for no windows.
        slides: Tells whether a layer has a window. It is used if there are no ``layer_types``.
        num_layers: Number of layers of a head. Default: ``num_hidden_layers``.
    """
    count = num_layers or read_num_layers(fields)
    owner = "" if num_layers is None else f"the head has {count}"
    types = read_types(fields, LAYER_TYPES, count, owner=owner)
    if not types:
        return [window if slides(layer) else None for layer in range(count)]
    if window is None and SLIDING in types:
        raise CheckpointError(
            f"{fields.where}: layer_types has {SLIDING!r}, but no sliding_window is switched on"
        )
    return [window if kind == SLIDING else None for kind in types]


def read_window_of_all(fields: Fields, window: int | None) -> list[int | None]:
    """Returns the window of every layer of a family that ignores ``layer_types``.

    Other ``layer_types`` are refused.
    """
    count = read_num_layers(fields)
    kind = _FULL if window is None else SLIDING
    if set(read_types(fields, LAYER_TYPES, count)) - {kind}:
        raise fields.wrong(
            "layer_types", f"sliding_window is {window} in every layer, so expected {kind!r} alone"
        )
    return [window] * count


def read_decoder(
    fields: Fields, mixer: Mixer, mlp: MLP, *, windows: Sequence[int | None] | None = None
) -> DecoderConfig:
    """Reads a target whose layers differ at most in their windows.

    Args:
        fields: The fields of the configuration with the sizes of the model.
        mixer: The mixer of every layer, without a window.
        mlp: The MLP of every layer.
        windows: The window of each layer. Default: no windows.
    """
    with read_from(fields.where):
        layer = LayerConfig(mixer=mixer, mlp=mlp)
        layers = [layer] * read_num_layers(fields)
        if windows is not None:
            layers = [with_window(layer, window) for window in windows]
    return decoder_of(fields, layers)


def decoder_of(
    fields: Fields,
    layers: Sequence[LayerConfig],
    *,
    norm_kind: NormKind = "plain",
    norm_eps: str = "rms_norm_eps",
    hidden_act: str = "silu",
    tied: bool = False,
    **features: Any,
) -> DecoderConfig:
    """Builds a target of these layers.

    ``features`` are further arguments of :class:`DecoderConfig`.
    """
    refuse_unsupported(fields, hidden_act=hidden_act, scales_logits="logit_scale" in features)
    with read_from(fields.where):
        return DecoderConfig(
            layers=tuple(layers),
            tie_embeddings=fields.flag("tie_word_embeddings", tied),
            norm_kind=norm_kind,
            **read_stack(fields, norm_eps),
            **features,
        )


def read_num_layers(fields: Fields) -> int:
    """Reads ``num_hidden_layers``; refuses more layers than any model has."""
    count = fields.size("num_hidden_layers")
    if count > MOST_LAYERS:
        raise CheckpointError(
            f"{fields.where}: num_hidden_layers is {count}; expected at most {MOST_LAYERS:,}"
        )
    return count


def read_stack(fields: Fields, norm_eps: str = "rms_norm_eps") -> dict[str, Any]:
    """Reads the sizes of a target or a head, as arguments of its description; not its layers'."""
    return {
        "vocab_size": fields.size("vocab_size"),
        "width": fields.size("hidden_size"),
        # The limit of the context does not change the mathematics; 2048 is the default of
        # LlamaConfig.
        "max_positions": fields.size("max_position_embeddings", 2048),
        "norm_eps": fields.number(norm_eps),
    }


def stack_fields(config: Any, dtype: str, *, any_heads: bool = False) -> dict[str, Any]:
    """Returns the sizes of a target or a head as fields; Hugging Face's describe one layer.

    A family whose layers differ in more, or are of other kinds, adds its own fields. ``any_heads``
    means that transformers takes a width that the number of heads does not divide.
    """
    mlps = [layer.mlp for layer in config.layers if isinstance(layer.mlp, GatedMLP)]
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, GroupedQuery)]
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

    if mlps:
        fields["intermediate_size"] = mlps[0].width
    if mixers:
        # If only some layers rotate, the fields describe the first of those.
        mixer = next((mixer for mixer in mixers if mixer.rope is not None), mixers[0])
        if config.width % mixer.num_heads and not any_heads:
            raise CheckpointError(
                f"width {config.width} is not a multiple of num_heads {mixer.num_heads}; the"
                " Hugging Face layout cannot express that (transformers refuses such a"
                " config.json), use --to jax"
            )
        fields |= {
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            **rope_fields(mixer.rope),
        }
    return fields


def layer_types(config: Any) -> list[str]:
    """Returns ``layer_types`` of a target or a head."""
    return [_FULL if grouped(layer).window is None else SLIDING for layer in config.layers]


def read_head_windows(fields: Fields, num_layers: int, *, switched: bool) -> list[int | None]:
    """Reads the window of every layer of a head; only ``layer_types`` can name layers with one.

    A file with a window and no ``layer_types`` is refused: vLLM would use the window of the
    target's cache. ``switched`` means that a window counts only if ``use_sliding_window`` is set,
    as in Qwen3's configuration.
    """
    owner = f"the head has {num_layers}"
    types = read_types(fields, LAYER_TYPES, num_layers, owner=owner)
    if not types and fields.flag(
        "use_sliding_window", default=fields.get("sliding_window") is not None
    ):
        raise fields.wrong(
            "sliding_window",
            "no layer_types say which of the head's layers slide, and engines disagree, so add"
            " them",
        )

    if set(types) <= {_FULL}:
        return [None] * num_layers
    is_on = SLIDING in types and fields.flag("use_sliding_window", default=not switched)
    return read_windows(fields, read_window(fields) if is_on else None, lambda _: False, num_layers)


def window_fields(config: DecoderConfig) -> dict[str, Any]:
    """Returns the fields of a target whose windows have the same size."""
    windows = (grouped(layer).window for layer in config.layers)
    return {"sliding_window": next(filter(None, windows), None), "layer_types": layer_types(config)}


def head_window_fields(config: Any) -> dict[str, Any]:
    """Returns the fields of a head's windows; none if no layer has a window."""
    windows = {grouped(layer).window for layer in config.layers} - {None}
    if not windows:
        return {}
    if len(windows) > 1:
        raise CheckpointError(
            f"the head's layers have windows of {sorted(windows)} tokens; this layout has one size "  # type: ignore[type-var]
            "for all, use --to jax"
        )
    return {"layer_types": layer_types(config), "sliding_window": windows.pop()}


def bias_fields(layer: LayerConfig) -> dict[str, bool]:
    """Returns biases in Llama's fields: one flag for all four projections of attention."""
    return {"attention_bias": grouped(layer).qkv_bias, "mlp_bias": gated(layer).bias}


def require_theta(fields: Fields) -> None:
    """Refuses a file without the rotary base, for a family with an unusual default."""
    if all(
        fields.section(name).get("rope_theta") is None
        for name in ("rope_parameters", "rope_scaling")
    ):
        fields.number("rope_theta")


def read_rope(
    fields: Fields,
    *,
    known: tuple[str, ...] = (),
    theta: float = 10_000.0,
    partial: float | None = None,
    interleaved: bool = False,
    types: Sequence[str] = _ROPE_TYPES,
) -> RopeConfig:
    """Reads the rotary embedding.

    Files have it in ``rope_parameters`` (transformers 5), in ``rope_theta`` and ``rope_scaling``,
    or in both; then both must agree.

    Args:
        fields: The fields of the configuration.
        known: Names of parameters that the family reads itself.
        theta: Default of the base. 10,000 is that of official heads and of the original Llama,
            whose files omit it.
        partial: Default of the share of channels that rotate; ``None`` for a family in which all
            channels rotate.
        interleaved: Whether neighbouring channels rotate together, in this family.
        types: Types of the family.
    """
    read = functools.partial(
        _rope_from, fields, known=known, theta=theta, partial=partial, types=types
    )
    sections = {name: fields.section(name) for name in ("rope_parameters", "rope_scaling")}
    ropes = {name: read(section) for name, section in sections.items() if section.values}
    rope = agreed(ropes, fields.where) or read(Fields({}, fields.where))
    return dataclasses.replace(rope, interleaved=interleaved)


def _rope_from(
    fields: Fields,
    rope: Fields,
    *,
    known: tuple[str, ...],
    theta: float,
    partial: float | None,
    types: Sequence[str],
) -> RopeConfig:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in types:
        raise CheckpointError(
            f"{rope.where}: rope type {short(kind)} is not supported; expected one of"
            f" {', '.join(types)}"
        )

    allowed = _ROPE_KEYS.union(known)
    unknown = sorted(
        key for key, value in rope.values.items() if key not in allowed and value is not None
    )
    if unknown:
        raise CheckpointError(
            f"{rope.where}: {unknown[0]!r} is not supported for rope type {kind!r}"
        )

    share = _either(fields, rope, "partial_rotary_factor", 1.0 if partial is None else partial)
    if partial is None and share != 1.0:
        raise CheckpointError(
            f"{fields.where}: partial_rotary_factor is not supported; all channels must rotate"
        )
    base = _either(fields, rope, "rope_theta", theta)
    if base <= 0:
        raise CheckpointError(f"{fields.where}: rope_theta is {base}; expected a positive number")
    if fields.get(_ORIGINAL) is not None:
        # Files of Phi have it at the top level, and transformers gives that one priority.
        rope = Fields({**rope.values, _ORIGINAL: fields.get(_ORIGINAL)}, rope.where)

    parameters: dict[str, Any] = {"theta": base, "type": kind, "partial": share}
    parameters |= {
        _OUR_NAMES.get(name, name): read(rope, name)
        for name, read in _ROPE_PARAMETERS[kind].items()
    }
    # Files of Phi have no factor; as in transformers, it follows from the two lengths.
    if kind == "longrope" and parameters["factor"] is None:
        original = max(parameters["original_max_positions"], 1)
        parameters["factor"] = fields.size("max_position_embeddings") / original
    with read_from(rope.where):
        return RopeConfig(**parameters)


def _either(fields: Fields, rope: Fields, name: str, default: float) -> float:
    """Reads a number at the top level, among the parameters, or in both."""
    numbers = {
        name: fields.optional_number(name),
        f"{name} in the rope parameters": rope.optional_number(name),
    }
    value = agreed(numbers, fields.where)
    return default if value is None else value


def rope_fields(rope: RopeConfig | None, *, partial: bool = False) -> dict[str, Any]:
    """Returns the rotary embedding twice, as transformers 5 reads it and as others do.

    The others are transformers 4, vLLM and SGLang.

    ``partial`` adds the share of channels that rotate, for a family in which not all rotate.
    """
    if rope is None:
        raise CheckpointError(
            "a layer without rotary embedding cannot be expressed in this layout; use --to jax"
        )

    scaling: dict[str, Any] | None = None if rope.type == "default" else {"rope_type": rope.type}
    for name in _ROPE_PARAMETERS[rope.type]:
        value = getattr(rope, _OUR_NAMES.get(name, name))
        # transformers 4 warns about `truncate`, whose default is true.
        if scaling is not None and value is not None and value is not True:
            scaling[name] = list(value) if isinstance(value, tuple) else value

    share = {"partial_rotary_factor": rope.partial} if partial else {}
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": rope.theta, **share}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": parameters,
        **share,
    }


def read_experts(
    fields: Fields, router: RouterName, *, width: str = "moe_intermediate_size", **features: Any
) -> Experts:
    """Reads a mixture of experts; ``width`` names the field with the inner width of an expert."""
    counts = {name: fields.optional_size(name) for name in _COUNTS}
    count = agreed(counts, fields.where)
    if count is None:
        raise CheckpointError(
            f"{fields.where} has none of {', '.join(_COUNTS)}; add the number of experts"
        )
    with read_from(fields.where):
        return Experts(
            num_experts=count,
            per_token=fields.size("num_experts_per_tok"),
            width=fields.size(width),
            router=router,
            **features,
        )


# The fields of DeepSeek V3's experts, by the fields of :class:`Experts`.
_CORRECTED = {
    "per_token": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "normalise": "norm_topk_prob",
    "scaling": "routed_scaling_factor",
    "groups": "n_group",
    "kept_groups": "topk_group",
}


def read_corrected(fields: Fields) -> Experts:
    """Reads the experts of DeepSeek V3 and its successors.

    They have sigmoids, a correction bias, groups and shared experts.
    """
    fields.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    fields.require("norm_topk_prob")
    features = {
        "normalise": fields.flag("norm_topk_prob"),
        "scaling": fields.number("routed_scaling_factor"),
        "groups": fields.size("n_group", 1),
        "kept_groups": fields.size("topk_group", 1),
    }
    shared_width = fields.size("moe_intermediate_size") * fields.integer("n_shared_experts", 0)
    return read_experts(fields, "sigmoid", shared_width=shared_width, **features)


def corrected_fields(experts: Experts) -> dict[str, Any]:
    """Returns the fields of the experts that :func:`read_corrected` reads."""
    counts = {
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_width // experts.width,
    }
    return counts | {field: getattr(experts, name) for name, field in _CORRECTED.items()}


def read_mlps(
    fields: Fields,
    is_sparse: Sequence[bool],
    experts: Callable[[Fields], Experts],
    dense: Callable[[Fields], GatedMLP] = read_mlp,
) -> list[GatedMLP | Experts]:
    """Reads the MLP of every layer: experts in sparse ones. A kind without layers is not read."""
    read = {kind: (experts if kind else dense)(fields) for kind in set(is_sparse)}
    return [read[kind] for kind in is_sparse]


def read_corrected_mlps(fields: Fields) -> list[GatedMLP | Experts]:
    """Reads the MLP of every layer: dense ones first, then experts as in :func:`read_corrected`."""
    dense = fields.integer("first_k_dense_replace")
    return read_mlps(
        fields, [layer >= dense for layer in range(read_num_layers(fields))], read_corrected
    )


def size_fields(experts: Experts) -> dict[str, Any]:
    """Returns the number of experts, that per token, and an expert's width, in Qwen's fields."""
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
    }


def experts_of(config: DecoderConfig) -> Experts:
    """Returns the experts of a target, which are the same in every layer that has them."""
    experts = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, Experts)), None)
    if experts is None:
        raise CheckpointError("a target without experts is of another family; use --to jax")
    return experts


def dense_layers(config: DecoderConfig) -> list[int]:
    """Lists the layers without experts."""
    return [index for index, layer in enumerate(config.layers) if isinstance(layer.mlp, GatedMLP)]
