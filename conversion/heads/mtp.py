"""Reads and writes MTP modules: one in files of its own, or all in those of their target.

A file of its own has one module with a dense block, in one of three layouts:

* ``deepseek``: DeepSeek-V3's names, ``model.layers.{L}.eh_proj`` and so on, where ``L`` is the
  number of the target's layers. DeepSeek's own modules have latent attention and experts; no engine
  loads the dense block under these names.
* ``mimo``: Xiaomi MiMo's names, ``model.mtp_layers.0.*``, with Qwen2's block. vLLM loads it.
* ``speculators``: ``mtp_layers.0.*`` with Qwen3's block. The embedding at position 0 is not zeroed.

Modules in the files of a target have the blocks of its family (``Modules`` in
``families/family.py``), under DeepSeek's, MiMo's or Qwen3-Next's names (``qwen``: ``mtp.*``).

The input of the projection begins with the hidden state in MiMo's files, and with the embedding in
all others. The shapes are the same, so the layout determines the order.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.conversion import blocks, hf_config, rules
from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.families.family import Family, Modules
from eagle3_jax.conversion.fields import Fields, agreed, read_from
from eagle3_jax.conversion.heads.head import (
    Check,
    HeadCheckpoint,
    HeadKind,
    Layout,
    Suspects,
    check_fit,
    head_tensors,
    read_as,
    refuse_inexpressible,
)
from eagle3_jax.conversion.rules import Part, Rule
from eagle3_jax.conversion.targets import language_model
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.mtp import MTPConfig, MTPDrafter
from eagle3_jax.models.config import DecoderConfig, GatedMLP, GroupedQuery, gated, grouped, uniform


class _Names(NamedTuple):
    """The names of the parts of a module."""

    block: str  #: Its block, and the prefix of names that begin with ``.``.
    embedding_norm: str
    feature_norm: str
    fc: str
    norm: str
    embedding: str
    output: str


_OTHERS = (".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm")
# `{layer}` is the number of a module behind the target's layers, `{module}` begins with 0.
_NAMES = {
    "deepseek": _Names(
        "model.layers.{layer}",
        ".enorm",
        ".hnorm",
        ".eh_proj",
        ".shared_head.norm",
        ".embed_tokens",
        ".shared_head.head",
    ),
    "mimo": _Names("model.mtp_layers.{module}", *_OTHERS, "model.embed_tokens", "lm_head"),
    "speculators": _Names("mtp_layers.{module}", *_OTHERS, "embed_tokens", "lm_head"),
    # One projection and three norms for all modules.
    "qwen": _Names(
        "mtp.layers.{module}",
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.fc",
        "mtp.norm",
        embedding="",
        output="",
    ),
}
# Whether the embedding at position 0 is set to zero, by what files of a module are written for:
# vLLM sets it, speculators leaves it. For modules in the files of a target the family tells.
_ZERO_FIRST = {"deepseek": True, "mimo": True, "speculators": False}
# Names of the number of modules. Files without any have one module.
_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
# By model_type of the block: whether q, k and v have biases, and whether q and k have norms.
_BLOCKS = {
    "llama": (False, False),
    "qwen2": (True, False),
    "mimo": (True, False),
    "qwen3": (False, True),
}
_MIMO = "MiMoForCausalLM"
#: Names that only MTP modules have, without ``model.``.
MODULE = r"layers\.\d+\.(enorm|hnorm|eh_proj|shared_head)\.|mtp_layers\.\d+\.|mtp\."


def recognise(signs: Signs) -> bool:
    """Recognises MTP by the tensors of a module, in a file without a language model's layers."""
    if signs.method == "mtp":
        return True
    # DeepSeek V4's files have DSpark under mtp.*.
    is_other = signs.has(r"(language_model\.)?(model\.)?layers\.0\.|mtp\.\d+\.markov_head\.")
    return signs.has(MODULE) and not is_other


def is_module(name: str) -> bool:
    """Tells whether a tensor, named without ``model.``, may be one of a module or of its tables."""
    return re.match(rf"{MODULE}|layers\.\d+\.|embed_tokens\.|lm_head\.", name) is not None


def names_in(layout: str, num_target_layers: int, module: int = 0) -> _Names:
    """Returns the complete names of the parts of a module in a layout."""
    block = _NAMES[layout].block.format(layer=num_target_layers + module, module=module)
    return _Names(
        block, *(block + name if name.startswith(".") else name for name in _NAMES[layout][1:])
    )


def head_rules(config: MTPConfig, layout: str) -> list[Rule]:
    """Returns the rules of the tensors of a module in files of its own."""
    names = names_in(layout, config.num_target_layers)
    table = _around(names, layout, config.width)
    table += blocks.block(config.layers[0], names.block, "block")
    return table + rules.linear(names.output, "head") if config.own_output else table


def _around(names: _Names, layout: str, width: int, path: str = "") -> list[Rule]:
    """Returns the rules of a module without its block; ``path`` is its prefix in our parameters."""
    table = [
        rules.norm(getattr(names, part), f"{path}{part}")
        for part in ("embedding_norm", "feature_norm", "norm")
    ]
    if layout != "mimo":
        return table + rules.linear(names.fc, f"{path}fc")

    # Its inputs are in the other order: each half of the tensor fills the other half of ours.
    halves = [Part(1, 2, width, half, half + 1, turned=True) for half in range(2)]
    cuts = [half._replace(turned=False) for half in reversed(halves)]
    return table + [
        Rule(f"{names.fc}.weight", f"{path}fc.kernel", part=part, cut=cut)
        for part, cut in zip(halves, cuts, strict=True)
    ]


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads an MTP module."""
    top = stored.fields
    tensors = dict(stored.tensors)
    layout = dialect(stored.signs)
    if any(name.startswith("mtp.") for name in tensors):
        raise CheckpointError(
            f"{stored.directory} names its tensors mtp.*, as Qwen3-Next does, whose modules are"
            " read from the target's own files: put them there, and give 'mtp' as the drafter"
        )
    if layout not in _NAMES:
        raise CheckpointError(
            f"{stored.directory} does not say in which order its projection reads the embedding and"
            f" the hidden state, and the shapes do not tell: set architectures to [{_MIMO!r}]"
            " (hidden state first) or speculators_model_type to 'mtp' (embedding first)"
        )
    _refuse_other_modules(top, tensors, layout)

    config = read_config(top)
    names = names_in(layout, config.num_target_layers)
    config = dataclasses.replace(config, own_output=f"{names.output}.weight" in tensors)
    table = head_rules(config, layout)
    return read_as(
        KIND, stored, config, table, tensors, target=target, embedding=f"{names.embedding}.weight"
    )


def read_config(top: Fields, target: DecoderConfig | None = None) -> MTPConfig:
    """Reads the description of a module, except its own output matrix, which is in the tensors."""
    del target  # the file has the target's depth
    nested = bool(top.get("speculators_model_type"))
    geometry = top.section("transformer_layer_config") if nested else top
    model_type = geometry.one_of(
        "model_type", _BLOCKS, purpose="for the dense block of an MTP module"
    )
    for fields in (top, geometry):
        hf_config.refuse_unsupported(fields)
        hf_config.refuse_windows(fields)
    # Without the base, engines compute different rotations.
    if _MIMO in (top.get("architectures") or ()) and geometry.get("rope_parameters") is None:
        geometry.require("rope_theta")

    biased, qk_norm = _BLOCKS[model_type]
    o_bias = geometry.flag("attention_bias") and not biased
    mixer = hf_config.read_mixer(
        geometry, qkv_bias=biased or o_bias, o_bias=o_bias, qk_norm=qk_norm
    )
    mlp = hf_config.read_mlp(geometry, bias=geometry.flag("mlp_bias"))
    with read_from(geometry.where):
        return MTPConfig(
            **hf_config.read_stack(geometry),
            layers=uniform(1, mixer, mlp),
            num_target_layers=geometry.size("num_hidden_layers"),
            zero_first=_ZERO_FIRST["speculators" if nested else "deepseek"],
        )


def read_modules(stored: Stored, target: DecoderConfig | None = None) -> HeadCheckpoint:
    """Reads all MTP modules in the files of a target.

    Their copies of the embedding and of the output matrix are left out, as in transformers.
    """
    model = language_model(stored)
    where = str(stored.directory)
    modules = model.family.modules
    if modules is None or not model.modules:
        raise CheckpointError(
            f"{where} holds no MTP modules; give the directory of a target that has them in its"
            " files, or another drafter"
        )

    count = len(model.modules)
    stated = _stated(model.fields)
    if stated != count or model.modules != list(range(count)):
        raise CheckpointError(
            f"{model.fields.where} states {stated} MTP module{'s' if stated != 1 else ''}, and the"
            f" file holds {count}; they must agree, so correct num_nextn_predict_layers or fetch"
            " the complete file"
        )

    layout = modules.layout
    all_names = [names_in(layout, model.num_layers, module) for module in range(count)]
    drafting = modules.names(model.tensors, model.num_layers)
    copies = drafting.intersection(
        f"{name}.weight" for names in all_names for name in (names.embedding, names.output)
    )
    excluded = rules.any_of(*model.family.excluded)
    tensors = {
        name: tensor
        for name, tensor in model.tensors.items()
        if name in drafting - copies and not excluded.fullmatch(name)
    }

    model.fields.only(mtp_use_dedicated_embeddings=False)
    fields = modules.described(model.fields, count)
    decoder = model.family.read_config(fields)
    config = _config_of(decoder, modules, model.num_layers)
    if target is not None:
        check_fit(config, target, where)
    table = _block_rules(model.family, decoder, [names.block for names in all_names], tensors)
    for module, names in enumerate(all_names):
        table += _around(names, layout, config.width, _path(module))

    head = rules.read_params(table, tensors, KIND.param_shapes(config), where=where)
    note = "copies of the target's embedding and output matrix in the modules are left out"
    return HeadCheckpoint(
        method=KIND.name,
        config=config,
        head=head,
        draft_to_target=None,
        embedding=None,
        dialect="target",
        source=stored.directory,
        dtype=model.dtype_of(head),
        num_target_layers=model.num_layers,
        note=note if copies else "",
    )


def modules_config(fields: Fields, family: Family) -> MTPConfig | None:
    """Describes the modules of a target from its ``config.json``; ``None`` if it has none."""
    count = _stated(fields)
    if family.modules is None or not count:
        return None
    decoder = family.read_config(family.modules.described(fields, count))
    return _config_of(decoder, family.modules, fields.size("num_hidden_layers"))


def _stated(fields: Fields) -> int:
    """Returns the number of modules that a ``config.json`` states."""
    counts = {name: None if fields.get(name) is None else fields.integer(name) for name in _COUNTS}
    count = agreed(counts, fields.where)
    return 1 if count is None else count


def _config_of(decoder: DecoderConfig, modules: Modules, num_target_layers: int) -> MTPConfig:
    """Describes modules whose blocks are the layers of ``decoder``."""
    return MTPConfig(
        vocab_size=decoder.vocab_size,
        width=decoder.width,
        layers=decoder.layers,
        num_target_layers=num_target_layers,
        max_positions=decoder.max_positions,
        norm_eps=decoder.norm_eps,
        norm_kind=decoder.norm_kind,
        normed_state=modules.normed_state,
        zero_first=modules.zero_first,
    )


def _path(module: int) -> str:
    """Returns the prefix of a module in our parameters."""
    return f"later.{module - 1}." if module else ""


def _block_rules(
    family: Family, decoder: DecoderConfig, sources: list[str], names: Collection[str]
) -> list[Rule]:
    """Returns the rules of the blocks: those of a target of such layers, under other names."""

    def renamed(rule: Rule) -> Rule:
        module, path = re.fullmatch(r"blocks\.(\d+)\.(.+)", rule.path).groups()  # type: ignore[union-attr]
        source = rule.source.removeprefix(f"model.layers.{module}")
        return rule._replace(
            source=sources[int(module)] + source, path=f"{_path(int(module))}block.{path}"
        )

    tables = [
        [renamed(rule) for rule in table(decoder) if rule.path.startswith("blocks.")]
        for table in (family.rules, *family.alternatives)
    ]
    fitting = (table for table in tables if all(rule.source in names for rule in table))
    return next(fitting, tables[0])


def dialect(signs: Signs) -> str:
    """Returns ``deepseek``, ``mimo`` or ``speculators``; ``unknown`` if the file fits none."""
    if signs.method == "mtp":
        return "speculators"
    if signs.has(r"layers\.\d+\."):
        return "deepseek"
    return "mimo" if _MIMO in signs.architecture else "unknown"


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """Writes a module in the layout ``deepseek``, ``mimo`` or ``speculators``."""
    config = checkpoint.config
    refuse_inexpressible(dialect, _of_target(config))
    refuse_inexpressible(dialect, _refusals(config, dialect))
    layer = config.layers[0]
    names = names_in(dialect, config.num_target_layers)
    tensors = head_tensors(
        KIND, checkpoint, head_rules(config, dialect), embedding=f"{names.embedding}.weight"
    )
    values = hf_config.stack_fields(config, checkpoint.dtype) | {
        "num_hidden_layers": config.num_target_layers,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }

    if dialect == "mimo":
        # Qwen2's block has biases; zeros change nothing.
        for name in "qkv":
            projection = f"{names.block}.self_attn.{name}_proj"
            weight = tensors[f"{projection}.weight"]
            tensors.setdefault(f"{projection}.bias", np.zeros_like(weight[:, 0]))
        return Layout({"architectures": [_MIMO], "model_type": "qwen2", **values}, tensors)

    if dialect == "deepseek":
        kind = {"architectures": ["LlamaMTPModel"], "model_type": _block(config)}
        return Layout(kind | values | hf_config.bias_fields(layer), tensors)

    geometry = {"model_type": "qwen3", **values, **hf_config.bias_fields(layer)}
    del geometry["num_nextn_predict_layers"]
    outer = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": 1,
    }
    return Layout(outer | {"transformer_layer_config": geometry}, tensors)


def _refusals(config: MTPConfig, dialect: str) -> dict[str, Any]:
    mixer = grouped(config.layers[0])
    mlp = gated(config.layers[0])
    zero = f"zero_first {config.zero_first} (what the embedding at position 0 counts as)"
    refusals = {
        "deepseek": {
            "a block that is neither Llama's, nor Qwen2's, nor Qwen3's": _block(config) is None
        },
        "mimo": {"qk_norm": mixer.qk_norm, "o_bias": mixer.o_bias, "mlp_bias": mlp.bias},
        "speculators": {"a block without qk_norm (it builds Qwen3's)": not mixer.qk_norm},
    }
    return {zero: config.zero_first is not _ZERO_FIRST[dialect], **refusals[dialect]}


def _of_target(config: MTPConfig) -> dict[str, Any]:
    """Returns what modules of targets have and files of their own cannot express."""
    layer = config.layers[0]
    mixer = layer.mixer
    is_grouped = isinstance(mixer, GroupedQuery)
    is_plain = is_grouped and isinstance(layer.mlp, GatedMLP)
    return {
        f"{config.num_layers} modules": config.num_layers > 1,
        f"{type(mixer).__name__} attention with {type(layer.mlp).__name__}": not is_plain,
        "a state before the target's final norm": not config.normed_state,
        f"norms of the kind {config.norm_kind!r}": config.norm_kind != "plain",
        "a window": is_grouped and mixer.window is not None,
        "an output gate": is_grouped and mixer.output_gate,
    }


def _block(config: MTPConfig) -> str | None:
    """Returns the ``model_type`` with this block; ``None`` if there is none."""
    mixer = grouped(config.layers[0])
    if mixer.qkv_bias and not mixer.o_bias:
        return None if mixer.qk_norm else "qwen2"
    return "qwen3" if mixer.qk_norm else "llama"


def _refuse_other_modules(top: Fields, names: Iterable[str], layout: str) -> None:
    """Refuses a file of several modules, because only one of them could be fed back."""
    pattern = (
        r"model\.layers\.(\d{1,9})\."
        if layout == "deepseek"
        else r"(?:model\.)?mtp_layers\.(\d{1,9})\."
    )
    modules = rules.numbers_in(names, pattern)
    stated = top.size("num_nextn_predict_layers", 1)
    if stated != 1 or len(modules) != 1:
        raise CheckpointError(
            f"{top.where}: num_nextn_predict_layers is {stated} and the file holds {len(modules)}"
            " modules; expected one, which is fed back for every further token: keep the first"
        )


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """Reports the properties that the layout determines and no shape reveals."""
    order = {
        "mimo": "the hidden state first",
        "jax": "as it was converted",
        "target": "that of its family",
    }.get(head.dialect, "the embedding first")
    start = "counts as zero" if head.config.zero_first else "is the token's own"
    norm = "after" if head.config.normed_state else "before"
    output = "its own" if head.config.own_output else "the target's"
    return [
        Check.report(
            "order of the halves",
            f"{order}, as the {head.dialect} layout has it; the shapes do not tell",
        ),
        Check.report("embedding at position 0", start),
        Check.report("target's state", f"{norm} its final norm"),
        Check.report("output", f"logits by {output} output matrix"),
    ]


KIND = HeadKind(
    name="mtp",
    label="MTP",
    recognise=recognise,
    classes=(MTPConfig, MTPDrafter),
    read=read,
    read_config=read_config,
    write=write,
    layouts=("deepseek", "mimo", "speculators"),
    dialect=dialect,
    stacks={"later": lambda config: config.num_layers - 1},
    examine=examine,
    suspects=Suspects(
        first=(
            "the halves of the projection in the other order (the layout decides it), or a module"
            " of another target"
        ),
        later="a module that was trained on the first token alone, as DeepSeek's are; draft fewer",
    ),
)
