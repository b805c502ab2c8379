"""Reads and writes P-EAGLE heads: EAGLE-3's tensors, a learned state, and a mask token's id.

The state is ``mask_hidden``.

* ``vllm``: EAGLE-3's file with the token as ``mask_token_id``, ``pard_token`` or ``ptd_token_id``
  (as in Amazon's heads); vLLM serves it with ``{"method": "eagle3", "parallel_drafting": true}``.
* ``speculators``: ``speculators_model_type`` ``peagle`` and ``mask_token_id``.
"""

from __future__ import annotations

import re
from typing import Any

from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.heads import eagle3
from eagle3_jax.conversion.heads.head import (
    Check,
    HeadCheckpoint,
    HeadKind,
    Layout,
    head_tensors,
    mask_token,
    read_mask_token,
    refuse_inexpressible,
    speculators_fields,
)
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.conversion.tensors import Signs, Stored
from eagle3_jax.drafters.p_eagle import PEagleConfig, PEagleDrafter
from eagle3_jax.models.config import DecoderConfig, Eagle3Config

_MASK = "mask_hidden"
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
# Speculators requires a number of tokens in a proposal; engines accept any number.
_SPECULATIVE_TOKENS = 5


def recognise(signs: Signs) -> bool:
    """Recognises P-EAGLE by the learned state, the configuration, or a mask token and an ``fc``."""
    if _MASK in signs.names or "PEagle" in signs.architecture or signs.method == "peagle":
        return True
    fuses = "fc.weight" in signs.names or "Eagle3" in signs.architecture
    return fuses and any(name in signs.config for name in _MASK_TOKENS[1:])


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Reads a P-EAGLE head.

    The target is needed when the head does not name its auxiliary layers.
    """
    top = stored.fields
    tensors = eagle3.canonical(stored.tensors, stored.directory)
    if _MASK in tensors:
        if str(top.get("speculators_model_type") or "peagle") != "peagle":
            raise top.wrong(
                "speculators_model_type", f"the file holds {_MASK}, which only 'peagle' heads have"
            )
        tensors[_MASK] = tensors[_MASK].reshape(-1)

    # Layers after the first have one norm of their input. Engines create a second one and never
    # apply it.
    unused = [
        name
        for name in tensors
        if re.fullmatch(r"layers\.0*[1-9]\d{0,8}\.hidden_norm\.weight", name)
    ]
    for name in unused:
        del tensors[name]

    plain, aux_layers = eagle3.described(top, tensors)
    config = _with_mask(plain, top)
    note = (
        f"{', '.join(unused)} left out: engines create this norm and never apply it"
        if unused
        else ""
    )
    return eagle3.read_fused(
        KIND, stored, tensors, config, aux_layers, _rules(config), target, note
    )


def planned(top: Fields, target: DecoderConfig) -> PEagleConfig:
    """Reads the description of a head without its tensors."""
    del target  # no layout copies the target's number of layers
    plain, _ = eagle3.read_config(top, lambda geometry: geometry.size("num_hidden_layers"))
    return _with_mask(plain, top)


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """Writes a head in the layout ``vllm`` or ``speculators``."""
    refuse_inexpressible(dialect, eagle3.vllm_refusals(checkpoint))
    config = checkpoint.config
    tensors = head_tensors(KIND, checkpoint, _rules(config))
    tensors[_MASK] = tensors[_MASK].reshape(1, 1, -1)
    values = eagle3.vllm_fields(checkpoint)
    if dialect == "vllm":
        # Versions of vLLM read different names.
        values |= dict.fromkeys(_MASK_TOKENS[1:], config.mask_token_id)
        return Layout(values, eagle3.as_midlayer(tensors))
    return Layout(_speculators_fields(values, config), tensors)


def _rules(config: PEagleConfig) -> list[Rule]:
    return [*eagle3.head_rules(config), Rule(_MASK, _MASK)]


def _with_mask(config: Eagle3Config, top: Fields) -> PEagleConfig:
    with read_from(top.where):
        return PEagleConfig(**vars(config), mask_token_id=read_mask_token(top, _MASK_TOKENS))


def _speculators_fields(values: dict[str, Any], config: PEagleConfig) -> dict[str, Any]:
    """Returns the fields in speculators' layout: settings of the head outside, sizes nested."""
    head_names = ("draft_vocab_size", *eagle3.FLAGS, eagle3.AUX, "target_hidden_size")
    excluded = (*head_names, "eagle_config", "architectures", "torch_dtype")
    proposal = {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        **speculators_fields("peagle", "PEagleDraftModel", _SPECULATIVE_TOKENS, **proposal),
        **{name: values[name] for name in (*head_names, "tie_word_embeddings", "dtype")},
        "mask_token_id": config.mask_token_id,
        "transformer_layer_config": {
            name: value for name, value in values.items() if name not in excluded
        },
    }


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """Runs the checks of an EAGLE-3 head, and checks that texts do not contain the mask token."""
    mask = mask_token(head.config.mask_token_id, target.stop_tokens, target.source)
    return [*eagle3.examine(target, head), mask]


KIND = HeadKind(
    name="p-eagle",
    label="P-EAGLE",
    recognise=recognise,
    classes=(PEagleConfig, PEagleDrafter),
    read=read,
    read_config=planned,
    write=write,
    layouts=("vllm", "speculators"),
    stacks=eagle3.KIND.stacks,
    dialect=eagle3.dialect,
    examine=examine,
    suspects=eagle3.KIND.suspects._replace(
        later="mask_hidden or the mask token, which no first token needs"
    ),
)
