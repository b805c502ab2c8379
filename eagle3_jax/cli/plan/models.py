"""Targets and drafters of ``eagle3 plan``, from their ``config.json``, which alone is read."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.files.sources import (
    OWN_MODULES,
    is_named,
    locate,
    parts_of,
    similar_drafters,
)
from eagle3_jax.models.config import DecoderConfig, Eagle3Config, usual_head
from eagle3_jax.theory.known_models import (
    KNOWN_MODELS,
    PUBLISHED_WEIGHTS,
    known_name,
    similar_targets,
)
from eagle3_jax.theory.memory import LayerBits
from eagle3_jax.theory.sizes import Parameters, Sizes, head_sizes, sizes_of

if TYPE_CHECKING:
    from eagle3_jax.conversion.fields import Fields
    from eagle3_jax.conversion.heads import HeadKind

# Published heads were built for this many positions, however long the sequences of their targets
# are.
_USUAL_POSITIONS = 2048


class Target(NamedTuple):
    """A target with its name for tables and messages."""

    name: str
    config: DecoderConfig
    weights: str = "bfloat16"  #: How its layers are published, a key of ``WEIGHT_BITS``.
    stored: LayerBits | None = None  #: The bits of its weights, if its file is quantised.


class Head(NamedTuple):
    """A drafter with its name for tables and messages."""

    name: str
    config: Eagle3Config | Sizes | None  #: ``None`` for plain decoding.


def read_target(source: str | None) -> Target:
    """Returns a named target, or the target of a ``config.json``, quantized or not.

    Raises:
        ValueError: The file is missing or of an unknown family; the message gives the reason.
    """
    name = known_name(source, KNOWN_MODELS) if source else None
    if name is not None:
        return Target(name, KNOWN_MODELS[name], PUBLISHED_WEIGHTS.get(name, "bfloat16"))

    from eagle3_jax.conversion.families import read_config
    from eagle3_jax.conversion.quantised import stored_bits

    fields = _fields(source, "target")
    target = Target(source or "the bundled target", read_config(fields))
    bits = stored_bits(fields, Path(fields.where).parent, target.config.num_layers)
    if bits is None:
        return target
    kind, *of_layers = bits
    return target._replace(weights=kind, stored=LayerBits(*of_layers))


def read_head(source: str | None, target: Target, *, bundled: bool) -> Head:
    """Returns the head, the draft model or the named drafter of ``--drafter``.

    Args:
        source: The value of ``--drafter``.
        target: The target.
        bundled: Whether the target is the bundled one.

    Raises:
        ValueError: The file is missing or lacks a field that a plan needs; the message gives the
            reason.
    """
    if source == "none":
        return Head("none", None)
    if source == OWN_MODULES:
        return _own_modules(target, bundled=bundled)
    if source is not None and is_named(source):
        return _named(source, target)
    if source is None and not bundled:
        # Which layers it reads changes no size, and a shallow target has no default for them.
        usual = usual_head(target.config, aux_layers=(0, 1, 2))
        config = dataclasses.replace(usual, max_positions=_USUAL_POSITIONS)
        return Head(f"usual head for {target.name}", config)

    from eagle3_jax.conversion.heads import HEADS

    fields = _fields(source, "eagle3")
    name = source or "the bundled head"
    method = _method_of(fields)
    if method not in HEADS:
        return Head(name, _language_model(fields, target))

    kind = HEADS[method]
    config = kind.read_config(fields, target.config)
    if type(config) is Eagle3Config:
        return Head(name, config)
    return Head(name, _sizes_of_head(kind, config, target))


def _sizes_of_head(kind: HeadKind, config: Any, target: Target) -> Sizes:
    output = target.config.vocab_size * target.config.width
    return head_sizes(kind.classes[1](config), f"{kind.title(config)} head", output)


def _own_modules(target: Target, *, bundled: bool) -> Head:
    """Returns the sizes of the MTP modules that the target's ``config.json`` states."""
    from eagle3_jax.conversion.families import described
    from eagle3_jax.conversion.heads import HEADS
    from eagle3_jax.conversion.heads.mtp import modules_config

    if target.name in KNOWN_MODELS:
        raise Misuse(
            f"--drafter {OWN_MODULES}: {target.name} is known by its layers alone; give the"
            " directory with its config.json as --target"
        )
    fields = _fields(None if bundled else target.name, "target")
    family, text_fields, _ = described(fields)
    config = modules_config(text_fields, family)
    if config is None:
        raise Misuse(
            f"--drafter {OWN_MODULES}: {fields.where} states no MTP modules; name another drafter"
        )
    return Head(OWN_MODULES, _sizes_of_head(HEADS["mtp"], config, target))


def _language_model(fields: Fields, target: Target) -> Sizes:
    from eagle3_jax.conversion.families import read_config

    config = read_config(fields)
    if config.vocab_size != target.config.vocab_size:
        raise Misuse(
            f"{fields.where} describes a language model of {config.vocab_size} tokens and"
            f" {target.name} has {target.config.vocab_size}; a draft model needs the target's own"
        )
    return dataclasses.replace(sizes_of(config), target_width=target.config.width)


def _named(source: str, target: Target) -> Head:
    """Returns the sizes of a drafter without files."""
    name, number = parts_of(source)
    if not number:
        return Head(source, Sizes(name, target.config.width, is_parallel=True))

    layers = target.config.layers
    if number >= len(layers):
        raise Misuse(
            f"--drafter {source}: {target.name} has {len(layers)} layers, so give 1 to"
            f" {len(layers) - 1}"
        )
    sizes = sizes_of(dataclasses.replace(target.config, layers=layers[:number]))
    return Head(source, dataclasses.replace(sizes, method="layer skip", owned=Parameters()))


def _method_of(fields: Fields) -> str:
    """Returns the method of a drafter.

    Its tensors tell it if the file is present, otherwise its configuration.
    """
    from eagle3_jax.conversion.errors import CheckpointError
    from eagle3_jax.conversion.families import FAMILIES, WRAPPERS
    from eagle3_jax.conversion.heads import HEADS, Signs
    from eagle3_jax.conversion.native import TARGET
    from eagle3_jax.conversion.reading import identify

    path = Path(fields.where)
    directory = path.parent
    if path.suffix != ".gguf" and any(directory.glob("*.safetensors")):
        with contextlib.suppress(CheckpointError):
            return identify(directory)

    signs = Signs.read(fields)
    method = next((kind.name for kind in HEADS.values() if kind.recognise(signs)), None)
    if method is not None:
        return method

    # Official files do not name their method: EAGLE-3's have a draft vocabulary, EAGLE-1's have one
    # layer.
    if fields.get("draft_vocab_size") is not None:
        return "eagle3"
    if fields.get("num_hidden_layers") == 1:
        return "eagle1"
    if fields.get("model_type") not in {*FAMILIES, *WRAPPERS}:
        raise Misuse(f"{fields.where} is that of no draft head and no language model that is known")
    return TARGET


def _fields(source: str | None, part: str) -> Fields:
    from eagle3_jax.conversion.files import NATIVE_FILE
    from eagle3_jax.conversion.sidecars import config_of

    suggest = similar_targets if part == "target" else similar_drafters
    directory = locate(source, part, ("config.json",), suggest=suggest)
    if (directory / NATIVE_FILE).is_file():
        raise Misuse(
            f"{directory} is in the native layout; give the checkpoint that it was converted from"
        )
    return config_of(directory)
