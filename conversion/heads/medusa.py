"""Reads and writes Medusa heads in the two published layouts.

* ``medusa``: the authors' layout, ``medusa_lm_head.safetensors`` or ``.pt``. A head is a numbered
  sequence, so tensors are named ``{k}.{l}.linear.weight`` and, for the output of a head,
  ``{k}.{L}.weight``. ``config.json`` has little more than two numbers. The authors' code repeats
  one block ``L`` times and vLLM runs ``L`` blocks, so a file of several blocks is only read if they
  are equal.
* ``vllm``: ``blocks.{k}.layers.{l}.weight`` and ``lm_heads.{k}.weight``, or one ``lm_head.weight``
  for all heads (``original_lm_head``), with all settings in ``config.json``. A ``token_map`` has
  the target ids of a draft vocabulary.

vLLM replaces missing fields and tensors silently: by default sizes, random weights and no bias.
Here they are errors.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle3_jax.conversion import draft_vocab, rules
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
from eagle3_jax.conversion.fields import Fields, agreed, read_from
from eagle3_jax.conversion.heads.head import (
    Check,
    HeadCheckpoint,
    HeadKind,
    Layout,
    Suspects,
    read_as,
    refuse_inexpressible,
)
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.conversion.sidecars import read_object
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.medusa import MedusaConfig, MedusaDrafter
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.topology import PUBLISHED_TREES

# Patterns of the number of the head, and of the layer, in the name of a tensor.
_COUNTED = {"heads": r"blocks\.(\d{1,9})\.", "layers": r"blocks\.\d+\.layers\.(\d{1,9})\."}
_OWN_BASE = r"(model|base_model)\.(embed_tokens|layers)\."


def recognise(signs: Signs) -> bool:
    """Recognises Medusa by the configuration, or by names that no other head has."""
    return (
        "medusa_num_heads" in signs.config
        or signs.config.get("model_type") == "medusa"
        or signs.has(r"(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers)\.")
    )


def dialect(signs: Signs) -> str:
    """Returns ``medusa`` for the names of the authors, ``vllm`` for vLLM's."""
    return "medusa" if signs.has(r"(medusa_heads?\.)?\d+\.") else "vllm"


def head_rules(config: MedusaConfig) -> list[Rule]:
    """Returns the rules of the tensors by vLLM's names."""
    table = []
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            table += rules.linear(
                f"blocks.{head}.layers.{layer}", f"blocks.{head}.layers.{layer}", bias=config.bias
            )
        if not config.shared_output:
            table += rules.linear(f"lm_heads.{head}", f"outputs.{head}")
    return table + rules.linear("lm_head", "outputs.0") if config.shared_output else table


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads Medusa heads in either layout.

    The heads read the state after the target's last norm. The target is needed, because no file has
    its depth.
    """
    where = str(stored.directory)
    top = stored.fields
    layout = dialect(stored.signs)
    if any(re.match(_OWN_BASE, name) for name in stored.tensors):
        raise CheckpointError(
            f"{where} holds a language model next to its Medusa heads, trained together (Medusa-2);"
            " convert the two apart: medusa_head.* into a directory of their own, the rest as"
            " their target"
        )

    tensors = rules.renamed(stored.tensors, _rename, where)
    # The authors' config.json for Vicuna names 2 heads of 5, and their code reads all of a file.
    count = len(rules.numbers_in(tensors, _COUNTED["heads"]))
    note = ""
    if layout == "medusa" and count > _stated(top, "heads"):
        note = f"config.json names {_stated(top, 'heads')} heads; the {count} of the file are read"
        top = Fields({**top.values, "medusa_num_heads": count}, top.where)
    for word, pattern in _COUNTED.items():
        rules.check_layers(
            _stated(top, word), tensors, pattern, f"{top.where}: the number of Medusa {word}", word
        )
    bias = _biases(top, tensors, layout)
    shared = top.flag("original_lm_head")
    # Some files name the output that all heads share as the first head's.
    if shared and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    if target is None:
        raise TargetNeededError(
            f"{top.where} does not say how many layers its target has, and Medusa heads read what"
            " leaves the last one; give the target as well (--target)"
        )

    if layout == "vllm":
        # The defaults of vLLM's class, 4096 and 32001, are never intended.
        top.require("vocab_size", "hidden_size")
    else:
        # The authors' files have no sizes, so the tensors give them.
        output = "lm_head.weight" if shared else "lm_heads.0.weight"
        named = {"vocab_size": output, "hidden_size": "blocks.0.layers.0.weight"}
        sizes = {field: tensors[name].shape[0] for field, name in named.items() if name in tensors}
        top = Fields({**sizes, **top.values}, top.where)
    config = dataclasses.replace(planned(top, target), bias=bias)

    ids = _token_map(top, tensors, config, where)
    # vLLM stores all rows of an output and uses those of the draft vocabulary.
    if ids is not None:
        for name, tensor in tensors.items():
            if name.startswith("lm_head") and tensor.shape[:1] == (config.vocab_size,):
                tensors[name] = tensor[ids]

    if layout == "medusa" and (different := head_of_different_blocks(tensors, config)) is not None:
        raise CheckpointError(
            f"{where}: head {different} has {config.num_layers} different blocks under the authors'"
            " names. Their code runs the first block each time and vLLM runs every block, so the"
            " file does not say which network was trained. If every block was trained, rename them"
            " to blocks.K.layers.L"
        )

    return read_as(
        KIND,
        stored,
        config,
        head_rules(config),
        tensors,
        target=target,
        embedding="",
        draft_to_target=ids,
        note=note,
    )


def planned(top: Fields, target: DecoderConfig) -> MedusaConfig:
    """Reads the description without the tensors."""
    vocab_size = top.size("vocab_size", target.vocab_size)
    # The authors' code always trains biases.
    is_official = "medusa_num_heads" in top.values
    with read_from(top.where):
        return MedusaConfig(
            vocab_size=vocab_size,
            draft_vocab_size=top.size("truncated_vocab_size", vocab_size),
            target_width=top.size("hidden_size", target.width),
            num_target_layers=target.num_layers,
            num_heads=_stated(top, "heads"),
            num_layers=_stated(top, "layers"),
            bias=top.flag("medusa_fc_bias", is_official),
            shared_output=top.flag("original_lm_head"),
        )


def _rename(name: str) -> str:
    """Returns the name of a tensor in vLLM's layout."""
    name = re.sub(r"^medusa_heads?\.", "", name)
    name = re.sub(r"^(\d{1,9})\.(\d{1,9})\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d{1,9})\.\d{1,9}\.weight$", r"lm_heads.\1.weight", name)


def _stated(top: Fields, word: str) -> int:
    """Reads the number of heads or of layers; like vLLM, by ``num`` and the word in a name."""
    number = agreed(
        {name: top.size(name) for name in top.values if "num" in name and word in name}, top.where
    )
    if number is None:
        raise CheckpointError(
            f"{top.where} says nowhere how many {word} there are; add medusa_num_{word}"
        )
    return number


def _biases(top: Fields, tensors: Mapping[str, np.ndarray], dialect: str) -> bool:
    """Tells whether the blocks have biases: the authors' always do, vLLM's files have a flag."""
    has_biases = any(name.startswith("blocks.") and name.endswith(".bias") for name in tensors)
    flag = top.flag("medusa_fc_bias", has_biases if dialect == "medusa" else False)
    if flag != has_biases:
        problem = (
            "and the file holds none"
            if flag
            else "or missing and the file holds biases, which vLLM would drop"
        )
        raise CheckpointError(
            f"{top.where}: medusa_fc_bias is {str(flag).lower()} {problem}; correct it"
        )
    return has_biases


def _token_map(
    top: Fields, tensors: dict[str, Any], config: MedusaConfig, where: str
) -> np.ndarray | None:
    """Removes the draft vocabulary's target ids from the tensors; ``None`` if it is full."""
    size = config.draft_vocab_size
    vocab_size = config.vocab_size
    table = tensors.pop("token_map", None)
    top.only(logit_scale=1.0)
    if (table is None) != (size == vocab_size):
        problem = (
            "and there is no token_map"
            if table is None
            else "and there is a token_map, which vLLM would ignore"
        )
        raise CheckpointError(
            f"{where}: the draft vocabulary is {size} of {vocab_size} tokens {problem}; correct one"
        )

    if table is None:
        return None
    draft_vocab.check_ids(table, size, vocab_size, f"{where}: token_map")
    return table.astype(np.int32)


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """Writes the heads in one of the two layouts."""
    config = checkpoint.config
    where = str(checkpoint.source)
    shapes = KIND.param_shapes(config)
    written = rules.write_params(head_rules(config), checkpoint.head, shapes, where=where)
    tensors = {name: np.asarray(tensor) for name, tensor in written.items()}

    table = checkpoint.draft_to_target
    is_full = config.draft_vocab_size == config.vocab_size
    if is_full and table is not None and np.any(np.diff(table) != 1):
        raise CheckpointError(
            f"{where}: draft_to_target reorders the whole vocabulary; reorder the outputs instead"
        )

    refuse_inexpressible(
        dialect, _refusals(config, tensors, dialect), "jax" if dialect == "vllm" else "vllm"
    )
    if dialect == "vllm":
        if not is_full:
            tensors["token_map"] = np.asarray(table, np.int64)
        return Layout(_vllm_fields(checkpoint), tensors)

    values = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        # Empty if unknown: without the field the authors' code uses its default, Vicuna.
        "base_model_name_or_path": _base_model(checkpoint),
    }
    return Layout(values, _official_names(tensors, config.num_layers), "medusa_lm_head.safetensors")


def head_of_different_blocks(tensors: Mapping[str, Any], config: MedusaConfig) -> int | None:
    """Returns the first head with different blocks, by vLLM's names; ``None`` if there is none."""
    for head in range(config.num_heads):
        for part in ("weight", "bias") if config.bias else ("weight",):
            names = [f"blocks.{head}.layers.{layer}.{part}" for layer in range(config.num_layers)]
            weights: list[Any] = list(map(tensors.get, names))
            if not all(np.array_equal(weights[0], weight) for weight in weights):
                return head
    return None


def _refusals(
    config: MedusaConfig, tensors: Mapping[str, np.ndarray], dialect: str
) -> dict[str, Any]:
    """Returns the settings that an engine cannot read, and whether the heads have them."""
    reduced = config.draft_vocab_size < config.vocab_size
    if dialect == "vllm":
        setting = (
            "a draft vocabulary of heads that do not share their output projection (vLLM 0.32 fails"
            " to load it)"
        )
        return {setting: reduced and not config.shared_output}
    different = head_of_different_blocks(tensors, config) is not None
    return {
        "one output projection for all heads": config.shared_output,
        f"a draft vocabulary of {config.draft_vocab_size}": reduced,
        "blocks without a bias (it would leave random ones)": not config.bias,
        f"{config.num_layers} different blocks of a head (it repeats one)": different,
    }


def _vllm_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    # No other name may contain "num" and "heads" or "layers", because vLLM would read that field.
    config = checkpoint.config
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.target_width,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": config.shared_output,
        "dtype": checkpoint.dtype,
        "torch_dtype": checkpoint.dtype,
    }


def _official_names(tensors: Mapping[str, np.ndarray], num_layers: int) -> dict[str, np.ndarray]:
    official = {}
    for name, value in tensors.items():
        block_name = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        official[re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{num_layers}.", block_name)] = value
    return official


def _base_model(checkpoint: HeadCheckpoint) -> str:
    name = read_object(checkpoint.source, "config.json").get("base_model_name_or_path")
    return name if isinstance(name, str) else ""


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """Reports the number of heads, and the model that the heads name as theirs."""
    count = head.config.num_heads
    fitting = [name for name, tree in PUBLISHED_TREES.items() if tree.max_depth <= count]
    fit = f"that fit: {', '.join(fitting)}" if fitting else "are all deeper"
    heads = f"{count}, so that drafts have at most {count} tokens; published trees {fit}"
    base = _base_model(head)
    named = f"trained for {base}, says config.json; heads read the state of exactly that model"
    detail = f"{named} (here: {target.source.name})" if base else "not named"
    return [Check.report("heads", heads), Check.report("base model", detail)]


KIND = HeadKind(
    name="medusa",
    label="Medusa",
    recognise=recognise,
    classes=(MedusaConfig, MedusaDrafter),
    read=read,
    read_config=planned,
    write=write,
    layouts=("vllm", "medusa"),
    stacks={"blocks": lambda config: config.num_heads},
    dialect=dialect,
    examine=examine,
    suspects=Suspects(
        first="a head of another target or of a fine-tuned one, or a state before the final norm",
        later="the order of the heads; each is trained for one distance",
    ),
)
