"""P-EAGLE heads: EAGLE-3's tensors, a learned state ``mask_hidden`` and the id of a mask token.

* ``vllm``: EAGLE-3's file with the token as ``mask_token_id``, ``pard_token`` or ``ptd_token_id`` (so Amazon's heads);
  served with ``{"method": "eagle3", "parallel_drafting": true}``.
* ``speculators``: ``speculators_model_type`` ``peagle`` and ``mask_token_id``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eagle3_jax.conversion.errors import CheckpointError
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.conversion.heads import eagle3
from eagle3_jax.conversion.heads.dialects import dialect_of
from eagle3_jax.conversion.heads.head import HeadCheckpoint, HeadKind, Layout, Signs, Stored
from eagle3_jax.conversion.rules import Rule
from eagle3_jax.models.config import DecoderConfig, Eagle3Config

if TYPE_CHECKING:
    import numpy as np

    from eagle3_jax.conversion.checks import Check
    from eagle3_jax.drafters.p_eagle import PEagleConfig

_MASK = "mask_hidden"
_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
# What a proposal of speculators' has to name; any number is served.
_SPECULATIVE_TOKENS = 5


def recognise(signs: Signs) -> bool:
    """By the learned state, by what the file says, or by a mask token beside the fusion of features."""
    if _MASK in signs.names or "PEagle" in signs.architecture or signs.method == "peagle":
        return True
    fuses = "fc.weight" in signs.names or "Eagle3" in signs.architecture
    return fuses and any(name in signs.config for name in _MASK_TOKENS[1:])


def read(stored: Stored, target: DecoderConfig | None) -> HeadCheckpoint:
    """Read a P-EAGLE head.

    Args:
        stored: What lies on disk.
        target: What it drafts for; checked against the head, and needed when the head does not name its auxiliary
            layers.

    Raises:
        CheckpointError: It is incomplete, or does not fit the target; the message says why.
    """
    where, top = str(stored.directory), Fields(stored.config, str(stored.directory / "config.json"))
    tensors = eagle3.canonical(stored.tensors, stored.directory)
    state = tensors.pop(_MASK, None)
    if state is None:
        raise CheckpointError(
            f"{where} has no {_MASK}, the state that stands for features not known yet; fetch the complete head"
        )
    if str(top.get("speculators_model_type") or "peagle") != "peagle":
        raise CheckpointError(
            f"{top.where}: speculators_model_type is {top.get('speculators_model_type')!r} but the file holds {_MASK}, "
            "which only 'peagle' heads have"
        )
    tensors, dropped = _without_idle_norms(tensors)
    plain, aux_layers = eagle3.read_config(top, lambda _: eagle3.num_layers(tensors, top.where))
    config = _with_mask(plain, top)
    size = len(config.aux_layers) * config.target_width
    if state.size != size:
        raise CheckpointError(
            f"{where}: {_MASK} has shape {list(state.shape)}; expected {size} numbers, one for each of "
            f"{len(config.aux_layers)} features of width {config.target_width}"
        )
    tensors[_MASK] = state.reshape(-1)
    note = f"{', '.join(dropped)} left out: engines create this norm and never apply it" if dropped else ""
    return eagle3.read_as(KIND, stored, tensors, config, aux_layers, _rules(config), target, note)


def planned(top: Fields, target: DecoderConfig) -> PEagleConfig:
    """The head's description without its tensors."""
    del target  # no official layout whose number of layers would be a copy of the target's
    return _with_mask(eagle3.read_config(top, lambda geometry: geometry.size("num_hidden_layers"))[0], top)


def write(checkpoint: HeadCheckpoint, dialect: str) -> Layout:
    """The head as ``vllm`` or ``speculators`` have it.

    Raises:
        CheckpointError: The layout cannot express it.
    """
    from eagle3_jax.conversion.heads import eagle3_export as export
    from eagle3_jax.drafters.p_eagle import PEagleDrafter

    if refusals := export.vllm_refusals(checkpoint):
        raise CheckpointError(f"the {dialect!r} layout cannot express {'; '.join(refusals)}; use --to jax")
    config = checkpoint.config
    tensors = export.canonical_tensors(checkpoint, PEagleDrafter(config), _rules(config))
    tensors[_MASK] = tensors[_MASK].reshape(1, 1, -1)
    values = export.vllm_fields(checkpoint)
    if dialect == "vllm":
        # Which of them is read depends on the version.
        values |= dict.fromkeys(("pard_token", "ptd_token_id"), config.mask_token_id)
        return Layout(values, export.as_midlayer(tensors))
    return Layout(_speculators_fields(values, config), tensors)


def _rules(config: PEagleConfig) -> list[Rule]:
    return [*eagle3.head_rules(config), Rule(_MASK, _MASK)]


def _without_idle_norms(tensors: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The tensors without ``hidden_norm`` of the plain layers, which have one norm at their input; and its names."""
    idle = [name for name in tensors if re.fullmatch(r"layers\.0*[1-9]\d{0,8}\.hidden_norm\.weight", name)]
    return {name: value for name, value in tensors.items() if name not in idle}, idle


def _with_mask(config: Eagle3Config, top: Fields) -> PEagleConfig:
    """The description with the mask token, which engines look for under several names."""
    from eagle3_jax.drafters.p_eagle import PEagleConfig

    found = {name: top.integer(name) for name in _MASK_TOKENS if top.get(name) is not None}
    if not found:
        raise CheckpointError(
            f"{top.where} names no mask token ({', '.join(_MASK_TOKENS)}); the head cannot draft without it, so add it"
        )
    if len(set(found.values())) > 1:
        named = ", ".join(f"{name} {value}" for name, value in found.items())
        raise CheckpointError(f"{top.where} names several mask tokens ({named}); they must agree")
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    with read_from(top.where):
        return PEagleConfig(**values, mask_token_id=next(iter(found.values())))


def _speculators_fields(values: dict[str, Any], config: PEagleConfig) -> dict[str, Any]:
    """The same fields where speculators looks for them: what is the head's own outside, its geometry nested."""
    outer = ("draft_vocab_size", "norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
    ids = "eagle_aux_hidden_state_layer_ids"
    own = {name: values[name] for name in (*outer, ids, "target_hidden_size", "tie_word_embeddings", "dtype")}
    left_out = {*own, "eagle_config", "architectures", "torch_dtype"} - {"dtype", "tie_word_embeddings"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": _SPECULATIVE_TOKENS}
    return {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "speculators_version": "0.9.0",
        "mask_token_id": config.mask_token_id,
        **own,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
            # The checkpoint does not know where its target lies.
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": {name: value for name, value in values.items() if name not in left_out},
    }


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """What an EAGLE-3 head may get wrong, and the token that no text should hold."""
    from eagle3_jax.conversion.checks import mask_token
    from eagle3_jax.conversion.heads import eagle3_checks

    mask = mask_token(head.config.mask_token_id, target.stop_tokens, target.source)
    return [*eagle3_checks.examine(target, head), mask]


def _classes() -> tuple[type, type]:
    from eagle3_jax.drafters.p_eagle import PEagleConfig, PEagleDrafter

    return PEagleConfig, PEagleDrafter


KIND = HeadKind(
    name="p-eagle",
    label="P-EAGLE",
    recognise=recognise,
    classes=_classes,
    read=read,
    read_config=planned,
    write=write,
    layouts=("vllm", "speculators"),
    stacks=eagle3.KIND.stacks,
    dialect=dialect_of,
    examine=examine,
    suspects=eagle3.KIND.suspects._replace(later="mask_hidden or the mask token, which no first token needs"),
)
