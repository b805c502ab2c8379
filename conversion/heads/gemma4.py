"""Reads and writes Gemma 4's assistants, in the layout of transformers (``gemma4_assistant``).

``text_config`` describes the layers as that of a target does. ``generation_config.json`` has the
number of tokens of a draft (``num_assistant_tokens``). With ``use_ordered_embeddings`` the tokens
of each centroid are a row of ``masked_embedding.token_ordering``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle3_jax.conversion import blocks, draft_vocab, hf_config, rules
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
from eagle3_jax.conversion.families import gemma4 as family
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.heads.head import (
    Check,
    HeadCheckpoint,
    HeadKind,
    Layout,
    Suspects,
    head_tensors,
    read_as,
    refuse_inexpressible,
)
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.conversion.sidecars import read_object
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.gemma4 import Gemma4AssistantConfig, Gemma4AssistantDrafter
from eagle3_jax.models.config import DecoderConfig, GroupedQuery, LayerConfig, gated, grouped

_MODEL_TYPE = "gemma4_assistant"
_ARCHITECTURE = "Gemma4AssistantForCausalLM"
_ORDERING = "masked_embedding.token_ordering"
# Fields with one supported value.
_FIXED = {
    "tie_word_embeddings": True,
    "final_logit_softcapping": None,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "hidden_activation": family.GELU,
}
# Fields that every file of transformers may have and that change no computation here.
_COMMON = {
    "architectures",
    "model_type",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "use_cache",
    "_name_or_path",
    "chunk_size_feed_forward",
    "id2label",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
}
_TOP = {
    "text_config",
    "backbone_hidden_size",
    "use_ordered_embeddings",
    "num_centroids",
    "centroid_intermediate_top_k",
    "tie_word_embeddings",
    # Tokens of images and sounds, for which the target's keys are read like all others.
    "audio_token_id",
    "boa_token_id",
    "boi_token_id",
    "eoa_token_id",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
} | _COMMON
_TEXT = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_kv_shared_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_global_key_value_heads",
    "head_dim",
    "global_head_dim",
    "per_layer_config",
    "attention_k_eq_v",
    "attention_bias",
    "attention_dropout",
    "layer_types",
    "sliding_window",
    "rope_parameters",
    "rms_norm_eps",
    "max_position_embeddings",
    "use_bidirectional_attention",
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
} | {*_FIXED, *_COMMON}


def recognise(signs: Signs) -> bool:
    """Recognises an assistant by the configuration, or by its two projections."""
    return (
        signs.config.get("model_type") == _MODEL_TYPE
        or _ARCHITECTURE in signs.architecture
        or {"pre_projection.weight", "post_projection.weight"} <= signs.names
    )


def dialect(signs: Signs) -> str:
    """Returns ``huggingface``, the only layout."""
    del signs
    return "huggingface"


def head_rules(config: Gemma4AssistantConfig) -> list[Rule]:
    """Returns the rules of the tensors."""
    table = [
        *rules.linear("pre_projection", "pre"),
        *rules.linear("post_projection", "post"),
        rules.norm("model.norm", "norm"),
        Rule("model.embed_tokens.weight", "table"),
    ]
    for index, layer in enumerate(config.layers):
        table += blocks.block(layer, f"model.layers.{index}", f"blocks.{index}")
    if config.num_centroids:
        table += rules.linear("masked_embedding.centroids", "centroids")
    return table


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads an assistant. The target is needed: its layers decide whose keys are read."""
    where = str(stored.directory)
    top = stored.fields
    text = _text(top)
    count = hf_config.read_num_layers(text)
    rules.check_layers(
        count, stored.tensors, r"model\.layers\.(\d{1,9})\.", f"{text.where}: num_hidden_layers"
    )
    if target is None:
        raise TargetNeededError(
            f"{top.where} does not say which layers of its target have the keys that it reads; give"
            " the target as well (--target)"
        )

    name = "generation_config.json"
    generation = Fields(read_object(stored.directory, name), str(stored.directory / name))
    config = dataclasses.replace(
        read_config(top, target), draft_length=generation.optional_size("num_assistant_tokens")
    )
    tensors = dict(stored.tensors)
    ordering = tensors.pop(_ORDERING, None)
    if (ordering is None) != (config.num_centroids is None):
        state = "holds no" if ordering is None else "holds a"
        raise CheckpointError(
            f"{where} {state} {_ORDERING}, and use_ordered_embeddings is"
            f" {str(bool(config.num_centroids)).lower()}; correct it"
        )
    if ordering is not None:
        size = config.vocab_size
        draft_vocab.check_ids(ordering, size, size, f"{where}: {_ORDERING}")
        ordering = np.asarray(ordering, np.int32)

    head = tensors.pop("lm_head.weight", None)
    if head is not None and not np.array_equal(
        head, tensors.get("model.embed_tokens.weight", head)
    ):
        raise CheckpointError(
            f"{where}: lm_head.weight differs from model.embed_tokens.weight, which an assistant"
            " has as its output; remove one"
        )
    return read_as(
        KIND,
        stored,
        config,
        head_rules(config),
        tensors,
        target=target,
        embedding="",
        draft_to_target=ordering,
    )


def _text(top: Fields) -> Fields:
    """Returns the fields of the layers; refuses those that are not known."""
    top.only(model_type=_MODEL_TYPE, tie_word_embeddings=True)
    text = top.section("text_config")
    text.only(model_type="gemma4_text", **_FIXED)
    for fields, known in ((top, _TOP), (text, _TEXT)):
        unknown = sorted(name for name in fields.values if name not in known)
        if unknown:
            raise CheckpointError(
                f"{fields.where}: {unknown[0]} is not a known field of an assistant of Gemma 4;"
                " remove it if it changes nothing"
            )
    if not text.values:
        raise CheckpointError(f"{top.where} has no text_config; it describes the layers, so add it")
    return text


def read_config(top: Fields, target: DecoderConfig) -> Gemma4AssistantConfig:
    """Reads the description of an assistant.

    Each of its layers reads the keys of the target's last layer of its kind that has some.
    """
    text = family.with_defaults(_text(top))
    kinds = family.read_kinds(text)
    shared = text.integer("num_kv_shared_layers", 0)
    if shared not in (0, len(kinds)):
        raise text.wrong("num_kv_shared_layers", f"expected {len(kinds)}, every layer")

    mlp = hf_config.read_mlp(text, activation="gelu-tanh")
    sources = {kind: _source(kind, target, text) for kind in dict.fromkeys(kinds)}
    centroids = None
    if top.flag("use_ordered_embeddings"):
        centroids = top.size("num_centroids", 2048)
    with read_from(text.where):
        return Gemma4AssistantConfig(
            vocab_size=text.size("vocab_size"),
            target_width=top.size("backbone_hidden_size"),
            hidden_width=text.size("hidden_size"),
            layers=tuple(
                LayerConfig(
                    # Without keys it does not matter how they give the values.
                    mixer=dataclasses.replace(mixer, shares_keys=True, keys_as_values=False),
                    mlp=mlp,
                    norms="around",
                    output_scale=True,
                )
                for mixer in family.read_mixers(text, kinds)
            ),
            key_layers=tuple(sources[kind] for kind in kinds),
            num_target_layers=target.num_layers,
            max_positions=text.size("max_position_embeddings"),
            norm_eps=text.number("rms_norm_eps"),
            num_centroids=centroids,
            num_clusters=top.size("centroid_intermediate_top_k", 32) if centroids else 1,
        )


def _source(kind: str, target: DecoderConfig, text: Fields) -> int:
    """Returns the target's last layer of a kind that has keys."""
    is_local = kind == family.LOCAL
    having = [
        index
        for index, layer in enumerate(target.layers)
        if isinstance(layer.mixer, GroupedQuery)
        and not layer.mixer.shares_keys
        and (layer.mixer.window is not None) == is_local
    ]
    if not having:
        raise CheckpointError(
            f"{text.where}: layer_types has {kind!r}, and the target has no keys in a layer of that"
            " kind; give the target that the assistant was trained for"
        )
    return having[-1]


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """Writes an assistant for transformers."""
    config = checkpoint.config
    bare = dataclasses.replace(checkpoint, draft_to_target=None)
    tensors = head_tensors(KIND, bare, head_rules(config), embedding="")
    if config.num_centroids:
        tensors[_ORDERING] = np.asarray(checkpoint.draft_to_target, np.int64)

    values = {
        "architectures": [_ARCHITECTURE],
        "model_type": _MODEL_TYPE,
        "backbone_hidden_size": config.target_width,
        "tie_word_embeddings": True,
        "dtype": checkpoint.dtype,
        "use_ordered_embeddings": config.num_centroids is not None,
        "text_config": _text_fields(config, checkpoint.dtype),
    }
    if config.num_centroids:
        values["num_centroids"] = config.num_centroids
        values["centroid_intermediate_top_k"] = config.num_clusters
    _check_expressed(config, values, dialect)

    generation: dict[str, Any] = {}
    if config.draft_length is not None:
        generation["num_assistant_tokens"] = config.draft_length
        generation["num_assistant_tokens_schedule"] = "constant"
    return Layout(values, tensors, generation=generation)


def _text_fields(config: Gemma4AssistantConfig, dtype: str) -> dict[str, Any]:
    return {
        "model_type": "gemma4_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_width,
        "intermediate_size": gated(config.layers[0]).width,
        "num_hidden_layers": config.num_layers,
        "num_kv_shared_layers": config.num_layers,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "dtype": dtype,
        **_FIXED,
        **family.mixer_fields(config.layers),
        # The number of key heads of full layers counts only then.
        "attention_k_eq_v": True,
    }


def _check_expressed(
    config: Gemma4AssistantConfig, values: Mapping[str, Any], dialect: str
) -> None:
    """Refuses an assistant that could not be read back: its layers differ in more than fields."""
    text = family.with_defaults(Fields(values["text_config"], f"the {dialect} layout"))
    mixers = family.read_mixers(text, family.read_kinds(text))
    ours = [dataclasses.replace(grouped(layer), shares_keys=False) for layer in config.layers]
    theirs = [dataclasses.replace(mixer, keys_as_values=False) for mixer in mixers]
    widths = {gated(layer).width for layer in config.layers}
    refuse_inexpressible(
        dialect, {"layers that differ within a kind": ours != theirs or len(widths) > 1}
    )


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """Reports whose keys are read, and the clusters."""
    config = head.config
    read_from_layers = []
    for layer, source in zip(config.layers, config.key_layers, strict=True):
        window = grouped(layer).window
        span = "all tokens" if window is None else f"{window + 1} tokens"
        read_from_layers.append(f"{source} ({span})")
    theirs, ours = (
        {getattr(layer.mixer, "window", None) or 0 for layer in layers} - {0}
        for layers in (target.config.layers, config.layers)
    )
    warning = ""
    if theirs != ours:
        warning = f"; its window is {sorted(ours)} and the target's {sorted(theirs)}"

    clusters = "none; all logits are computed"
    if config.num_centroids:
        size = config.vocab_size // config.num_centroids
        clusters = f"{config.num_clusters} of {config.num_centroids} with {size} tokens each"
    length = "not named" if config.draft_length is None else f"{config.draft_length} tokens"
    return [
        Check.report("keys", f"of target layers {', '.join(read_from_layers)}", warning),
        Check.report("clusters", clusters),
        Check.report("draft length", length),
    ]


KIND = HeadKind(
    name="gemma4-assistant",
    label="Gemma 4 assistant",
    recognise=recognise,
    classes=(Gemma4AssistantConfig, Gemma4AssistantDrafter),
    read=read,
    read_config=read_config,
    write=write,
    layouts=("huggingface",),
    dialect=dialect,
    stacks={"blocks": lambda config: config.num_layers},
    examine=examine,
    suspects=Suspects(
        first="a target of another size or training (base and instruction-tuned ones differ)",
        later="the state that is fed back, or positions: every step is at the same one",
    ),
)
