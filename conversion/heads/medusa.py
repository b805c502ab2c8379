"""Medusa heads in and out of the two layouts that they are published in.

* ``medusa``: the authors', ``medusa_lm_head.safetensors`` or ``.pt``. A head is a numbered sequence, so tensors are
  called ``{k}.{l}.linear.weight`` and, for its output, ``{k}.{L}.weight``. ``config.json`` says little more than two
  numbers. The authors' code repeats one block ``L`` times where vLLM runs ``L`` of them, so a file of several blocks is
  read only where these are equal.
* ``vllm``: ``blocks.{k}.layers.{l}.weight`` and ``lm_heads.{k}.weight``, or one ``lm_head.weight`` for all heads
  (``original_lm_head``), with everything stated in ``config.json``. A ``token_map`` names the target ids of a part of
  the vocabulary.

vLLM takes whatever is missing as it finds it: defaults for sizes, random weights for heads, no bias. All of that is
refused here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle3_jax.conversion import draft_vocab, rules
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.files import read_json
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
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.medusa import MedusaConfig, MedusaDrafter
from eagle3_jax.models.config import DecoderConfig
from eagle3_jax.topology import PUBLISHED_TREES

# Where a tensor's name has the number of its head and of its layer.
_COUNTED = {"heads": r"blocks\.(\d{1,9})\.", "layers": r"blocks\.\d+\.layers\.(\d{1,9})\."}
_OWN_BASE = r"(model|base_model)\.(embed_tokens|layers)\."


def recognise(signs: Signs) -> bool:
    """By the configuration, or by names that no other head has."""
    return (
        "medusa_num_heads" in signs.config
        or signs.config.get("model_type") == "medusa"
        or signs.has(r"(medusa_heads?\.)?(\d+\.\d+\.linear|blocks\.\d+\.layers)\.")
    )


def dialect(signs: Signs) -> str:
    """``medusa`` for the names of the authors, ``vllm`` for vLLM's."""
    return "medusa" if signs.has(r"(medusa_heads?\.)?\d+\.") else "vllm"


def head_rules(config: MedusaConfig) -> list[Rule]:
    """The rules of the tensors in vLLM's names."""
    table = []
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            table += rules.linear(f"blocks.{head}.layers.{layer}", f"blocks.{head}.layers.{layer}", bias=config.bias)
        if not config.shared_output:
            table += rules.linear(f"lm_heads.{head}", f"outputs.{head}")
    return table + rules.linear("lm_head", "outputs.0") if config.shared_output else table


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads Medusa heads in either layout.

    They read the state after the target's last norm. No file says the target's depth, so the target is needed.
    """
    where = str(stored.directory)
    path = stored.where
    top = stored.fields
    layout = dialect(stored.signs)
    if any(re.match(_OWN_BASE, name) for name in stored.tensors):
        raise CheckpointError(
            f"{where} holds a language model next to its Medusa heads, trained together (Medusa-2); convert the two "
            "apart: medusa_head.* into a directory of their own, the rest as their target"
        )
    tensors = rules.renamed(stored.tensors, _rename, where)
    for word, pattern in _COUNTED.items():
        rules.check_layers(_stated(top, word), tensors, pattern, f"{path}: the number of Medusa {word}", word)
    bias = _biases(top, tensors, layout)
    shared = top.flag("original_lm_head")
    if shared and "lm_head.weight" not in tensors and "lm_heads.0.weight" in tensors:
        tensors["lm_head.weight"] = tensors.pop("lm_heads.0.weight")
    if target is None:
        raise TargetNeededError(
            f"{path} does not say how many layers its target has, and Medusa heads read what leaves the last one; "
            "give the target as well"
        )
    if layout == "vllm":  # its defaults are those of a model of 4096 x 32001, which are never meant
        top.require("vocab_size", "hidden_size")
    else:
        named = {
            "vocab_size": "lm_head.weight" if shared else "lm_heads.0.weight",
            "hidden_size": "blocks.0.layers.0.weight",
        }
        sizes = {field: tensors[name].shape[0] for field, name in named.items() if name in tensors}
        top = Fields(sizes | dict(top.values), path)
    config = dataclasses.replace(planned(top, target), bias=bias)
    ids = _token_map(top, tensors, config, where)
    if ids is not None:
        for name in [name for name in tensors if name.startswith("lm_head")]:
            if tensors[name].shape[:1] == (config.vocab_size,):
                tensors[name] = tensors[name][ids]
    if layout == "medusa" and (different := head_of_different_blocks(tensors, config)) is not None:
        raise CheckpointError(
            f"{where}: head {different} has {config.num_layers} different blocks under the authors' names. Their code "
            "runs the first block each time and vLLM runs every block, so the file does not say which network was "
            "trained. If every block was trained, rename them to blocks.K.layers.L"
        )
    table = head_rules(config)
    return read_as(KIND, stored, config, table, tensors, target=target, embedding=None, draft_to_target=ids)


def planned(top: Fields, target: DecoderConfig) -> MedusaConfig:
    """The description without the tensors. The authors' layout says little; the rest is as they train heads."""
    vocab_size = top.size("vocab_size", target.vocab_size)
    with read_from(top.where):
        return MedusaConfig(
            vocab_size=vocab_size,
            draft_vocab_size=top.size("truncated_vocab_size", vocab_size),
            target_width=top.size("hidden_size", target.width),
            num_target_layers=target.num_layers,
            num_heads=_stated(top, "heads"),
            num_layers=_stated(top, "layers"),
            bias=top.flag("medusa_fc_bias", "medusa_num_heads" in top.values),
            shared_output=top.flag("original_lm_head"),
        )


def _rename(name: str) -> str:
    """The name of a tensor in vLLM's layout."""
    name = re.sub(r"^medusa_heads?\.", "", name)
    name = re.sub(r"^(\d{1,9})\.(\d{1,9})\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d{1,9})\.\d{1,9}\.weight$", r"lm_heads.\1.weight", name)


def _stated(top: Fields, word: str) -> int:
    """The number of heads or of layers, in any field with ``num`` and the word in its name, as vLLM looks for it."""
    found = {name: top.size(name) for name in top.values if "num" in name and word in name}
    if not found:
        raise CheckpointError(f"{top.where} says nowhere how many {word} there are; add medusa_num_{word}")
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} {value}" for name, value in found.items())
        raise CheckpointError(
            f"{top.where}: {listed} disagree on the Medusa {word}, and engines take the last of them; leave one"
        )
    return next(iter(found.values()))


def _biases(top: Fields, tensors: Mapping[str, np.ndarray], dialect: str) -> bool:
    """Whether the blocks have biases: the authors' always do, vLLM's files say so."""
    has = any(name.startswith("blocks.") and name.endswith(".bias") for name in tensors)
    said = top.flag("medusa_fc_bias", has if dialect == "medusa" else False)
    if said != has:
        holds = "and the file holds none" if said else "or missing and the file holds biases, which vLLM would drop"
        raise CheckpointError(f"{top.where}: medusa_fc_bias is {str(said).lower()} {holds}; correct it")
    return has


def _token_map(top: Fields, tensors: dict[str, Any], config: MedusaConfig, where: str) -> np.ndarray | None:
    """The target ids of the draft vocabulary, taken out of the tensors; ``None`` where it is the target's."""
    size = config.draft_vocab_size
    full = config.vocab_size
    table = tensors.pop("token_map", None)
    top.only(logit_scale=1.0)
    if (table is None) != (size == full):
        what = "and there is no token_map" if table is None else "and there is a token_map, which vLLM would ignore"
        raise CheckpointError(f"{where}: the draft vocabulary is {size} of {full} tokens {what}; correct one")
    if table is not None:
        draft_vocab.check_ids(table, size, full, f"{where}: token_map")
    return None if table is None else table.astype(np.int64)


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """Writes the heads in one of the two layouts."""
    config = checkpoint.config
    where = str(checkpoint.source)
    shapes = KIND.param_shapes(config)
    tensors = rules.write_params(head_rules(config), checkpoint.head, shapes, where=where)
    table = checkpoint.draft_to_target
    if config.draft_vocab_size == config.vocab_size and table is not None and np.any(np.diff(table) != 1):
        raise CheckpointError(f"{where}: draft_to_target reorders the whole vocabulary; reorder the outputs instead")
    refuse_inexpressible(dialect, _refusals(config, tensors, dialect), "jax" if dialect == "vllm" else "vllm")
    if dialect == "vllm":
        if config.draft_vocab_size < config.vocab_size:
            tensors["token_map"] = np.asarray(checkpoint.draft_to_target, np.int64)
        return Layout(_vllm_fields(checkpoint), tensors)
    values = {
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        # Empty where it is not known: without the field the authors' code takes its default, Vicuna.
        "base_model_name_or_path": _base_model(checkpoint),
    }
    return Layout(values, _official_names(tensors, config.num_layers), "medusa_lm_head.safetensors")


def head_of_different_blocks(tensors: Mapping[str, np.ndarray], config: MedusaConfig) -> int | None:
    """The first head whose blocks, in vLLM's names, are not all one; ``None`` where none is."""
    for head in range(config.num_heads):
        for part in ("weight", "bias") if config.bias else ("weight",):
            first, *others = (tensors.get(f"blocks.{head}.layers.{n}.{part}") for n in range(config.num_layers))
            if not all(first is not None and other is not None and np.array_equal(first, other) for other in others):
                return head
    return None


def _refusals(config: MedusaConfig, tensors: Mapping[str, np.ndarray], dialect: str) -> dict[str, Any]:
    """The settings that vLLM or the authors' code does not read."""
    reduced = config.draft_vocab_size < config.vocab_size
    if dialect == "vllm":
        own = "a draft vocabulary of heads that do not share their output projection (vLLM 0.32 fails to load it)"
        return {own: reduced and not config.shared_output}
    different = head_of_different_blocks(tensors, config) is not None
    return {
        "one output projection for all heads": config.shared_output,
        f"a draft vocabulary of {config.draft_vocab_size}": reduced,
        "blocks without a bias (it would leave random ones)": not config.bias,
        f"{config.num_layers} different blocks of a head (it repeats one)": different,
    }


def _vllm_fields(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    # No other name may have "num" with "heads" or "layers" in it: vLLM would take that one.
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
    named = {}
    for name, value in tensors.items():
        new = re.sub(r"^blocks\.(\d+)\.layers\.(\d+)\.", r"\1.\2.linear.", name)
        named[re.sub(r"^lm_heads\.(\d+)\.", rf"\1.{num_layers}.", new)] = value
    return named


def _base_model(checkpoint: HeadCheckpoint) -> str:
    path = checkpoint.source / "config.json"
    name = read_json(path).get("base_model_name_or_path") if path.is_file() else None
    return name if isinstance(name, str) else ""


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """The number of heads, and the model that they name as theirs."""
    count = head.config.num_heads
    fitting = [name for name, tree in PUBLISHED_TREES.items() if tree.max_depth <= count]
    trees = f"published trees that fit: {', '.join(fitting)}" if fitting else "every published tree is deeper"
    checks = [Check.of("heads", f"{count}, so that drafts have at most {count} tokens; {trees}")]
    base = _base_model(head)
    named = f"trained for {base}, says config.json; heads read the state of exactly that model"
    return [*checks, Check.of("base model", f"{named} (here: {target.source.name})" if base else "not named")]


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
