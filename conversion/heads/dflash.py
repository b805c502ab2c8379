"""Block drafters (DFlash, DSpark, JetSpec) in the dialects that published ones are stored in.

* ``vllm``: z-lab's and SpecForge's layout: the geometry of a Qwen3 model, the rest in ``dflash_config``; what DSpark
  adds stands there or at the top.
* ``speculators``: the geometry in ``transformer_layer_config``.

Both have the same tensors. z-lab counts the layer whose *output* is read (``target_layer_ids``), speculators and this
library the layer that it *enters*, one more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_jax.conversion import rules
from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.heads.dflash_export import head_rules, layout
from eagle3_jax.conversion.heads.head import (
    HeadCheckpoint,
    HeadKind,
    Signs,
    Stored,
    Suspects,
    check_fit,
    read_embedding,
)
from eagle3_jax.conversion.hf_config import (
    read_mixer,
    read_mlp,
    read_stack,
    refuse_quantised,
    refuse_unsupported,
    refuse_windows,
)
from eagle3_jax.models.config import DecoderConfig, uniform

if TYPE_CHECKING:
    import numpy as np

    from eagle3_jax.conversion.checks import Check
    from eagle3_jax.drafters.dflash import DFlashConfig

# Names under which other tools have the same tensors.
_ALIASES = {"midlayer.": "layers.0.", "encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
_MASK = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# Lists of layers, and what is added to an id to have the layer that it enters.
_IDS = {
    "target_layer_ids": 1,
    "dspark_target_layer_ids": 1,
    "aux_hidden_state_layer_ids": 0,
    "eagle_aux_hidden_state_layer_ids": 0,
}
# Switches of other block drafters, and the one setting of each that is computed here.
_SETTINGS = {
    "use_aux_hidden_state": True,
    "use_swa": False,
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "is_neox_style": True,
    "dspark_draft_topk": None,
}


def recognise(signs: Signs) -> bool:
    """By what the file says, or by a norm of the fused features that no layer owns."""
    named = "DFlash" in signs.architecture or "DSpark" in signs.architecture or "dflash_config" in signs.config
    return (
        named
        or signs.method.startswith(("dflash", "dspark", "xpress"))
        or signs.has(r"markov_head\.|candidate_selector\.")
        or {"fc.weight", "hidden_norm.weight"} <= signs.names
    )


def dialect_of(values: Mapping[str, Any], names: Iterable[str]) -> str:
    """Which project's conventions a head follows."""
    del names
    return "speculators" if _is_speculators(values) else "vllm"


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Read a block drafter in either dialect.

    Raises:
        CheckpointError: It is incomplete, of a kind that is not computed, or does not fit the target.
    """
    from eagle3_jax.conversion import draft_vocab

    directory, where = stored.directory, str(stored.directory / "config.json")
    tensors, top = _canonical(stored.tensors, directory), Fields(stored.config, where)
    _refuse_relatives(tensors, top, str(directory))
    if (directory / "mask_embedding.pt").exists():
        raise CheckpointError(f"{directory} has a mask_embedding.pt; a mask embedding apart from the table is not read")
    config = read_config(top, own_output="lm_head.weight" in tensors)
    refuse_quantised(top)
    if target is not None:
        check_fit(config, config.aux_layers, target, str(directory))
    rules.check_layers(config.num_layers, tensors, r"layers\.(\d{1,9})\.", f"{where}: num_hidden_layers")
    known = (r"embed_tokens\.weight", "d2t", "t2d")
    head = rules.read_params(head_rules(config), tensors, _shapes(config), where=str(directory), known=known)
    sizes = {"vocab_size": config.vocab_size, "draft_vocab_size": config.draft_vocab_size}
    ids = draft_vocab.read(tensors, **sizes, where=str(directory))
    return HeadCheckpoint(
        method=KIND.name,
        config=config,
        head=head,
        draft_to_target=None if config.draft_vocab_size == config.vocab_size else ids,
        embedding=read_embedding(config, tensors, directory),
        dialect=dialect_of(stored.config, stored.tensors),
        source=directory,
        dtype=rules.main_dtype(head),
        num_target_layers=None if target is None else target.num_layers,
        note=_note(top, config),
    )


def read_config(top: Fields, *, own_output: bool = False) -> DFlashConfig:
    """The description.

    Args:
        top: The ``config.json``.
        own_output: Whether there is an output projection, which no field says.

    Raises:
        CheckpointError: A field is missing, malformed or unsupported.
    """
    from eagle3_jax.drafters.dflash import DFlashConfig, Markov

    fields = _merged(top)
    nested = _is_speculators(top.values)
    geometry = _geometry(top)
    _refuse_settings(fields, geometry)
    spark = _is_spark(fields)
    rank = fields.integer("markov_rank", 256 if nested else None) if spark else 0
    confidence = None
    if spark and fields.flag("enable_confidence_head", nested):
        confidence = "markov" if fields.flag("confidence_head_with_markov", nested) else "hidden"
    kind = fields.get("markov_head_type") or "vanilla"
    if kind not in ("vanilla", "gated", "rnn"):
        raise CheckpointError(f"{top.where}: markov_head_type is {short(kind)}; expected 'vanilla', 'gated' or 'rnn'")
    bias, stack = geometry.flag("attention_bias"), read_stack(geometry)
    mixer = read_mixer(geometry, qkv_bias=bias, o_bias=bias, qk_norm=True)
    layers = uniform(geometry.size("num_hidden_layers"), mixer, read_mlp(geometry))
    block = "dspark_block_size" if fields.get("block_size") is None and spark else "block_size"
    with read_from(top.where):
        return DFlashConfig(
            **stack,
            layers=layers,
            draft_vocab_size=fields.size("draft_vocab_size", stack["vocab_size"]),
            target_width=fields.size("target_hidden_size", stack["width"]),
            aux_layers=_aux_layers(fields),
            block_size=fields.size(block),
            mask_token=_mask_token(fields),
            causal=_is_causal(top, fields, geometry),
            from_anchor=_from_anchor(fields, nested, spark),
            markov=Markov(rank=rank, type=kind) if rank else None,
            confidence=confidence,
            own_output=own_output,
        )


def planned(top: Fields, target: DecoderConfig) -> DFlashConfig:
    """The description without its tensors: with an output projection of its own where it cannot do without."""
    del target
    fields = _merged(top)
    vocab_size = _geometry(top).size("vocab_size")
    return read_config(top, own_output=fields.size("draft_vocab_size", vocab_size) < vocab_size)


def _is_speculators(values: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in values or "transformer_layer_config" in values


def _geometry(top: Fields) -> Fields:
    return top.section("transformer_layer_config") if _is_speculators(top.values) else top


def _is_spark(fields: Fields) -> bool:
    return (
        str(fields.get("speculators_model_type")).startswith("dspark")
        or any("DSpark" in name for name in fields.words("architectures"))
        or fields.get("projector_type") == "dspark"
        or fields.get("markov_rank") is not None
    )


def _merged(top: Fields) -> Fields:
    """The fields that stand in ``dflash_config`` or ``eagle_config``, or at the top.

    Raises:
        CheckpointError: They stand in several places and disagree.
    """
    values = dict(top.values)
    for section in (top.section("eagle_config"), top.section("dflash_config")):
        for name, value in section.values.items():
            if values.get(name) is not None and value is not None and values[name] != value:
                raise CheckpointError(
                    f"{section.where}: {name} is {short(value)} but {short(values[name])} elsewhere; they must agree"
                )
            values[name] = values.get(name) if value is None else value
    return Fields(values, top.where)


def _refuse_relatives(tensors: Mapping[str, np.ndarray], top: Fields, where: str) -> None:
    """Name the block drafters that have more than is computed here, by their tensors or their own word."""
    said = str(_merged(top).get("projector_type") or top.get("speculators_model_type") or "")
    names = " ".join(tensors)
    architecture = " ".join(top.words("architectures"))
    if "candidate_selector." in names or "_conv." in names or said == "dflash2" or "DFlash2" in architecture:
        raise CheckpointError(f"{where} is a DFlash2 drafter, with convolutions and a selector; it is not loaded")
    if said not in ("", "dflash", "dspark", "jetspec"):
        raise CheckpointError(f"{where} is a {short(said)} drafter; DFlash, DSpark and JetSpec ones are loaded")


def _refuse_settings(fields: Fields, geometry: Fields) -> None:
    model_type = geometry.get("model_type")
    if model_type not in ("llama", "qwen3"):
        raise CheckpointError(
            f"{geometry.where}: model_type is {short(model_type)}; expected 'qwen3' (or 'llama') for a block drafter"
        )
    if model_type == "qwen3" and geometry.get("head_dim") is None:
        raise CheckpointError(f"{geometry.where} has no head_dim, which Qwen3 does not derive from the width; add it")
    for name, expected in _SETTINGS.items():
        if fields.get(name) not in (None, expected):
            raise CheckpointError(
                f"{fields.where}: {name} is {short(fields.get(name))}; only {expected!r} is supported"
            )
    for one in (fields, geometry):
        refuse_unsupported(one)
        refuse_windows(one)
    places = (geometry, geometry.section("rope_parameters"), geometry.section("rope_scaling"))
    if all(place.get("rope_theta") is None for place in places):
        raise CheckpointError(
            f"{geometry.where} has no rope_theta; engines fill in 1000000 or 10000, so add what it was trained with"
        )


def _aux_layers(fields: Fields) -> tuple[int, ...]:
    found = {}
    for name, more in _IDS.items():
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in value):
            raise CheckpointError(f"{fields.where}: {name} is {short(value)}; expected a list of layer numbers")
        found[f"{name} is {value}"] = tuple(one + more for one in value)
    if not found:
        raise CheckpointError(f"{fields.where} has no target_layer_ids; add the layers whose outputs the head reads")
    if len(set(found.values())) > 1:
        raise CheckpointError(f"{fields.where}: {' and '.join(found)}; they must name the same layers")
    return next(iter(found.values()))


def _mask_token(fields: Fields) -> int:
    found = {name: fields.integer(name) for name in _MASK if fields.get(name) is not None}
    if not found:
        raise CheckpointError(f"{fields.where} has no mask_token_id; add the token that stands for an unknown one")
    if len(set(found.values())) > 1:
        raise CheckpointError(f"{fields.where}: " + " and ".join(f"{k} is {v}" for k, v in found.items()))
    return next(iter(found.values()))


def _is_causal(top: Fields, fields: Fields, geometry: Fields) -> bool:
    """Whether a row of the block sees only those before it, as the engine that wrote the file understands it."""
    if not _is_speculators(top.values):
        return fields.flag("is_causal", fields.flag("causal"))
    # Its flag speaks of windows, and layers with full attention are trained on the whole block. vLLM serves such a head
    # causally all the same where the flag is false, so that a file with neither says nothing.
    if not geometry.words("layer_types") and not fields.flag("sliding_window_non_causal"):
        raise CheckpointError(
            f"{top.where} does not say whether the block is causal; add layer_types to transformer_layer_config, or "
            "sliding_window_non_causal: true where every row sees the whole block"
        )
    return False


def _from_anchor(fields: Fields, nested: bool, spark: bool) -> bool:
    if nested and spark and fields.get("sample_from_anchor") is None:
        raise CheckpointError(
            f"{fields.where} has no sample_from_anchor, whose default differs between speculators (true) and vLLM "
            "(false); add what the head was trained with"
        )
    value = fields.flag("sample_from_anchor", spark)
    if fields.flag("dspark_bonus_anchor", not value) == value:
        raise CheckpointError(
            f"{fields.where}: sample_from_anchor and dspark_bonus_anchor are both {value}; one must go"
        )
    return value


def _note(top: Fields, config: DFlashConfig) -> str:
    """What an engine may do to this head without a word."""
    notes = []
    if not config.causal:
        notes.append(f"every row sees its whole block: draft {config.num_predicted} tokens, fewer are another network")
    if _is_speculators(top.values) and top.get("sliding_window_non_causal") is False:
        notes.append("sliding_window_non_causal is false: vLLM would serve the head causally")
    return "; ".join(notes)


def _canonical(tensors: Mapping[str, np.ndarray], directory: Path) -> dict[str, np.ndarray]:
    renamed: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        new = name.removeprefix("model.")
        for alias, usual in _ALIASES.items():
            new = usual + new.removeprefix(alias) if new.startswith(alias) else new
        if new in renamed:
            raise CheckpointError(f"{directory} holds {new} under two names, the second of them {name}; remove one")
        renamed[new] = value
    return renamed


def _shapes(config: DFlashConfig) -> rules.Params:
    from eagle3_jax.drafters.dflash import DFlashDrafter

    return DFlashDrafter(config).param_shapes()


def classes() -> tuple[type, type]:
    """Of the configuration and of the drafter."""
    from eagle3_jax.drafters.dflash import DFlashConfig, DFlashDrafter

    return DFlashConfig, DFlashDrafter


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """The layers whose numbering differs between projects, the block's size and sight, and its mask token."""
    from eagle3_jax.conversion.checks import Check, mask_token

    config = head.config
    most = config.num_predicted
    sight = f"any K up to {most} drafts the same tokens" if config.causal else f"K = {most} alone is what was trained"
    rows = "sees those before it" if config.causal else "sees the whole block"
    start = "the anchor's row predicts too" if config.from_anchor else "the anchor's row predicts nothing"
    block = f"block of {config.block_size} rows, each {rows}: {sight}; {start}"
    counted = "speculators and this library count the layer that is entered, z-lab the one before it"
    confidence = "a head of its own, which is not used here" if config.confidence else "none"
    return [
        Check("auxiliary layers", "ok", f"{config.aux_layers} as layers entered; {counted}"),
        Check("block", "ok", block),
        Check("confidence", "ok", confidence),
        mask_token(config.mask_token, target.stop_tokens, target.source),
    ]


def variant(config: DFlashConfig) -> str:
    """The name of the paper whose options a head has."""
    if config.markov is not None or config.from_anchor:
        return "DSpark"
    return "JetSpec" if config.causal else "DFlash"


KIND = HeadKind(
    name="dflash",
    label="DFlash",
    recognise=recognise,
    classes=classes,
    read=read,
    read_config=planned,
    write=layout,
    layouts=("vllm", "speculators"),
    stacks={"blocks": lambda config: config.num_layers},
    dialect=dialect_of,
    variant=variant,
    examine=examine,
    suspects=Suspects(
        first="auxiliary layers counted from another end (z-lab's ids are one lower), or a head of another target",
        later="a causal block that is run as one that sees all of itself, or the other way round; or the mask token",
    ),
)
