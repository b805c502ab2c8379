"""What `eagle3 plan` plans for, from a ``config.json``, all that it ever downloads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from eagle3_jax.cli._errors import Misuse
from eagle3_jax.models.config import DecoderConfig, Eagle3Config, usual_head
from eagle3_jax.named import is_named
from eagle3_jax.theory.known_models import KNOWN_MODELS, known_name

if TYPE_CHECKING:
    from conversion.fields import Fields

# A head that is not named is one like those published, whose files say so whatever their targets reach.
_USUAL_POSITIONS = 2048


class Target(NamedTuple):
    """What is planned for.

    Attributes:
        name: For tables and messages.
        config: Its description.
    """

    name: str
    config: DecoderConfig


class Head(NamedTuple):
    """What drafts for it.

    Attributes:
        name: For tables and messages.
        config: Its description; ``None`` for plain decoding.
    """

    name: str
    config: Eagle3Config | None


def read_target(source: str | None) -> Target:
    """A named target, or that of a ``config.json``, quantised or not.

    Raises:
        ValueError: There is none, or it is of no family; the message says why.
    """
    from conversion.families import family_of

    name = known_name(source, KNOWN_MODELS) if source else None
    if name is not None:
        return Target(name, KNOWN_MODELS[name])
    fields = _fields(source, "target")
    config = family_of(fields.get("model_type"), fields.where).read_config(fields)
    return Target("the bundled target" if source is None else source, config)


def read_head(source: str | None, target: Target, *, bundled: bool) -> Head:
    """The head that ``--drafter`` names.

    Args:
        source: As it was given.
        target: What it drafts for.
        bundled: Whether that is the bundled one.

    Raises:
        ValueError: There is none, or it is no EAGLE-3 head that is computed here; the message says why.
    """
    from conversion.heads import HEADS, LOADABLE, Signs

    if source == "none":
        return Head("none", None)
    if source is not None and is_named(source):
        raise Misuse(f"--drafter {source} adds no weights to plan for; name a head, or 'none'")
    if source is None and not bundled:
        # Which layers it reads changes no size, and a shallow target has no default for them.
        usual = usual_head(target.config, aux_layers=(0, 1, 2))
        return Head(f"usual head for {target.name}", dataclasses.replace(usual, max_positions=_USUAL_POSITIONS))
    fields = _fields(source, "eagle3")
    signs = Signs.of(fields.values, (), fields.where)
    kind = next((kind for kind in HEADS.values() if kind.recognise(signs)), None)
    if kind is not None and kind.read is None:
        raise Misuse(f"{fields.where} is that of {kind.difference}; plans are made for {LOADABLE} heads")
    # Official files do not say what they are.
    if kind is None and fields.get("draft_vocab_size") is None:
        raise Misuse(f"{fields.where} has no draft_vocab_size, so it is not the config.json of an EAGLE-3 head")
    kind = kind or HEADS["eagle3"]
    if kind.read_config is None:
        raise Misuse(f"{fields.where} is that of a {kind.label} head, for which no plans are made")
    return Head("the bundled head" if source is None else source, kind.read_config(fields, target.config))


def _fields(source: str | None, part: str) -> Fields:
    from conversion.fields import Fields
    from conversion.files import NATIVE_FILE, read_json
    from eagle3_jax.sources import bundled

    directory = bundled(part) if source is None else Path(source)
    if source is not None and not directory.exists() and source.count("/") == 1 and not source.startswith((".", "~")):
        path = _download_config(source)
    elif source is not None and not directory.is_dir():
        raise Misuse(f"{source} is neither a directory, a hub id such as org/name, nor a known model; see --help")
    elif (directory / NATIVE_FILE).is_file():
        raise Misuse(f"{directory} is in the native layout; give the checkpoint that it was converted from")
    else:
        path = directory / "config.json"
    return Fields(read_json(path), str(path))


def _download_config(source: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise Misuse(
            f"{source} is no local directory, and hub ids need huggingface_hub: pip install 'eagle3-jax[hub]'"
        ) from None
    try:
        return Path(hf_hub_download(source, "config.json"))
    except Exception as error:  # the hub's errors have no common type that is public
        reason = str(error).strip().splitlines()[0]
        raise Misuse(f"{source} is no local directory and its config.json cannot be fetched: {reason}") from None
