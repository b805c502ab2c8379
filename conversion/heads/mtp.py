"""Reads and writes MTP modules with a dense block, in three layouts.

* ``deepseek``: DeepSeek-V3's names, ``model.layers.{L}.eh_proj`` and so on, where ``L`` is the
  number of the target's layers. DeepSeek's own modules have latent attention and experts; no engine
  loads the dense block under these names.
* ``mimo``: Xiaomi MiMo's names, ``model.mtp_layers.0.*``, with Qwen2's block. vLLM loads it.
* ``speculators``: ``mtp_layers.0.*`` with Qwen3's block. The embedding at position 0 is not zeroed.

The input of the projection begins with the embedding in DeepSeek's and speculators' files, and with
the hidden state in MiMo's. The shapes are the same, so the layout determines the order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.conversion import blocks, hf_config, rules
from eagle3_jax.conversion.errors import CheckpointError
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
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.mtp import MTPConfig, MTPDrafter
from eagle3_jax.models.config import DecoderConfig, gated, grouped, uniform


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
_NAMES = {
    "deepseek": _Names(
        "model.layers.{}",
        ".enorm",
        ".hnorm",
        ".eh_proj",
        ".shared_head.norm",
        ".embed_tokens",
        ".shared_head.head",
    ),
    "mimo": _Names("model.mtp_layers.0", *_OTHERS, "model.embed_tokens", "lm_head"),
    "speculators": _Names("mtp_layers.0", *_OTHERS, "embed_tokens", "lm_head"),
}
# By model_type of the block: whether q, k and v have biases, and whether q and k have norms.
_BLOCKS = {
    "llama": (False, False),
    "qwen2": (True, False),
    "mimo": (True, False),
    "qwen3": (False, True),
}
_MIMO = "MiMoForCausalLM"


def recognise(signs: Signs) -> bool:
    """Recognises MTP by the tensors of a module, in a file without a language model's layers."""
    if signs.method == "mtp":
        return True
    module = r"layers\.\d+\.(enorm|hnorm|eh_proj|shared_head)\.|mtp_layers\.\d+\.|mtp\."
    # DeepSeek V4's files have DSpark under mtp.*.
    is_other = signs.has(r"(language_model\.)?(model\.)?layers\.0\.|mtp\.\d+\.markov_head\.")
    return signs.has(module) and not is_other


def names_in(layout: str, config: MTPConfig) -> _Names:
    """Returns the complete names of the parts in a layout."""
    block = _NAMES[layout].block.format(config.num_target_layers)
    return _Names(
        block, *(block + name if name.startswith(".") else name for name in _NAMES[layout][1:])
    )


def head_rules(config: MTPConfig, names: _Names) -> list[Rule]:
    """Returns the rules of the tensors."""
    table = [
        rules.norm(getattr(names, path), path)
        for path in ("embedding_norm", "feature_norm", "norm")
    ]
    table += rules.linear(names.fc, "fc") + blocks.block(config.layers[0], names.block, "block")
    return table + rules.linear(names.output, "head") if config.own_output else table


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads an MTP module."""
    top = stored.fields
    tensors = dict(stored.tensors)
    layout = dialect(stored.signs)
    if any(name.startswith("mtp.") for name in tensors):
        raise CheckpointError(
            f"{stored.directory} names its tensors mtp.*, as Qwen3-Next does, whose blocks are not"
            " read"
        )
    if layout not in _NAMES:
        raise CheckpointError(
            f"{stored.directory} does not say in which order its projection reads the embedding and"
            f" the hidden state, and the shapes do not tell: set architectures to [{_MIMO!r}]"
            " (hidden state first) or speculators_model_type to 'mtp' (embedding first)"
        )
    _refuse_other_modules(top, tensors, layout)

    config = read_config(top)
    names = names_in(layout, config)
    config = dataclasses.replace(config, own_output=f"{names.output}.weight" in tensors)
    projection = f"{names.fc}.weight"
    if layout == "mimo" and projection in tensors:
        tensors[projection] = _exchanged(tensors[projection])
    table = head_rules(config, names)
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
            zero_first=not nested,
        )


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
    layer = config.layers[0]
    refuse_inexpressible(dialect, _refusals(config, dialect))
    names = names_in(dialect, config)
    tensors = head_tensors(
        KIND, checkpoint, head_rules(config, names), embedding=f"{names.embedding}.weight"
    )
    values = hf_config.stack_fields(config, checkpoint.dtype) | {
        "num_hidden_layers": config.num_target_layers,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }

    if dialect == "mimo":
        projection = f"{names.fc}.weight"
        tensors[projection] = _exchanged(tensors[projection])
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
    return {zero: config.zero_first is (dialect == "speculators"), **refusals[dialect]}


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


def _exchanged(weight: np.ndarray) -> np.ndarray:
    """Exchanges the two halves of the input of a projection."""
    return np.roll(weight, weight.shape[-1] // 2, axis=-1)


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """Reports the properties that the layout determines and no shape reveals."""
    order = {"mimo": "the hidden state first", "jax": "as it was converted"}.get(
        head.dialect, "the embedding first"
    )
    start = "counts as zero" if head.config.zero_first else "is the token's own"
    output = "its own" if head.config.own_output else "the target's"
    return [
        Check.report(
            "order of the halves",
            f"{order}, as the {head.dialect} layout has it; the shapes do not tell",
        ),
        Check.report("embedding at position 0", start),
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
    examine=examine,
    suspects=Suspects(
        first=(
            "the halves of the projection in the other order (the layout decides it), or a module"
            " of another target"
        ),
        later="a module that was trained on the first token alone, as DeepSeek's are; draft fewer",
    ),
)
