"""Fields of Hugging Face ``config.json`` files that targets and heads share: layers, rotary embedding, experts.

Every part is read by a ``read_`` function and written by a ``_fields`` function. A field whose absence would change the
mathematics is required. The exceptions are those that the published format itself defines as optional, because
checkpoints in use omit them: the number of key heads (as many as query heads), the head dimension (width over heads),
biases (none), the rotary base (10000) and the activation (SiLU).

Every function raises a ``CheckpointError`` for a field that is missing, malformed or unsupported, and for a
configuration that the format cannot express. The message names the field and the file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields, agreed, read_from
from eagle3_jax.models.config import (
    MLP,
    MOST_LAYERS,
    Activation,
    DecoderConfig,
    Eagle3Config,
    Experts,
    GatedMLP,
    GroupedQuery,
    LayerConfig,
    Mixer,
    NormKind,
    RopeConfig,
    Router,
    gated,
    grouped,
    uniform,
    with_window,
)

_LAYER_TYPES = _FULL, _SLIDING = ("full_attention", "sliding_attention")
_ORIGINAL = "original_max_position_embeddings"
# The parameters of each type of rotary embedding, with their defaults; ... where a parameter is required. The beta of
# yarn are the constants of the paper, and the rest of its optional parameters is derived from the factor.
_ROPE_PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": ...},
    "llama3": {"factor": ..., _ORIGINAL: ..., "low_freq_factor": ..., "high_freq_factor": ...},
    "yarn": {
        "factor": ...,
        _ORIGINAL: ...,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": True,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
    },
    "longrope": {_ORIGINAL: ..., "short_factor": ..., "long_factor": ..., "factor": None, "attention_factor": None},
}
# Types that are computed for every length.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}.union(*_ROPE_PARAMETERS.values())
# Names of the number of experts. transformers writes one of them where published files have the other.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def refuse_unsupported(
    fields: Fields, *, hidden_act: str = "silu", scales_logits: bool = False, causal: bool = True
) -> None:
    """Refuses activations, scaled logits, layers of other sizes and attention that the family does not compute.

    ``causal`` says whether attention must be causal, as in every target; a block drafter reads that itself.
    """
    if causal:
        refuse_bidirectional(fields)
    if fields.get("per_layer_config"):
        raise fields.wrong("per_layer_config", "fields of single layers are not supported")
    if (fields.get("hidden_act"), hidden_act) != ("swish", "silu"):  # two names of one function
        fields.only(hidden_act=hidden_act)
    if not scales_logits:
        fields.only(logit_scale=1.0)


def refuse_bidirectional(fields: Fields) -> None:
    """Refuses ``is_causal`` with another value than true, which makes transformers attend in both directions."""
    if fields.values.get("is_causal", True) is not True:  # null counts as false there
        raise fields.wrong("is_causal", "only causal attention is supported")


def refuse_windows(fields: Fields) -> None:
    """Refuses sliding windows, where the architecture has none."""
    layer_types = fields.words("layer_types")
    windowed = sorted(set(layer_types) - {"full_attention"})
    if windowed:
        raise CheckpointError(f"{fields.where}: layer_types has {windowed[0]!r}; only full attention is supported")
    if fields.flag("use_sliding_window", default=fields.get("sliding_window") is not None and not layer_types):
        raise fields.wrong("sliding_window", "only full attention is supported")


def read_mixer(fields: Fields, *, rope: RopeConfig | None = None, **features: Any) -> GroupedQuery:
    """Grouped-query attention without a window.

    Args:
        fields: The geometry.
        rope: Rotary embedding, if it has been read already.
        features: Further arguments of :class:`GroupedQuery`, such as ``qkv_bias``.
    """
    width = fields.size("hidden_size")
    heads = fields.size("num_attention_heads")
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
            **features,
        )


def read_mlp(fields: Fields, *, bias: bool = False, activation: Activation = "silu") -> GatedMLP:
    """The gated MLP."""
    with read_from(fields.where):
        return GatedMLP(width=fields.size("intermediate_size"), bias=bias, activation=activation)


def read_window(fields: Fields) -> int | None:
    """``sliding_window``, which the file must name: null is none, and absent means a default of the family."""
    fields.require("sliding_window")
    return fields.optional_size("sliding_window")


def read_types(
    fields: Fields, known: Sequence[str], num_layers: int, *, name: str = "layer_types", owner: str = ""
) -> list[str]:
    """The kind of every layer, from a list of the file; empty where there is no list.

    ``owner`` says in a message where the number of layers comes from, by default from ``num_hidden_layers``.
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
    """The window of every layer: as ``layer_types`` says, or otherwise ``window`` for those that ``slides`` names."""
    count = num_layers or read_num_layers(fields)
    types = read_types(fields, _LAYER_TYPES, count, owner="" if num_layers is None else f"the head has {count}")
    if not types:
        return [window if slides(layer) else None for layer in range(count)]
    if window is None and _SLIDING in types:
        raise CheckpointError(f"{fields.where}: layer_types has {_SLIDING!r}, but no sliding_window is switched on")
    return [window if kind == _SLIDING else None for kind in types]


def read_window_of_all(fields: Fields, window: int | None) -> list[int | None]:
    """The window of every layer of a family in which ``layer_types`` changes nothing: it may only say the same."""
    count = read_num_layers(fields)
    kind = _FULL if window is None else _SLIDING
    if set(read_types(fields, _LAYER_TYPES, count)) - {kind}:
        raise fields.wrong("layer_types", f"sliding_window is {window} in every layer, so expected {kind!r} alone")
    return [window] * count


def read_decoder(
    fields: Fields, mixer: Mixer, mlp: MLP, *, windows: Sequence[int | None] | None = None
) -> DecoderConfig:
    """A target of layers that differ at most in their windows.

    Args:
        fields: The geometry.
        mixer: Of every layer.
        mlp: Of every layer.
        windows: Of each layer; none when left out.
    """
    with read_from(fields.where):
        if windows is None:
            layers = uniform(read_num_layers(fields), mixer, mlp)
        else:
            layers = tuple(with_window(LayerConfig(mixer=mixer, mlp=mlp), one) for one in windows)
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
    """A target of these layers; ``features`` are further arguments of :class:`DecoderConfig`."""
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
    """``num_hidden_layers``, no more than any model has."""
    count = fields.size("num_hidden_layers")
    if count > MOST_LAYERS:
        raise CheckpointError(f"{fields.where}: num_hidden_layers is {count}; expected at most {MOST_LAYERS:,}")
    return count


def read_stack(fields: Fields, norm_eps: str = "rms_norm_eps") -> dict[str, Any]:
    """The sizes of a target or a head besides its layers, as arguments of its configuration."""
    return {
        "vocab_size": fields.size("vocab_size"),
        "width": fields.size("hidden_size"),
        # The bound on the context does not enter the mathematics; 2048 is what LlamaConfig says.
        "max_positions": fields.size("max_position_embeddings", 2048),
        "norm_eps": fields.number(norm_eps),
    }


def stack_fields(config: Any, dtype: str) -> dict[str, Any]:
    """The geometry of a target or a head as a Hugging Face configuration, which describes one layer for all of them.

    A family whose layers differ in more, or are of other kinds, adds its own fields to these.
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
        # Where only some layers rotate, the first of those is described.
        mixer = next((mixer for mixer in mixers if mixer.rope is not None), mixers[0])
        if config.width % mixer.num_heads:
            raise CheckpointError(
                f"width {config.width} is not a multiple of num_heads {mixer.num_heads}; the Hugging Face layout "
                "cannot express that (transformers refuses such a config.json), use --to jax"
            )
        fields |= {
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            **rope_fields(mixer.rope),
        }
    return fields


def layer_types(config: DecoderConfig | Eagle3Config) -> list[str]:
    """``layer_types`` of a target or a head."""
    return [_FULL if grouped(layer).window is None else _SLIDING for layer in config.layers]


def read_head_windows(fields: Fields, num_layers: int, *, switched: bool) -> list[int | None]:
    """The window of every layer of a head, whose ``layer_types`` alone name the layers that slide.

    Without them vLLM takes the window of the target's cache, whatever the head's file says; such a file is refused.
    ``switched``: a window counts only where ``use_sliding_window`` is set, as in Qwen3's configuration.
    """
    types = fields.words("layer_types")
    if not types and fields.flag("use_sliding_window", default=fields.get("sliding_window") is not None):
        raise fields.wrong(
            "sliding_window", "no layer_types say which of the head's layers slide, and engines disagree, so add them"
        )
    if set(types) <= {_FULL}:
        return [None] * num_layers
    is_on = _SLIDING in types and fields.flag("use_sliding_window", default=not switched)
    return read_windows(fields, read_window(fields) if is_on else None, lambda _: False, num_layers)


def window_fields(config: DecoderConfig) -> dict[str, Any]:
    """``sliding_window`` and ``layer_types`` of a target whose windows are of one size."""
    windows = (grouped(layer).window for layer in config.layers)
    return {"sliding_window": next(filter(None, windows), None), "layer_types": layer_types(config)}


def head_window_fields(config: Eagle3Config) -> dict[str, Any]:
    """The fields of a head's windows; none where no layer has one."""
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
    """Biases in Llama's fields: one flag for all four projections of attention."""
    return {"attention_bias": grouped(layer).qkv_bias, "mlp_bias": gated(layer).bias}


def require_theta(fields: Fields) -> None:
    """Refuses a file that names no base of the rotary embedding, where its default is not that of other families."""
    if all(fields.section(name).get("rope_theta") is None for name in ("rope_parameters", "rope_scaling")):
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
    """The rotary embedding, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Args:
        fields: The geometry.
        known: Names among the parameters that the family reads itself.
        theta: The base where the file names none. 10,000 is that of the original Llama, whose files do not name it,
            and of official heads.
        partial: The share of channels that rotate, where the file does not say; ``None`` for a family in which all
            channels rotate.
        interleaved: Whether neighbouring channels rotate together, in this family.
        types: Types of the family.
    """
    sections = {name: fields.section(name) for name in ("rope_parameters", "rope_scaling")}
    own: dict[str, Any] = {"theta": theta, "partial": partial, "interleaved": interleaved, "types": types}
    found = {name: _rope_from(fields, one, known, **own) for name, one in sections.items() if one.values}
    return agreed(found, fields.where) or _rope_from(fields, Fields({}, fields.where), known, **own)


def _rope_from(
    fields: Fields,
    rope: Fields,
    known: tuple[str, ...],
    *,
    theta: float,
    partial: float | None,
    interleaved: bool,
    types: Sequence[str],
) -> RopeConfig:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in types:
        raise CheckpointError(
            f"{rope.where}: rope type {short(kind)} is not supported; expected one of {', '.join(types)}"
        )
    unknown = sorted(
        key for key, value in rope.values.items() if key not in _ROPE_KEYS and key not in known and value is not None
    )
    if unknown:
        raise CheckpointError(f"{rope.where}: {unknown[0]!r} is not supported for rope type {kind!r}")
    share = _either(fields, rope, "partial_rotary_factor", 1.0 if partial is None else partial)
    if partial is None and share != 1.0:
        raise CheckpointError(f"{fields.where}: partial_rotary_factor is not supported; all channels must rotate")
    base = _either(fields, rope, "rope_theta", theta)
    if base <= 0:
        raise CheckpointError(f"{fields.where}: rope_theta is {base}; expected a positive number")
    with read_from(rope.where):
        return dataclasses.replace(_rope_of(kind, base, fields, rope), partial=share, interleaved=interleaved)


def _either(fields: Fields, rope: Fields, name: str, default: float) -> float:
    """A number at the top level, among the parameters, or in both places."""
    found = {name: fields.optional_number(name), f"{name} in the rope parameters": rope.optional_number(name)}
    value = agreed(found, fields.where)
    return default if value is None else value


def _rope_of(kind: str, theta: float, fields: Fields, rope: Fields) -> RopeConfig:
    values: dict[str, Any] = {"theta": theta, "type": kind}
    for name, default in _ROPE_PARAMETERS[kind].items():
        if name == _ORIGINAL:
            # Phi-style files keep it at the top level, where transformers gives it priority.
            owner = fields if fields.get(name) is not None else rope
            values["original_max_positions"] = owner.integer(name)
        elif name in ("short_factor", "long_factor"):
            values[name] = rope.numbers(name)
        elif isinstance(default, bool):
            values[name] = rope.flag(name, default and name not in rope.values)  # as in transformers, null means false
        elif default is None:
            values[name] = rope.optional_number(name)
        else:
            values[name] = rope.number(name, None if default is ... else default)
    if kind == "longrope" and values["factor"] is None:
        values["factor"] = fields.size("max_position_embeddings") / max(values["original_max_positions"], 1)
    return RopeConfig(**values)


def rope_fields(rope: RopeConfig | None, *, partial: bool = False) -> dict[str, Any]:
    """The rotary embedding in both notations: transformers 5 reads the new one, 4.x, vLLM and SGLang the old one.

    ``partial`` writes the share of channels that rotate, for a family in which some need not.
    """
    if rope is None:
        raise CheckpointError("a layer without rotary embedding cannot be expressed in this layout; use --to jax")
    scaling: dict[str, Any] | None = None if rope.type == "default" else {"rope_type": rope.type}
    for name in _ROPE_PARAMETERS[rope.type]:
        value = rope.original_max_positions if name == _ORIGINAL else getattr(rope, name)
        if scaling is not None and value is not None and value is not True:  # transformers 4 warns about `truncate`
            scaling[name] = list(value) if isinstance(value, tuple) else value
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": rope.theta}
    fields = {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}
    if not partial:
        return fields
    share = {"partial_rotary_factor": rope.partial}
    return {**fields, **share, "rope_parameters": {**parameters, **share}}


def read_experts(fields: Fields, router: Router, *, width: str = "moe_intermediate_size", **features: Any) -> Experts:
    """A mixture of experts; ``width`` is the field with the inner width of one."""
    count = agreed({name: fields.optional_size(name) for name in _COUNTS}, fields.where)
    if count is None:
        raise CheckpointError(f"{fields.where} has none of {', '.join(_COUNTS)}; add the number of experts")
    with read_from(fields.where):
        return Experts(
            num_experts=count,
            per_token=fields.size("num_experts_per_tok"),
            width=fields.size(width),
            router=router,
            **features,
        )


# The fields of DeepSeek V3's experts, by ours.
_CORRECTED = {
    "per_token": "num_experts_per_tok",
    "width": "moe_intermediate_size",
    "normalise": "norm_topk_prob",
    "scaling": "routed_scaling_factor",
    "groups": "n_group",
    "kept_groups": "topk_group",
}


def read_corrected(fields: Fields) -> Experts:
    """The experts of DeepSeek V3 and its successors: sigmoids, a correction that chooses, groups, shared experts."""
    fields.only(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    fields.require("norm_topk_prob")
    return read_experts(
        fields,
        "sigmoid",
        normalise=fields.flag("norm_topk_prob"),
        scaling=fields.number("routed_scaling_factor"),
        groups=fields.size("n_group", 1),
        kept_groups=fields.size("topk_group", 1),
        shared_width=fields.size("moe_intermediate_size") * fields.integer("n_shared_experts", 0),
    )


def corrected_fields(experts: Experts) -> dict[str, Any]:
    """The fields of such experts."""
    counts = {"n_routed_experts": experts.num_experts, "n_shared_experts": experts.shared_width // experts.width}
    return counts | {theirs: getattr(experts, ours) for ours, theirs in _CORRECTED.items()}


def read_mlps(
    fields: Fields,
    is_sparse: Sequence[bool],
    experts: Callable[[Fields], Experts],
    dense: Callable[[Fields], GatedMLP] = read_mlp,
) -> list[GatedMLP | Experts]:
    """The MLP of every layer: experts where it is sparse. A kind that no layer has is not read."""
    read = {kind: (experts if kind else dense)(fields) for kind in set(is_sparse)}
    return [read[kind] for kind in is_sparse]


def size_fields(experts: Experts) -> dict[str, Any]:
    """The number of experts, the number for a token, and their width, in Qwen's fields."""
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.per_token,
        "moe_intermediate_size": experts.width,
    }


def experts_of(config: DecoderConfig) -> Experts:
    """The experts of a target, which are the same in every layer that has them."""
    found = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, Experts)), None)
    if found is None:
        raise CheckpointError("a target without experts is of another family; use --to jax")
    return found


def dense_layers(config: DecoderConfig) -> list[int]:
    """The layers without experts."""
    return [index for index, layer in enumerate(config.layers) if isinstance(layer.mlp, GatedMLP)]
