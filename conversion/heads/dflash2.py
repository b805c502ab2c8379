"""Reads and writes DFlash2 drafters in the layouts of DFlash.

The tensors of z-lab's files are those of DFlash, ``attention_conv`` and ``mlp_conv`` of every
layer, and ``candidate_selector``. The settings of both parts are in ``dflash_config``
(speculators: at the top level).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3_jax.conversion import rules
from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.heads import dflash
from eagle3_jax.conversion.heads.eagle3 import is_speculators
from eagle3_jax.conversion.heads.head import (
    Check,
    HeadCheckpoint,
    HeadKind,
    Layout,
    head_tensors,
    refuse_inexpressible,
)
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.dflash2 import DFlash2Config, DFlash2Drafter
from eagle3_jax.models.config import DecoderConfig

_SELECTOR = "candidate_selector"
# Sizes with speculators' defaults, and factors with those of all engines.
_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_SCALES = {
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": None,
}
# Further fields of ``dflash_config``.
_NESTED = (
    "block_size",
    "causal",
    "mask_token_id",
    "target_layer_ids",
    "projector_type",
    "sample_from_anchor",
    "use_aux_hidden_state",
    "use_swa",
    "swa_window_size",
    "attention_sink_bias",
    "attention_value_scale",
)


def recognise(signs: Signs) -> bool:
    """Recognises a DFlash2 drafter by its name, or by the tensors of its selector."""
    is_named = "DFlash2" in signs.architecture or signs.method == "dflash2"
    return is_named or signs.has(rf"{_SELECTOR}\.")


def head_rules(config: DFlash2Config) -> list[Rule]:
    """Returns the rules of the tensors."""
    table = dflash.head_rules(config)
    for layer in range(config.num_layers):
        for name in ("attention", "mlp"):
            source = f"layers.{layer}.{name}_conv"
            path = f"blocks.{layer}.{name}_convolution"
            table.append(Rule(f"{source}.base_kernel", f"{path}.base"))
            table += rules.linear(f"{source}.kernel_projection", f"{path}.changes")

    table.append(Rule(f"{_SELECTOR}.predecessor_codebook", "selector.before"))
    table.append(Rule(f"{_SELECTOR}.successor_codebook", "selector.after"))
    return table + rules.linear(f"{_SELECTOR}.hidden_projection", "selector.hidden")


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads a DFlash2 drafter in either dialect."""
    return dflash.read_block(KIND, head_rules, read_config, stored, target)


def read_config(
    top: Fields, target: DecoderConfig | None = None, *, own_output: bool | None = None
) -> DFlash2Config:
    """Reads the description of a DFlash2 drafter; see :func:`dflash.read_config`."""
    nested = is_speculators(top.values)
    fields = dflash.merged(top)
    _refuse_unknown(top, nested)

    sizes: dict[str, Any] = {
        name: fields.size(name, default if nested else None) for name, default in _SIZES.items()
    }
    scales: dict[str, Any] = {name: fields.optional_number(name) for name in _SCALES}
    # Engines read a cap of zero as none.
    scales["final_logit_softcapping"] = scales["final_logit_softcapping"] or None
    scales = {name: value for name, value in scales.items() if value is not None}

    # DFlash has no scales.
    section = _without_scales(top.section("dflash_config").values)
    plain = {**_without_scales(top.values), "dflash_config": section}
    config = dflash.read_config(Fields(plain, top.where), target, own_output=own_output)
    with read_from(top.where):
        return DFlash2Config(**vars(config), **sizes, **scales)


def _without_scales(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in _SCALES}


def _refuse_unknown(top: Fields, nested: bool) -> None:
    """Refuses settings that change the mathematics in ways that nothing here describes."""
    section = top.section("dflash_config")
    known = {*_SIZES, *_SCALES, *_NESTED}
    unknown = sorted(section.values.keys() - known)
    if unknown:
        raise CheckpointError(
            f"{section.where}: {short(unknown[0])} is not a setting of a DFlash2 drafter; expected"
            f" {', '.join(sorted(known))}"
        )
    for name in _SCALES if nested else ():
        if top.get(name) is not None:
            raise top.wrong(name, "speculators and vLLM ignore it in this layout; leave it out")


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """Writes a DFlash2 drafter for vLLM and z-lab's code, or for speculators."""
    config = checkpoint.config
    nested = dialect == "speculators"
    settings = {name: getattr(config, name) for name in _SIZES}
    scales = {name: getattr(config, name) for name in _SCALES}
    scales = {name: value for name, value in scales.items() if value != _SCALES[name]}
    if nested:
        refuse_inexpressible(dialect, {f"{name} {scales[name]}": True for name in scales})

    values = dflash.layout_fields(checkpoint, dialect)
    values["architectures"] = ["DFlash2DraftModel"]
    if nested:
        values |= {"speculators_model_type": "dflash2", **settings}
        values["speculators_config"]["algorithm"] = "dflash2"
    else:
        values["dflash_config"] |= settings | scales | {"block_size": config.block_size}
    return Layout(values, head_tensors(KIND, checkpoint, head_rules(config)))


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """Reports the selector, and what :func:`dflash.examine` reports."""
    config = head.config
    selector = f"{config.selector_top_k} candidates for each token, scored after the token before"
    convolutions = f"{config.conv_kernel_size} rows, {config.conv_group_size} channels in a group"
    return [
        *dflash.examine(target, head),
        Check.report("selector", selector),
        Check.report("convolutions", convolutions),
    ]


KIND = HeadKind(
    name="dflash2",
    label="DFlash2",
    recognise=recognise,
    classes=(DFlash2Config, DFlash2Drafter),
    read=read,
    read_config=read_config,
    write=write,
    layouts=("vllm", "speculators"),
    stacks=dflash.KIND.stacks,
    dialect=dflash.dialect,
    examine=examine,
    suspects=dflash.KIND.suspects,
)
