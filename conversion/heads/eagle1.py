"""Reads and writes EAGLE-1 heads, which EAGLE-2 uses unchanged.

* ``eagle``: the official layout: ``fc``, ``layers.N.*`` and the embedding; ``"bias": false`` if
  ``fc`` has no bias.
* ``vllm``: the same without a bias of ``fc``, which vLLM's class does not have. The embedding is
  optional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_jax.conversion import blocks, hf_config, rules
from eagle3_jax.conversion.errors import TargetNeededError
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.heads.head import (
    EMBEDDING,
    Check,
    HeadCheckpoint,
    HeadKind,
    Layout,
    Suspects,
    head_tensors,
    official_refusals,
    read_as,
    refuse_inexpressible,
)
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.eagle1 import Eagle1Config, Eagle1Drafter
from eagle3_jax.models.config import DecoderConfig, gated, grouped, uniform

_ARCHITECTURE = "EagleLlamaForCausalLM"  # in vLLM; official files say LlamaForCausalLM
_UNSAID = (
    "fc has no bias and config.json does not say so, where the official code expects one; if the"
    " file lost it, most drafts are refused"
)


def head_rules(config: Eagle1Config) -> list[Rule]:
    """Returns the rules of the tensors."""
    first, *later = config.layers
    table = [
        *rules.linear("fc", "fc", bias=config.fc_bias),
        *blocks.block(first, "layers.0", "first", without="input"),
    ]
    for index, layer in enumerate(later):
        table += blocks.block(layer, f"layers.{index + 1}", f"upper_layers.{index}")
    return table


def recognise(signs: Signs) -> bool:
    """Recognises EAGLE-1 by an ``fc``, without the tensors that EAGLE-3 adds."""
    eagle3 = (
        signs.has(r"(midlayer|fc_norm|input_norm)\.|layers\.\d+\.hidden_norm\.")
        or signs.method == "eagle3"
    )
    if eagle3 or "Eagle3" in signs.architecture or {"d2t", "t2d", "norm.weight"} & signs.names:
        return False
    return "fc.weight" in signs.names or _ARCHITECTURE in signs.architecture


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads an EAGLE-1 head. The target is needed, because the file does not have its depth."""
    top = stored.fields
    tensors = stored.tensors
    count = top.size("num_hidden_layers", 1)
    rules.check_layers(count, tensors, r"layers\.(\d{1,9})\.", f"{top.where}: num_hidden_layers")

    if target is None:
        raise TargetNeededError(
            f"{top.where} does not say how deep its target is; give the target as well (--target)"
        )
    config = read_config(top, target, fc_bias="fc.bias" in tensors)
    note = _UNSAID if not config.fc_bias and top.get("bias") is None else ""
    return read_as(KIND, stored, config, head_rules(config), tensors, target=target, note=note)


def read_config(top: Fields, target: DecoderConfig, *, fc_bias: bool = True) -> Eagle1Config:
    """Reads the description of a head.

    ``fc_bias`` tells whether ``fc`` has a bias if the file has no flag. The official code has one
    by default. Heads that were trained for vLLM have no bias and no flag.
    """
    hf_config.refuse_unsupported(top)
    hf_config.refuse_windows(top)
    top.one_of("model_type", ("llama", "qwen2", "eagle"), "llama", purpose="for an EAGLE-1 head")
    both = top.flag("attention_bias")
    mixer = hf_config.read_mixer(top, qkv_bias=top.flag("qkv_bias", both), o_bias=both)
    mlp = hf_config.read_mlp(top, bias=top.flag("mlp_bias"))
    with read_from(top.where):
        return Eagle1Config(
            **hf_config.read_stack(top),
            layers=uniform(top.size("num_hidden_layers", 1), mixer, mlp),
            num_target_layers=target.num_layers,
            # The official code's flag; it has nothing to do with attention.
            fc_bias=top.flag("bias", fc_bias),
        )


def dialect(signs: Signs) -> str:
    """Returns ``vllm`` if the file names vLLM's class, otherwise ``eagle``."""
    return "vllm" if _ARCHITECTURE in signs.architecture else "eagle"


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """Writes a head in the layout ``eagle`` (the official code) or ``vllm``."""
    config = checkpoint.config
    layer = config.layers[0]
    tensors = head_tensors(KIND, checkpoint, head_rules(config))
    refuse_inexpressible(dialect, _refusals(checkpoint, tensors, dialect))
    architecture = "LlamaForCausalLM" if dialect == "eagle" else _ARCHITECTURE
    values = {
        "architectures": [architecture],
        "model_type": "llama",
        **hf_config.stack_fields(config, checkpoint.dtype),
        **hf_config.bias_fields(layer),
        "qkv_bias": grouped(layer).qkv_bias,
        "attention_bias": grouped(layer).o_bias,
        "bias": config.fc_bias,
        "tie_word_embeddings": False,
    }
    if dialect == "vllm":
        tensors.pop("fc.bias", None)
        values["bias"] = False  # vLLM reads the field as a bias of attention
    else:
        # The configuration class of the official code has none of these.
        for name in ("rope_parameters", "head_dim", "attention_bias", "mlp_bias"):
            del values[name]
    return Layout(values, tensors)


def _refusals(
    checkpoint: HeadCheckpoint, tensors: Mapping[str, Any], dialect: str
) -> dict[str, Any]:
    config = checkpoint.config
    layer = config.layers[0]
    if dialect == "vllm":
        bias = tensors.get("fc.bias")
        return {"a bias in fc (vLLM's head has none)": bias is not None and bias.any()}
    no_embedding = (
        f"a head without an embedding of its own (the official code asks for {EMBEDDING})"
    )
    return {
        "o_bias": grouped(layer).o_bias,
        "mlp_bias": gated(layer).bias,
        **official_refusals(config, ("default",)),
        no_embedding: checkpoint.embedding is None,
    }


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """Reports the bias, in which the layouts differ."""
    del target
    detail = "none, as vLLM's class needs it"
    if head.config.fc_bias:
        detail = "one, as official heads have and vLLM's class has not: it cannot go there"
    return [Check.report("fc bias", detail)]


KIND = HeadKind(
    name="eagle1",
    label="EAGLE-1/2",
    recognise=recognise,
    classes=(Eagle1Config, Eagle1Drafter),
    read=read,
    read_config=read_config,
    write=write,
    # vLLM's comes first: heads trained here share the target's embedding, which the official code
    # cannot.
    layouts=("vllm", "eagle"),
    stacks={"upper_layers": lambda config: config.num_layers - 1},
    dialect=dialect,
    examine=examine,
    suspects=Suspects(
        first=(
            "features before the target's final norm, a lost fc.bias, or a head of another target"
        ),
        later="the state that is fed back: it must be the head's own, without a norm",
    ),
)
