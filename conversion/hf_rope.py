"""The rotary embedding of a Hugging Face ``config.json``, in both of its notations, both ways."""

from __future__ import annotations

import dataclasses
from typing import Any

from eagle3_jax.conversion.errors import CheckpointError, short
from eagle3_jax.conversion.fields import Fields, read_from
from eagle3_jax.models.config import RopeConfig

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_ROPE_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "partial_rotary_factor",
}


def read_rope(
    fields: Fields,
    *,
    known: tuple[str, ...] = (),
    theta: float = 10_000.0,
    partial: float | None = None,
    interleaved: bool = False,
) -> RopeConfig:
    """The rotary embedding, from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Args:
        fields: The geometry.
        known: Names among the parameters that the family reads itself.
        theta: The base where the file names none. 10,000 is that of the original Llama, whose files do not name it;
            nor do official heads.
        partial: The share of channels that rotate where the file does not say, of a family in which some need not;
            ``None`` of one in which all do.
        interleaved: Which channels are pairs, of the family.

    Raises:
        CheckpointError: The type is unknown, a parameter is missing, or the two notations disagree.
    """
    own: dict[str, Any] = {"theta": theta, "partial": partial, "interleaved": interleaved}
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new.values and old.values:
        first, second = _rope_from(fields, new, known, **own), _rope_from(fields, old, known, **own)
        if first != second:
            raise CheckpointError(
                f"{fields.where}: rope_parameters and rope_scaling disagree ({first} and {second}); remove one"
            )
        return first
    return _rope_from(fields, new if new.values else old, known, **own)


def _rope_from(
    fields: Fields, rope: Fields, known: tuple[str, ...], *, theta: float, partial: float | None, interleaved: bool
) -> RopeConfig:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_TYPES:
        raise CheckpointError(
            f"{rope.where}: rope type {short(kind)} is not supported; expected one of {', '.join(_ROPE_TYPES)}"
        )
    unknown = sorted(
        key for key, value in rope.values.items() if key not in _ROPE_KEYS and key not in known and value is not None
    )
    if unknown:
        raise CheckpointError(f"{rope.where}: {unknown[0]!r} is not supported for rope type {kind!r}")
    share = _either(fields, rope, "partial_rotary_factor", 1.0 if partial is None else partial)
    if partial is None and share != 1.0:
        raise CheckpointError(f"{fields.where}: partial_rotary_factor is not supported; all channels must rotate")
    base = _either(fields, rope, "rope_theta", theta)
    if base <= 0:
        raise CheckpointError(f"{fields.where}: rope_theta is {base}; expected a positive number")
    with read_from(rope.where):
        return dataclasses.replace(_rope_of(kind, base, fields, rope), partial=share, interleaved=interleaved)


def _either(fields: Fields, rope: Fields, name: str, default: float) -> float:
    """A number that stands at the top level, among the parameters, or in both."""
    inner, outer = rope.optional_number(name), fields.optional_number(name)
    if inner is not None and outer is not None and inner != outer:
        raise CheckpointError(f"{fields.where}: {name} is {outer} but {inner} in the rope parameters; remove one")
    found = inner if inner is not None else outer
    return default if found is None else found


def _rope_of(kind: str, theta: float, fields: Fields, rope: Fields) -> RopeConfig:
    if kind == "default":
        return RopeConfig(theta=theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=factor)
    # Phi-style files keep the original context at the top level, where transformers gives it priority.
    owner = fields if fields.get("original_max_position_embeddings") is not None else rope
    original = owner.integer("original_max_position_embeddings")
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            type="llama3",
            factor=factor,
            original_max_positions=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_positions=original,
        # Optional in the format: 32 and 1 are the constants of the paper, the rest is derived from the factor.
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.optional_number("attention_factor"),
        mscale=rope.optional_number("mscale"),
        mscale_all_dim=rope.optional_number("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )


def rope_fields(rope: RopeConfig | None, *, partial: bool = False) -> dict[str, Any]:
    """The rotary embedding in both notations: transformers 5 reads the one, 4.x, vLLM and SGLang the other.

    Args:
        rope: The embedding.
        partial: Whether to say which share of the channels rotates, for a family in which some need not.

    Raises:
        CheckpointError: There is none, which no configuration of this layout says.
    """
    if rope is None:
        raise CheckpointError("a layer without rotary embedding cannot be expressed in this layout; use --to jax")
    if rope.type == "default":
        scaling = None
    elif rope.type == "linear":
        scaling = {"rope_type": "linear", "factor": rope.factor}
    else:
        scaling = {
            "rope_type": rope.type,
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_positions,
        }
        if rope.type == "llama3":
            scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        else:
            scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
            if not rope.truncate:  # transformers 4 warns about the key
                scaling["truncate"] = False
            for name in ("attention_factor", "mscale", "mscale_all_dim"):
                if getattr(rope, name) is not None:
                    scaling[name] = getattr(rope, name)
    parameters = {**(scaling or {"rope_type": "default"}), "rope_theta": rope.theta}
    fields = {"rope_theta": rope.theta, "rope_scaling": scaling, "rope_parameters": parameters}
    if not partial:
        return fields
    share = {"partial_rotary_factor": rope.partial}
    return {**fields, **share, "rope_parameters": {**parameters, **share}}
