"""What an EAGLE-3 head may get wrong without anything being missing: layers, norms and rope that no shape betrays."""

from __future__ import annotations

from typing import Any

from eagle3_jax.conversion.checks import Check
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import NATIVE_FILE, read_json
from eagle3_jax.conversion.heads.eagle3 import named_aux_layers
from eagle3_jax.conversion.heads.eagle3_export import is_default_aux
from eagle3_jax.conversion.heads.head import HeadCheckpoint
from eagle3_jax.conversion.heads.layer_ids import entered_after, usual_layers
from eagle3_jax.models.config import RopeConfig, grouped


def examine(target: Any, head: HeadCheckpoint) -> list[Check]:
    """The three findings."""
    return [_aux_layers(head), _norm_flags(head), _rope(target, head)]


def _head_fields(head: HeadCheckpoint) -> Fields:
    """The head's configuration file as it is; empty for a native head, whose fields are all explicit."""
    if (head.source / NATIVE_FILE).is_file():
        return Fields({}, str(head.source))
    path = head.source / "config.json"
    return Fields(read_json(path), str(path))


def _aux_layers(head: HeadCheckpoint) -> Check:
    layers, name = head.config.aux_layers, "auxiliary layers"
    fields = _head_fields(head)
    if fields.values and named_aux_layers(fields) is None:
        detail = f"{layers}, the default 2, L//2, L-3: config.json names none"
        if head.dialect == "eagle":
            return Check(name, "ok", f"{detail}, as official heads do")
        return Check(
            name,
            "warning",
            f"{detail}. If the head was trained on other layers its drafts are useless; "
            "add eagle_aux_hidden_state_layer_ids",
        )
    usual = is_default_aux(head)
    named = named_aux_layers(fields) if fields.values else layers
    if named not in (None, layers):
        usual_is = "the default of this target" if usual else "not the default of this target"
        return Check(name, "ok", f"{layers}, {usual_is}: {named} in config.json count layers left, as --layer-ids says")
    if layers[0] == 1:
        one_more = entered_after(layers)
        outputs = f"{layers} starts with 1, as lists of layers left do; they are read as layers entered"
        if one_more == usual_layers(head.num_target_layers):
            return Check(
                name,
                "warning",
                f"{outputs}, though {one_more} is the default of this target: compare the agreement with that of "
                "--layer-ids leaving",
            )
        return Check(name, "warning", f"{outputs}. If agreement is poor, try --layer-ids leaving: {list(one_more)}")
    return Check(name, "ok", f"{layers}, {'the default' if usual else 'named in config.json'}")


def _norm_flags(head: HeadCheckpoint) -> Check:
    names = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
    detail = ", ".join(f"{name} {getattr(head.config, name)}" for name in names)
    fields = _head_fields(head)
    if head.dialect == "speculators" and fields.get("norm_before_residual") is None:
        return Check(
            "norm flags",
            "warning",
            f"{detail}; norm_before_residual is not in config.json, and this layout's default is True",
        )
    if head.dialect == "sglang" and head.config.norm_output and not head.config.fc_norm:
        return Check(
            "norm flags",
            "warning",
            f"{detail}; old SpecForge files meant the norm before lm_head by norm_output, not the EAGLE-3.1 feedback. "
            "If the second draft token collapses, set it to false",
        )
    return Check("norm flags", "ok", detail)


def _rope(target: Any, head: HeadCheckpoint) -> Check:
    ours, theirs = (grouped(config.layers[0]).rope or RopeConfig() for config in (head.config, target.config))
    detail = f"head: {ours.type}, theta {ours.theta:g}; target: {theirs.type}, theta {theirs.theta:g}"
    if ours == theirs:
        return Check("rope", "ok", detail)
    if head.dialect == "eagle" and ours.type == "default" and ours.theta == 10_000.0:
        return Check(
            "rope", "ok", f"{detail}. Heads trained by the official code have theta 10000 whatever the target has"
        )
    return Check(
        "rope",
        "warning",
        f"{detail}. If acceptance falls with the length of the text, set the head's rope to what it was trained with "
        "(the target's, or theta 10000)",
    )
