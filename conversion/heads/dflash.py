"""Reads and writes block drafters (DFlash, DSpark, JetSpec) in the dialects of published ones.

* ``vllm``: z-lab's and SpecForge's layout: sizes as in a Qwen3 model, other settings in
  ``dflash_config``. DSpark's fields are there or at the top level.
* ``speculators``: sizes in ``transformer_layer_config``.
* ``transformers``: Muse Glimmer's assistant, without the vocabulary.

All have the same tensors, two of them by other names in ``transformers``. There and in z-lab's the
layer is counted whose *output* is read (``target_layer_ids``). Speculators and this library count
the layer that this output *enters*, which is one more.

A ``sliding_window`` of ``w`` is a distance below ``w``, but in ``transformers`` a distance up to
``w``: one position more on either side. Whether layers with a window see rows ahead is a flag of
speculators, never a question in ``transformers``, and elsewhere no if the file does not say
``is_causal`` or vLLM's ``causal``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from eagle3_jax.conversion import blocks, draft_vocab, hf_config, rules
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError, short
from eagle3_jax.conversion.fields import Fields, agreed, read_from
from eagle3_jax.conversion.heads.eagle3 import is_speculators, read_model_type
from eagle3_jax.conversion.heads.head import (
    DRAFT_VOCABULARY,
    Check,
    HeadCheckpoint,
    HeadKind,
    Layout,
    Suspects,
    head_tensors,
    mask_token,
    read_as,
    read_mask_token,
    refuse_inexpressible,
    speculators_fields,
)
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.dflash import DFlashConfig, DFlashDrafter, Markov
from eagle3_jax.models.config import DecoderConfig, gated, grouped, uniform, with_window

_ASSISTANT = "muse_glimmer_assistant"

# Prefixes of other tools for the same tensors.
_TRANSFORMERS = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_ALIASES = {"midlayer.": "layers.0.", **_TRANSFORMERS}
_MASK = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Lists of layers, and the number to add to an id to get the layer that the residual stream enters.
_IDS = {
    "target_layer_ids": 1,
    "dspark_target_layer_ids": 1,
    "aux_hidden_state_layer_ids": 0,
    "eagle_aux_hidden_state_layer_ids": 0,
}
# Switches of other block drafters, each with the only supported setting.
_SETTINGS = {
    "use_aux_hidden_state": True,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "is_neox_style": True,
    "dspark_draft_topk": None,
    "input_embedding_scale": 1.0,
}
# What z-lab's code applies to the logits. The most likely tokens are the same without.
_LOGITS = ("output_multiplier", "final_logit_softcapping")


def recognise(signs: Signs) -> bool:
    """Recognises a block drafter by the configuration, or by the norm of its fused features."""
    if re.search("DFlash|DSpark", signs.architecture) or signs.method.startswith(
        ("dflash", "dspark", "xpress")
    ):
        return True
    is_part = signs.has(r"mtp\.\d+\.markov_head\.") and not signs.has(r"layers\.0\.")
    has_parts = is_part or signs.has(r"markov_head\.|candidate_selector\.")
    return (
        "dflash_config" in signs.config
        or _is_assistant(signs.config)
        or has_parts
        or {"fc.weight", "hidden_norm.weight"} <= signs.names
    )


def dialect(signs: Signs) -> str:
    """Returns the project whose conventions a head follows."""
    if _is_assistant(signs.config):
        return "transformers"
    return "speculators" if is_speculators(signs.config) else "vllm"


def _is_assistant(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == _ASSISTANT


def head_rules(config: DFlashConfig) -> list[Rule]:
    """Returns the rules of the tensors."""
    table = [
        *rules.linear("fc", "fc"),
        rules.norm("hidden_norm", "feature_norm"),
        rules.norm("norm", "norm"),
    ]
    for index, layer in enumerate(config.layers):
        table += blocks.block(layer, f"layers.{index}", f"blocks.{index}")
    if config.own_output:
        table += rules.linear("lm_head", "head")

    if config.markov is not None:
        table.append(Rule("markov_head.markov_w1.weight", "markov.before"))
        table += rules.linear("markov_head.markov_w2", "markov.after")
        if config.markov.type != "vanilla":
            name = {"gated": "gate", "rnn": "joint"}[config.markov.type]
            table += rules.linear(f"markov_head.{name}_proj", f"markov.{name}", bias=True)
    if config.confidence:
        table += rules.linear("confidence_head.proj", "confidence", bias=True)
    return table


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads a block drafter in either dialect."""
    return read_block(KIND, head_rules, read_config, stored, target)


def read_block(
    kind: HeadKind,
    table_of: Callable[[Any], list[Rule]],
    describe: Callable[..., Any],
    stored: Stored,
    target: DecoderConfig | None,
) -> HeadCheckpoint:
    """Reads a block drafter of a kind.

    Args:
        kind: DFlash or DFlash2.
        table_of: Returns the rules of its tensors.
        describe: Its :func:`read_config`.
        stored: The files of the head.
        target: The target that it drafts for; ``None`` if unknown.
    """
    directory = str(stored.directory)
    top = stored.fields
    tensors = rules.renamed(stored.tensors, _rename, directory)
    if any(name.startswith("mtp.") for name in stored.tensors):
        raise CheckpointError(
            f"{directory} holds mtp.* tensors that are DSpark, not MTP, with DeepSeek V4's layers"
            " (hyper-connections, experts), which are not read"
        )
    _refuse_relatives(top, directory)
    if (stored.directory / "mask_embedding.pt").exists():
        raise CheckpointError(
            f"{directory} has a mask_embedding.pt; a separate mask embedding is not supported"
        )

    config = describe(top, target, own_output="lm_head.weight" in tensors)
    rules.check_layers(
        config.num_layers, tensors, r"layers\.(\d{1,9})\.", f"{top.where}: num_hidden_layers"
    )

    notes = []
    if not config.causal:
        notes.append(
            f"every row sees its whole block: draft {config.num_predicted} tokens, fewer are"
            " another network"
        )
    if any(config.windows):
        notes.append(_sight(config))
    if is_speculators(top.values):
        if top.get("sliding_window_non_causal") is False and not config.causal:
            notes.append("sliding_window_non_causal is false: vLLM would serve the head causally")
        if any(config.windows):
            notes.append("as in vLLM a window counts from each row; in training, from the anchor")
    unapplied = [name for name in _LOGITS if merged(top).get(name) is not None]
    if unapplied and kind is KIND:
        notes.append(f"not applied to the logits, same likeliest tokens: {', '.join(unapplied)}")

    ids = draft_vocab.read(tensors, config, directory)
    is_full = config.draft_vocab_size == config.vocab_size
    return read_as(
        kind,
        stored,
        config,
        table_of(config),
        tensors,
        target=target,
        extra_names=DRAFT_VOCABULARY,
        draft_to_target=None if is_full else ids,
        note="; ".join(notes),
    )


def _sight(config: DFlashConfig) -> str:
    """Describes in words what layers with a window see."""
    parts = []
    for window in sorted(filter(None, set(config.windows))):
        layers = [str(layer) for layer, size in enumerate(config.windows) if size == window]
        ways = "behind" if config.is_causal(window) else "behind and ahead"
        named = f"layer {layers[0]} sees" if len(layers) == 1 else f"layers {', '.join(layers)} see"
        parts.append(f"{named} {window - 1} positions {ways}")
    return "; ".join(parts)


def _rename(name: str) -> str:
    name = name.removeprefix("model.")
    return next(
        (
            ours + name.removeprefix(alias)
            for alias, ours in _ALIASES.items()
            if name.startswith(alias)
        ),
        name,
    )


def read_config(
    top: Fields, target: DecoderConfig | None = None, *, own_output: bool | None = None
) -> DFlashConfig:
    """Reads the description of a block drafter.

    No field tells whether it has an output projection: ``own_output`` does. Default: it has one if
    its draft vocabulary is smaller than the target's. The file of an assistant does not have the
    vocabulary, which is that of the target.
    """
    is_assistant = _is_assistant(top.values)
    if is_assistant:
        if target is None:
            raise TargetNeededError(
                f"{top.where} does not have the size of the vocabulary; give the target as well"
                " (--target)"
            )
        top = Fields({**top.values, "vocab_size": target.vocab_size}, top.where)
    fields = merged(top)
    nested = is_speculators(top.values)
    geometry = top.section("transformer_layer_config") if nested else top
    _refuse_settings(fields, geometry, is_assistant)

    spark = _is_spark(fields)
    rank = fields.integer("markov_rank", 256 if nested else None) if spark else 0
    markov_type: Any = fields.one_of("markov_head_type", ("vanilla", "gated", "rnn"), "vanilla")
    confidence = None
    if spark and fields.flag("enable_confidence_head", nested):
        confidence = "markov" if fields.flag("confidence_head_with_markov", nested) else "hidden"
    block = "dspark_block_size" if fields.get("block_size") is None and spark else "block_size"

    stack = hf_config.read_stack(geometry)
    mixer = hf_config.read_biased_mixer(geometry, qk_norm=True)
    count = hf_config.read_num_layers(geometry)
    layer = uniform(1, mixer, hf_config.read_mlp(geometry))[0]
    windows = (
        _assistant_windows(geometry, count)
        if is_assistant
        else _engine_windows(fields, geometry, count)
    )
    draft_vocab_size = fields.size("draft_vocab_size", stack["vocab_size"])
    is_reduced = draft_vocab_size < stack["vocab_size"]
    aux_layers = _aux_layers(fields)
    # transformers gives the normed state in place of what leaves the target's last layer.
    normed_last = is_assistant and target is not None and aux_layers[-1:] == (target.num_layers,)
    if normed_last:
        aux_layers = (*aux_layers[:-1], aux_layers[-1] + 1)
    with read_from(top.where):
        markov = Markov(rank=rank, type=markov_type) if rank else None
        return DFlashConfig(
            **stack,
            layers=tuple(with_window(layer, window) for window in windows),
            draft_vocab_size=draft_vocab_size,
            target_width=fields.size("target_hidden_size", stack["width"]),
            aux_layers=aux_layers,
            normed_last=normed_last,
            block_size=fields.size(block),
            mask_token=read_mask_token(fields, _MASK),
            **_causality(top, fields, geometry, windows),
            from_anchor=_from_anchor(fields, nested, spark),
            markov=markov,
            confidence=confidence,
            own_output=is_reduced if own_output is None else own_output,
        )


def _is_spark(fields: Fields) -> bool:
    signs = Signs.read(fields)
    if signs.method.startswith("dspark") or "DSpark" in signs.architecture:
        return True
    return fields.get("projector_type") == "dspark" or fields.get("markov_rank") is not None


def merged(top: Fields) -> Fields:
    """Returns the fields at the top level, in ``dflash_config`` and in ``eagle_config``."""
    sections = {"": top} | {
        f" in {name}": top.section(name) for name in ("eagle_config", "dflash_config")
    }
    values = {}
    for name in dict.fromkeys(name for section in sections.values() for name in section.values):
        stated = {f"{name}{label}": section.get(name) for label, section in sections.items()}
        values[name] = agreed(stated, top.where)
    return Fields(values, top.where)


def _refuse_relatives(top: Fields, where: str) -> None:
    """Refuses related block drafters with parts that are not supported."""
    method = str(merged(top).get("projector_type") or Signs.read(top).method)
    if method not in ("", "dflash", "dflash2", "dspark", "jetspec"):
        raise CheckpointError(
            f"{where} is a {short(method)} drafter; DFlash, DFlash2, DSpark and JetSpec ones are"
            " loaded"
        )


def _refuse_settings(fields: Fields, geometry: Fields, is_assistant: bool) -> None:
    if is_assistant:
        geometry.require("head_dim")
        # transformers has these in no assistant and does not read them.
        fields.only(is_causal=False, causal=False, use_swa=False, swa_window_size=None)
    else:
        read_model_type(geometry, "for a block drafter")
    fields.only(**_SETTINGS)
    for section in (fields, geometry):
        hf_config.refuse_unsupported(section, causal=False)
    hf_config.require_theta(geometry)  # engines fill in 1000000 or 10000


def _aux_layers(fields: Fields) -> tuple[int, ...]:
    lists = {}
    for name, offset in _IDS.items():
        if ids := fields.indices(name, entries="layer numbers"):
            lists[f"{name} (+{offset})"] = tuple(layer + offset for layer in ids)
    layers = agreed(lists, fields.where)
    if layers is None:
        raise CheckpointError(
            f"{fields.where} has no target_layer_ids; add the layers whose outputs the head reads"
        )
    return layers


def _assistant_windows(fields: Fields, count: int) -> list[int | None]:
    """Reads the windows of an assistant: a distance up to ``sliding_window``, so one more."""
    window = fields.size("sliding_window") + 1
    return hf_config.read_windows(fields, window, lambda _: True, count)


def _engine_windows(fields: Fields, geometry: Fields, count: int) -> list[int | None]:
    """Reads the windows of a head for engines: a distance below ``sliding_window``.

    vLLM's ``use_swa`` means a window in all layers, unless ``layer_types`` name some, and its
    ``swa_window_size`` is another name of the size.
    """
    in_all = fields.flag("use_swa") and hf_config.SLIDING not in geometry.words("layer_types")
    slides = in_all or hf_config.SLIDING in geometry.words("layer_types")
    stated = {name: fields.optional_size(name) for name in ("swa_window_size", "sliding_window")}
    if slides and stated["swa_window_size"] is not None:
        stated["sliding_window"] = geometry.optional_size("sliding_window")
        switched_on = {"sliding_window": agreed(stated, fields.where), "use_sliding_window": True}
        geometry = Fields({**geometry.values, **switched_on}, geometry.where)
    if not in_all:
        return hf_config.read_head_windows(geometry, count, switched=True)

    hf_config.read_types(geometry, hf_config.LAYER_TYPES, count)
    return [geometry.size("sliding_window")] * count


def _causality(
    top: Fields, fields: Fields, geometry: Fields, windows: list[int | None]
) -> dict[str, bool]:
    """Tells which layers see only earlier rows of the block, as the file's project means it."""
    slides = any(windows)
    in_windows = False
    if is_speculators(top.values):
        # The flag of speculators concerns windows; layers with full attention are trained to see
        # the block. vLLM serves such a head causally if the flag is false. Without the flag the two
        # differ, and without layer_types it may mean all layers.
        non_causal = fields.flag("sliding_window_non_causal")
        is_stated = fields.get("sliding_window_non_causal") is not None
        if not (is_stated if slides else non_causal or geometry.words("layer_types")):
            raise CheckpointError(
                f"{top.where} does not say whether the block is causal; add layer_types to"
                " transformer_layer_config, or sliding_window_non_causal: true where every row sees"
                " the whole block"
            )
        in_windows = slides and not non_causal
    elif not _is_assistant(top.values):
        if fields.get("is_causal") is not None or fields.get("causal") is not None:
            return {"causal": fields.flag("is_causal", fields.flag("causal"))}
        in_windows = hf_config.SLIDING in geometry.words("layer_types")

    if in_windows and all(windows):
        return {"causal": True}
    return {"causal_windows": in_windows}


def _from_anchor(fields: Fields, nested: bool, spark: bool) -> bool:
    if nested and spark and fields.get("sample_from_anchor") is None:
        raise CheckpointError(
            f"{fields.where} has no sample_from_anchor, whose default differs between speculators"
            " (true) and vLLM (false); add what the head was trained with"
        )
    value = fields.flag("sample_from_anchor", spark)
    if fields.flag("dspark_bonus_anchor", not value) == value:
        raise CheckpointError(
            f"{fields.where}: sample_from_anchor and dspark_bonus_anchor are both {value}; one"
            " must go"
        )
    return value


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """Writes a head for vLLM (and z-lab's code, if it is plain DFlash) or another project."""
    values = layout_fields(checkpoint, dialect)
    tensors = head_tensors(KIND, checkpoint, head_rules(checkpoint.config))
    if dialect == "transformers":
        for theirs, ours in _TRANSFORMERS.items():
            tensors[f"{theirs}weight"] = tensors.pop(f"{ours}weight")
    return Layout(values, tensors)


def layout_fields(checkpoint: HeadCheckpoint, dialect: str) -> dict[str, Any]:
    """Returns the ``config.json`` of a block drafter in a layout that can express it."""
    refuse_inexpressible(dialect, _refusals(checkpoint, dialect))
    if dialect == "vllm":
        return _vllm_fields(checkpoint)
    if dialect == "speculators":
        return _speculators_fields(checkpoint)
    return _assistant_fields(checkpoint)


def _refusals(checkpoint: HeadCheckpoint, dialect: str) -> dict[str, Any]:
    """Returns the settings that a layout cannot express, and whether the head has them."""
    config = checkpoint.config
    mixer = grouped(config.layers[0])
    markov = config.markov
    sizes = set(filter(None, config.windows))
    settings = {
        "the state after the target's final norm": (
            config.normed_last and dialect != "transformers"
        ),
        f"aux_layers {config.aux_layers} (0 is not a layer's output)": config.aux_layers[0] == 0,
        "different biases of q, k, v and o": mixer.qkv_bias != mixer.o_bias,
        "layers without qk_norm": not mixer.qk_norm,
        "an MLP with biases": gated(config.layers[0]).bias,
        f"windows of {sorted(sizes)} positions (it has one size for all)": len(sizes) > 1,
    }

    is_full = config.draft_vocab_size == config.vocab_size
    depth = checkpoint.num_target_layers
    if dialect == "transformers":
        return settings | {
            "the last layer's output before the target's final norm": (
                config.aux_layers[-1] == depth or (config.normed_last and depth is None)
            ),
            "a window of one position": 1 in sizes,
            "biases": mixer.qkv_bias or mixer.o_bias,
            "a causal block": config.causal or config.causal_windows,
            "a bias by the token before": markov is not None,
            "a confidence": config.confidence is not None,
            "from_anchor": config.from_anchor,
            "a vocabulary, output or embedding of its own": (
                not is_full or config.own_output or checkpoint.embedding is not None
            ),
            f"target_width {config.target_width} and width {config.width}": (
                config.target_width != config.width
            ),
        }

    # The layout of speculators fixes these, or takes them from the verifier.
    if dialect == "speculators":
        full_output = (
            "an output projection of its own for the whole vocabulary (it takes the verifier's)"
        )
        return settings | {
            "causal (its full attention sees the whole block)": (
                config.causal and not all(config.windows)
            ),
            "an embedding of its own (it takes the verifier's)": checkpoint.embedding is not None,
            f"target_width {config.target_width} and width {config.width}": (
                config.target_width != config.width
            ),
            full_output: config.own_output and is_full,
        }

    if markov is None:
        return settings | {
            "from_anchor without markov": config.from_anchor,
            "a confidence without markov": config.confidence is not None,
        }
    return settings | {
        f"markov type {markov.type!r} (its bias is always the vanilla one)": (
            markov.type != "vanilla"
        )
    }


def _geometry_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    return {
        "model_type": "qwen3",
        **hf_config.stack_fields(config, checkpoint.dtype, any_heads=True),
        "attention_bias": grouped(config.layers[0]).qkv_bias,
        "layer_types": hf_config.layer_types(config),
        "use_sliding_window": any(config.windows),
        "tie_word_embeddings": False,
        **hf_config.head_window_fields(config),
    }


def _spark_fields(config: DFlashConfig) -> dict[str, Any]:
    markov = config.markov
    return {
        "markov_rank": 0 if markov is None else markov.rank,
        "markov_head_type": "vanilla" if markov is None else markov.type,
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "markov",
    }


def _vllm_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    ids = {
        "mask_token_id": config.mask_token,
        "target_layer_ids": [layer - 1 for layer in config.aux_layers],
    }
    # Without these fields layers with a window are causal, and the others are not.
    causality = {} if config.causal_windows else {"causal": config.causal}
    nested = {**ids, **causality, "use_aux_hidden_state": True}
    values = {
        "architectures": ["DFlashDraftModel"],
        **_geometry_fields(checkpoint),
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_width,
        "dflash_config": nested,
    }
    if any(config.windows) and not config.causal_windows:
        # z-lab's code and SGLang read no other field.
        values["is_causal"] = config.causal
    if checkpoint.num_target_layers is not None:
        values["num_target_layers"] = checkpoint.num_target_layers
    if config.markov is not None:
        # vLLM's DSpark reads these at the top level.
        anchor = {
            "sample_from_anchor": config.from_anchor,
            "dspark_bonus_anchor": not config.from_anchor,
        }
        values |= {"architectures": ["Qwen3DSparkModel"], **ids, **_spark_fields(config), **anchor}
    return values


def _speculators_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    spark = config.markov is not None or config.confidence is not None
    method, architecture = (
        ("dspark", "DSparkDraftModel") if spark else ("dflash", "DFlashDraftModel")
    )
    fields = {
        "transformer_layer_config": _geometry_fields(checkpoint),
        "draft_vocab_size": config.draft_vocab_size,
        "aux_hidden_state_layer_ids": list(config.aux_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "sample_from_anchor": config.from_anchor,
        # In vLLM an absent field and the field's default have opposite meanings.
        "sliding_window_non_causal": not (config.causal or config.causal_windows),
    }
    common = speculators_fields(method, architecture, config.num_predicted)
    return common | fields | (_spark_fields(config) if spark else {})


def _assistant_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    config = checkpoint.config
    fields = hf_config.stack_fields(config, checkpoint.dtype, any_heads=True)
    del fields["vocab_size"]
    window = next(filter(None, config.windows), None)
    return fields | {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": _ASSISTANT,
        "layer_types": hf_config.layer_types(config),
        # A distance, which its own position does not count for. Layers without a window ignore it.
        "sliding_window": config.max_positions if window is None else window - 1,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token,
        "target_layer_ids": [
            layer - 1 - (config.normed_last and layer == config.aux_layers[-1])
            for layer in config.aux_layers
        ],
    }


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """Reports the layers, whose numbers differ between projects, the block, and the mask token."""
    config = head.config
    longest = config.num_predicted
    block = f"block of {config.block_size} rows, each "
    if config.causal:
        block += f"sees those before it: any K up to {longest} drafts the same tokens"
    else:
        block += f"sees the whole block: only K = {longest} was trained"
    block += f"; the anchor's row predicts {'too' if config.from_anchor else 'nothing'}"
    if any(config.windows):
        block += f"; {_sight(config)}"

    counted = (
        "speculators and this library count the layer that is entered, z-lab the one before it"
    )
    confidence = "a head of its own, which is not used here" if config.confidence else "none"
    return [
        Check.report("auxiliary layers", f"{config.aux_layers} as layers entered; {counted}"),
        Check.report("block", block),
        Check.report("confidence", confidence),
        mask_token(config.mask_token, target.stop_tokens, target.source),
    ]


def variant(config: DFlashConfig) -> str:
    """Returns the name of the method with the options of a head."""
    if config.markov is not None or config.from_anchor:
        return "DSpark"
    return "JetSpec" if config.causal else "DFlash"


KIND = HeadKind(
    name="dflash",
    label="DFlash",
    recognise=recognise,
    classes=(DFlashConfig, DFlashDrafter),
    read=read,
    read_config=read_config,
    write=write,
    layouts=("vllm", "speculators", "transformers"),
    stacks={"blocks": lambda config: config.num_layers},
    dialect=dialect,
    variant=variant,
    examine=examine,
    suspects=Suspects(
        first=(
            "auxiliary layers counted from another end (z-lab's ids are one lower), or a head of"
            " another target"
        ),
        later=(
            "a causal block that is run as one that sees all of itself, or the other way round; or"
            " the mask token"
        ),
    ),
)
