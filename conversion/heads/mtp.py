"""MTP modules with a dense block, in three layouts.

* ``deepseek``: DeepSeek-V3's names, ``model.layers.{L}.eh_proj`` and so on, where ``L`` is the number of the target's
  layers. DeepSeek's own modules have latent attention and experts; no engine loads the dense block under these names.
* ``mimo``: Xiaomi MiMo's, ``model.mtp_layers.0.*``, whose block is Qwen2's. vLLM loads it.
* ``speculators``: ``mtp_layers.0.*``, whose block is Qwen3's and which does not zero the embedding at position 0.

The projection reads the embedding first in DeepSeek's and speculators' files and the hidden state first in MiMo's. The
shapes do not tell, so the layout has to.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3_jax.conversion import blocks, rules
from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.heads.head import HeadCheckpoint, HeadKind, Layout, Signs, Stored, Suspects, check_fit
from eagle3_jax.conversion.hf_config import (
    bias_fields,
    read_mixer,
    read_mlp,
    read_stack,
    refuse_quantised,
    refuse_unsupported,
    refuse_windows,
    stack_fields,
)
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.models.config import DecoderConfig, gated, grouped, uniform

if TYPE_CHECKING:
    import numpy as np

    from eagle3_jax.conversion.checks import Check
    from eagle3_jax.drafters.mtp import MTPConfig


class _Names(NamedTuple):
    """What a layout calls things."""

    embedding_norm: str
    feature_norm: str
    fc: str
    norm: str
    embedding: str
    output: str


_DEEPSEEK = _Names(
    "enorm", "hnorm", "eh_proj", "shared_head.norm", "{module}.embed_tokens", "{module}.shared_head.head"
)
_SPECULATORS = _Names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", "embed_tokens", "lm_head")
_NAMES = {
    "deepseek": _DEEPSEEK,
    "mimo": _SPECULATORS._replace(embedding="model.embed_tokens"),
    "speculators": _SPECULATORS,
}
# model_type of the block: whether q, k and v carry biases, and whether q and k are normed.
_BLOCKS = {"llama": (False, False), "qwen2": (True, False), "mimo": (True, False), "qwen3": (False, True)}
_MIMO = "MiMoForCausalLM"


def recognise(signs: Signs) -> bool:
    """By the module's own tensors, where no whole model surrounds them."""
    module = r"layers\.\d+\.(enorm|hnorm|eh_proj|shared_head)\.|mtp_layers\.\d+\.|mtp\."
    return signs.method == "mtp" or (signs.has(module) and not signs.has(r"(language_model\.)?(model\.)?layers\.0\."))


def head_rules(config: MTPConfig, module: str, names: _Names) -> list[Rule]:
    """The rule table.

    Args:
        config: The module.
        module: What stands before its tensors' names.
        names: What the layout calls them.
    """
    table = [
        rules.norm(f"{module}.{names.embedding_norm}", "embedding_norm"),
        rules.norm(f"{module}.{names.feature_norm}", "feature_norm"),
        *rules.linear(f"{module}.{names.fc}", "fc"),
        *blocks.block(config.layers[0], module, "block"),
        rules.norm(f"{module}.{names.norm}", "norm"),
    ]
    return table + (rules.linear(names.output.format(module=module), "head") if config.own_output else [])


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Read an MTP module.

    Args:
        stored: What lies on disk.
        target: What it drafts for; checked against the module.

    Raises:
        CheckpointError: It is incomplete, of a kind that is not read, or does not fit the target.
    """
    directory, where = stored.directory, str(stored.directory / "config.json")
    top, tensors = Fields(stored.config, where), dict(stored.tensors)
    layout = dialect(stored.config, tensors)
    if any(name.startswith("mtp.") for name in tensors):
        raise CheckpointError(f"{directory} names its tensors mtp.*, as Qwen3-Next does, whose blocks are not read")
    if layout not in _NAMES:
        raise CheckpointError(
            f"{directory} does not say in which order its projection reads the embedding and the hidden state, and "
            f"the shapes do not tell: set architectures to [{_MIMO!r}] (hidden state first) or speculators_model_type "
            "to 'mtp' (embedding first)"
        )
    _refuse_other_modules(top, tensors, layout)
    config = read_config(top, target)
    module, names = _module(config.num_target_layers, layout), _NAMES[layout]
    output = names.output.format(module=module)
    size = (config.vocab_size, config.width)
    embedding_name = f"{names.embedding.format(module=module)}.weight"
    embedding = rules.matrix(tensors, embedding_name, size, where=str(directory))
    config = dataclasses.replace(config, own_output=f"{output}.weight" in tensors)
    if target is not None:
        check_fit(config, config.aux_layers, target, str(directory))
    if layout == "mimo" and f"{module}.{names.fc}.weight" in tensors:
        tensors[f"{module}.{names.fc}.weight"] = _exchanged(tensors[f"{module}.{names.fc}.weight"])
    table, shapes = head_rules(config, module, names), classes()[1](config).param_shapes()
    head = rules.read_params(table, tensors, shapes, where=str(directory), known=(re.escape(embedding_name),))
    return HeadCheckpoint(
        method=KIND.name,
        config=config,
        head=head,
        draft_to_target=None,
        embedding=embedding,
        dialect=layout,
        source=directory,
        dtype=rules.main_dtype(head),
        num_target_layers=config.num_target_layers,
    )


def read_config(top: Fields, target: DecoderConfig | None) -> MTPConfig:
    """The module's description; whether it has an output matrix of its own only its tensors know.

    Raises:
        CheckpointError: A field is missing, malformed or unsupported.
    """
    from eagle3_jax.drafters.mtp import MTPConfig

    layout = "speculators" if top.get("speculators_model_type") else "deepseek"
    geometry = top.section("transformer_layer_config") if layout == "speculators" else top
    model_type = geometry.get("model_type")
    if model_type not in _BLOCKS:
        raise CheckpointError(
            f"{geometry.where}: model_type is {short(model_type)}; expected one of {', '.join(_BLOCKS)}, the dense "
            "blocks that MTP modules are read with"
        )
    for fields in (top, geometry):
        refuse_quantised(fields)
        refuse_unsupported(fields)
        refuse_windows(fields)
    if _MIMO in (top.get("architectures") or ()) and geometry.get("rope_parameters") is None:
        geometry.require("rope_theta")  # engines differ in what its absence means
    depth = geometry.size("num_hidden_layers")
    if target is not None and depth != target.num_layers:
        raise CheckpointError(
            f"{geometry.where}: num_hidden_layers is {depth}, the target's, and the target has {target.num_layers}; "
            "give the target that the module was trained for"
        )
    biased, qk_norm = _BLOCKS[model_type]
    o_bias = geometry.flag("attention_bias") and not biased
    mixer = read_mixer(geometry, qkv_bias=biased or o_bias, o_bias=o_bias, qk_norm=qk_norm)
    with read_from(geometry.where):
        return MTPConfig(
            **read_stack(geometry),
            layers=uniform(1, mixer, read_mlp(geometry, bias=geometry.flag("mlp_bias"))),
            num_target_layers=depth,
            zero_first=layout != "speculators",
        )


def classes() -> tuple[type, type]:
    """Of the configuration and of the drafter."""
    from eagle3_jax.drafters.mtp import MTPConfig, MTPDrafter

    return MTPConfig, MTPDrafter


def dialect(values: Mapping[str, Any], names: Iterable[str]) -> str:
    """``deepseek``, ``mimo`` or ``speculators``; ``unknown`` where neither names nor configuration decide."""
    if values.get("speculators_model_type") == "mtp":
        return "speculators"
    if any(re.match(r"model\.layers\.\d+\.", name) for name in names):
        return "deepseek"
    return "mimo" if _MIMO in (values.get("architectures") or ()) else "unknown"


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """The module as ``deepseek``, ``mimo`` or ``speculators`` has it.

    Raises:
        CheckpointError: The layout cannot express it.
    """
    import numpy as np

    config, layer = checkpoint.config, checkpoint.config.layers[0]
    refusals = _refusals(config, dialect)
    if refusals:
        raise CheckpointError(f"the {dialect!r} layout cannot express {'; '.join(refusals)}; use --to jax")
    names = _NAMES[dialect]
    module = _module(config.num_target_layers, dialect)
    shapes = classes()[1](config).param_shapes()
    table = head_rules(config, module, names)
    tensors = rules.write_params(table, checkpoint.head, shapes, where=str(checkpoint.source))
    if checkpoint.embedding is not None:
        tensors[f"{names.embedding.format(module=module)}.weight"] = np.asarray(checkpoint.embedding)
    values = stack_fields(config, checkpoint.dtype) | {
        "num_hidden_layers": config.num_target_layers,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
    }
    if dialect == "mimo":
        projection = f"{module}.{names.fc}.weight"
        tensors[projection] = _exchanged(tensors[projection])
        if not grouped(layer).qkv_bias:  # Qwen2's block has them; zeros change nothing
            for name in "qkv":
                weight = tensors[f"{module}.self_attn.{name}_proj.weight"]
                tensors[f"{module}.self_attn.{name}_proj.bias"] = np.zeros(weight.shape[:1], weight.dtype)
        return Layout({"architectures": [_MIMO], "model_type": "qwen2", **values}, tensors)
    if dialect == "deepseek":
        kind = {"architectures": ["LlamaMTPModel"], "model_type": _block(config)}
        return Layout(kind | values | bias_fields(layer), tensors)
    geometry = {"model_type": "qwen3", **values, **bias_fields(layer)}
    del geometry["num_nextn_predict_layers"]
    outer = {"architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    return Layout(outer | {"transformer_layer_config": geometry}, tensors)


def _refusals(config: MTPConfig, dialect: str) -> list[str]:
    mixer, mlp = grouped(config.layers[0]), gated(config.layers[0])
    refusals = []
    if config.zero_first is (dialect == "speculators"):
        refusals.append(f"zero_first {config.zero_first} (what the embedding at position 0 counts as)")
    if dialect == "deepseek" and _block(config) is None:
        refusals.append("a block that is neither Llama's, nor Qwen2's, nor Qwen3's")
    if dialect == "mimo":
        refusals += [name for name, on in {"qk_norm": mixer.qk_norm, "o_bias": mixer.o_bias}.items() if on]
        refusals += ["mlp_bias"] * mlp.bias
    if dialect == "speculators" and not mixer.qk_norm:
        refusals.append("a block without qk_norm (it builds Qwen3's)")
    return refusals


def _block(config: MTPConfig) -> str | None:
    """The ``model_type`` whose block it is."""
    mixer = grouped(config.layers[0])
    if mixer.qkv_bias and not mixer.o_bias:
        return None if mixer.qk_norm else "qwen2"
    return "qwen3" if mixer.qk_norm else "llama"


def _module(depth: int, layout: str) -> str:
    if layout == "deepseek":
        return f"model.layers.{depth}"
    return "model.mtp_layers.0" if layout == "mimo" else "mtp_layers.0"


def _refuse_other_modules(top: Fields, names: Iterable[str], layout: str) -> None:
    """One module, which is fed back; and one that is not quantised."""
    scales = [name for name in names if name.endswith("weight_scale_inv")]
    if scales:
        raise CheckpointError(f"{top.where}: {scales[0]} scales FP8 weights; give the checkpoint before quantisation")
    pattern = r"model\.layers\.(\d{1,9})\." if layout == "deepseek" else r"(?:model\.)?mtp_layers\.(\d{1,9})\."
    found = sorted({int(match[1]) for name in names if (match := re.match(pattern, name))})
    said = top.size("num_nextn_predict_layers", 1)
    if said != 1 or len(found) != 1:
        raise CheckpointError(
            f"{top.where}: num_nextn_predict_layers is {said} and the file holds {len(found)} modules; expected one, "
            "which is fed back for every further token: keep the first"
        )
    expected = top.size("num_hidden_layers") if layout == "deepseek" else 0
    if found != [expected]:
        raise CheckpointError(f"{top.where}: the module has number {found[0]}; expected {expected}")


def _exchanged(weight: np.ndarray) -> np.ndarray:
    """The two halves of what a projection reads, the other way round."""
    import numpy as np

    half = weight.shape[-1] // 2
    return np.concatenate([weight[:, half:], weight[:, :half]], axis=1)


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """What the layout decides, because no shape does."""
    from eagle3_jax.conversion.checks import Check

    order = {"mimo": "the hidden state first", "jax": "as it was converted"}.get(head.dialect, "the embedding first")
    start = "counts as zero" if head.config.zero_first else "is the token's own"
    output = "its own output matrix" if head.config.own_output else "the target's output matrix"
    return [
        Check("order of the halves", "ok", f"{order}, as the {head.dialect} layout has it; the shapes do not tell"),
        Check("embedding at position 0", "ok", start),
        Check("output", "ok", f"logits by {output}"),
    ]


KIND = HeadKind(
    name="mtp",
    label="MTP",
    recognise=recognise,
    classes=classes,
    read=read,
    read_config=read_config,
    write=write,
    layouts=("deepseek", "mimo", "speculators"),
    dialect=dialect,
    examine=examine,
    suspects=Suspects(
        first="the halves of the projection in the other order (the layout decides it), or a module of another target",
        later="a module that was trained on the first token alone, as DeepSeek's are; draft fewer",
    ),
)
