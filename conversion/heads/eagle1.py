"""EAGLE-1 heads, which EAGLE-2 uses as they are.

* ``eagle``: the official layout: ``fc``, ``layers.N.*`` and the embedding; ``"bias": false`` for an ``fc`` without one.
* ``vllm``: the same without a bias in ``fc``, which vLLM's class does not have; the embedding may be left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from eagle3_jax.conversion import blocks, rules
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
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
    from eagle3_jax.drafters.eagle1 import Eagle1Config

_ARCHITECTURE = "EagleLlamaForCausalLM"  # in vLLM; official files say LlamaForCausalLM
_UNSAID = (
    "fc has no bias and config.json does not say so, where the official code expects one; if the file lost it, most "
    "drafts are refused"
)
_NOT_EAGLE1 = {
    "layers.0.input_layernorm.weight": "an input norm in its first layer, which an EAGLE-1 head has not",
    "lm_head.weight": "an output matrix; an EAGLE-1 head reads its logits off the target's",
}


def head_rules(config: Eagle1Config) -> list[Rule]:
    """The rule table."""
    first, *rest = config.layers
    table = [*rules.linear("fc", "fc", bias=config.fc_bias), *blocks.attention_and_mlp(first, "layers.0", "first")]
    for index, layer in enumerate(rest):
        table += blocks.block(layer, f"layers.{index + 1}", f"rest.{index}")
    return table


def recognise(signs: Signs) -> bool:
    """By an ``fc``, which no language model has, without anything that EAGLE-3 puts beside it."""
    eagle3 = signs.has(r"(midlayer|fc_norm|input_norm)\.|layers\.\d+\.hidden_norm\.")
    eagle3 = eagle3 or bool({"d2t", "t2d", "norm.weight"} & signs.names)
    named = "Eagle3" in signs.architecture or signs.method == "eagle3"
    return not eagle3 and ("fc.weight" in signs.names or (not named and _ARCHITECTURE in signs.architecture))


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Read an EAGLE-1 head.

    Args:
        stored: What lies on disk.
        target: What it drafts for, whose depth the file does not say.

    Raises:
        CheckpointError: It is incomplete, something else, or does not fit the target; the message says why.
    """
    directory, where = stored.directory, str(stored.directory / "config.json")
    top, tensors = Fields(stored.config, where), stored.tensors
    for name, what in _NOT_EAGLE1.items():
        if name in tensors:
            raise CheckpointError(f"{directory} holds {name}: {what}")
    if "Eagle3" in str(top.get("architectures")):
        raise CheckpointError(
            f"{where} names an EAGLE-3 architecture, and the tensors are those of an EAGLE-1 head (no hidden_norm, no "
            f"lm_head); fetch the files that belong together, or name {_ARCHITECTURE}"
        )
    refuse_quantised(top)
    count = top.size("num_hidden_layers", 1)
    rules.check_layers(count, tensors, r"layers\.(\d{1,9})\.", f"{where}: num_hidden_layers")
    if target is None:
        raise TargetNeededError(f"{where} does not say how deep its target is; give the target as well")
    config = read_config(top, target, fc_bias="fc.bias" in tensors)
    check_fit(config, config.aux_layers, target, str(directory))
    fused = tensors.get("fc.weight")
    if fused is not None and fused.shape == (config.width, 3 * config.width):
        raise CheckpointError(
            f"{directory}: fc.weight reads three features, as EAGLE-3 does; an EAGLE-1 head reads an embedding and one"
        )
    embedding = rules.matrix(tensors, "embed_tokens.weight", (config.vocab_size, config.width), where=str(directory))
    shapes = classes()[1](config).param_shapes()
    head = rules.read_params(
        head_rules(config), tensors, shapes, where=str(directory), known=(r"embed_tokens\.weight",)
    )
    return HeadCheckpoint(
        method=KIND.name,
        config=config,
        head=head,
        draft_to_target=None,
        embedding=embedding,
        dialect=dialect(stored.config, stored.tensors),
        source=directory,
        dtype=rules.main_dtype(head),
        num_target_layers=target.num_layers,
        note=_UNSAID if not config.fc_bias and top.get("bias") is None else "",
    )


def read_config(top: Fields, target: DecoderConfig, *, fc_bias: bool = True) -> Eagle1Config:
    """The head's description.

    Args:
        top: The ``config.json``.
        target: What it drafts for.
        fc_bias: Whether ``fc`` has a bias, where the file does not say: the official code's default is that it has,
            and what is trained for vLLM has none and no flag either.

    Raises:
        CheckpointError: A field is missing, malformed or unsupported.
    """
    from eagle3_jax.drafters.eagle1 import Eagle1Config

    refuse_unsupported(top)
    refuse_windows(top)
    if top.get("model_type") not in (None, "llama", "qwen2", "eagle"):
        raise CheckpointError(
            f"{top.where}: model_type is {top.get('model_type')!r}; expected 'llama' or 'qwen2' for an EAGLE-1 head"
        )
    both = top.flag("attention_bias")
    mixer = read_mixer(top, qkv_bias=top.flag("qkv_bias", both), o_bias=both)
    with read_from(top.where):
        return Eagle1Config(
            **read_stack(top),
            layers=uniform(top.size("num_hidden_layers", 1), mixer, read_mlp(top, bias=top.flag("mlp_bias"))),
            num_target_layers=target.num_layers,
            # The official code's flag; it has nothing to do with attention.
            fc_bias=top.flag("bias", fc_bias),
        )


def classes() -> tuple[type, type]:
    """Of the configuration and of the drafter."""
    from eagle3_jax.drafters.eagle1 import Eagle1Config, Eagle1Drafter

    return Eagle1Config, Eagle1Drafter


def dialect(values: Mapping[str, Any], names: Iterable[str]) -> str:
    """``vllm`` where the file names vLLM's class."""
    del names
    return "vllm" if _ARCHITECTURE in (values.get("architectures") or ()) else "eagle"


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """The head as ``eagle`` (the official code) or ``vllm`` has it.

    Raises:
        CheckpointError: The layout cannot express it.
    """
    import numpy as np

    config, layer = checkpoint.config, checkpoint.config.layers[0]
    shapes = classes()[1](config).param_shapes()
    tensors = rules.write_params(head_rules(config), checkpoint.head, shapes, where=str(checkpoint.source))
    if checkpoint.embedding is not None:
        tensors["embed_tokens.weight"] = np.asarray(checkpoint.embedding)
    refusals = _refusals(checkpoint, tensors, dialect)
    if refusals:
        raise CheckpointError(f"the {dialect!r} layout cannot express {'; '.join(refusals)}; use --to jax")
    values = {
        "architectures": ["LlamaForCausalLM" if dialect == "eagle" else _ARCHITECTURE],
        "model_type": "llama",
        **stack_fields(config, checkpoint.dtype),
        **bias_fields(layer),
        "qkv_bias": grouped(layer).qkv_bias,
        "attention_bias": grouped(layer).o_bias,
        "bias": config.fc_bias,
        "tie_word_embeddings": False,
    }
    if dialect == "vllm":
        tensors.pop("fc.bias", None)
        values["bias"] = False  # vLLM takes it for a bias of attention
    else:
        for name in ("rope_parameters", "head_dim", "attention_bias", "mlp_bias"):  # its class knows none of these
            del values[name]
    return Layout(values, tensors)


def _refusals(checkpoint: HeadCheckpoint, tensors: Mapping[str, np.ndarray], dialect: str) -> list[str]:
    config, layer = checkpoint.config, checkpoint.config.layers[0]
    if dialect == "vllm":
        bias = tensors.get("fc.bias")
        return ["a bias in fc (vLLM's head has none)"] if bias is not None and bias.any() else []
    mixer, rope = grouped(layer), grouped(layer).rope
    refusals = [name for name, is_set in {"o_bias": mixer.o_bias, "mlp_bias": gated(layer).bias}.items() if is_set]
    if mixer.head_dim * mixer.num_heads != config.width:
        refusals.append(f"head_dim {mixer.head_dim} (it takes width {config.width} over {mixer.num_heads} heads)")
    if rope is None or rope.type != "default":
        refusals.append(f"rope type {rope and rope.type!r}")
    if checkpoint.embedding is None:
        refusals.append("a head without an embedding of its own (the official code asks for embed_tokens.weight)")
    return refusals


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """What the layouts differ in."""
    from eagle3_jax.conversion.checks import Check

    del target
    if head.config.fc_bias:
        return [Check("fc bias", "ok", "one, as official heads have and vLLM's class has not: it cannot go there")]
    return [Check("fc bias", "ok", "none, as vLLM's class needs it")]


KIND = HeadKind(
    name="eagle1",
    label="EAGLE-1/2",
    recognise=recognise,
    classes=classes,
    read=read,
    read_config=read_config,
    write=write,
    layouts=("vllm", "eagle"),  # what is trained here shares the target's embedding, which the official code does not
    stacks={"rest": lambda config: config.num_layers - 1},
    dialect=dialect,
    examine=examine,
    suspects=Suspects(
        first="features before the target's final norm, a lost fc.bias, or a head of another target",
        later="the state that is fed back: it must be the head's own, without a norm",
    ),
)
