"""Describes a checkpoint, loadable or not."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from eagle3_jax.conversion import native
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
from eagle3_jax.conversion.families import FAMILIES, WRAPPERS, described
from eagle3_jax.conversion.files import is_gguf
from eagle3_jax.conversion.heads import HEADS
from eagle3_jax.conversion.reading import (
    Opened,
    head_of,
    layout_of,
    note_of_modules,
    open_checkpoint,
    target_of,
)
from eagle3_jax.conversion.rules import flatten
from eagle3_jax.conversion.sidecars import tokenizer_config_of, tokenizer_of
from eagle3_jax.conversion.targets import TargetCheckpoint
from eagle3_jax.models.config import GatedDelta
from eagle3_jax.text.template import ChatTemplate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """The facts about a checkpoint."""

    kind: str  #: Kind of checkpoint in words, such as ``draft head: EAGLE-3``.
    dialect: str  #: The project whose layout it has.
    loadable: bool  #: Whether this library can load it.
    problem: str  #: The reason why it cannot be loaded; empty when it is loadable.
    #: Missing inputs such as the target of a head, or tensors that are left out; empty otherwise.
    note: str
    #: Format of quantised weights; empty if weights are not quantised or the format is unsupported.
    quantisation: str
    #: Number of weights of a target, without a module that drafts or an encoder of images. For
    #: other checkpoints, number of stored floating-point numbers.
    num_parameters: int
    num_bytes: int  #: Bytes of all tensors.
    num_tensors: int  #: Number of stored tensors.
    dtypes: dict[str, int]  #: Number of parameters stored in each dtype.
    config: dict[str, Any]  #: The unchanged fields of the configuration file.
    has_tokenizer: bool  #: Whether there is a ``tokenizer.json``, or a GGUF file with a tokenizer.
    chat_template: str  #: The chat template; empty if there is none.
    stop_tokens: tuple[int, ...]  #: Ids that end a text of a target.
    source: Path  #: The directory, or the GGUF file.

    def to_json(self) -> dict[str, Any]:
        """Returns the fields as JSON values."""
        return {**dataclasses.asdict(self), "source": str(self.source)}


def describe(directory: str | Path) -> Description:
    """Describes a checkpoint, loadable or not.

    Raises:
        CheckpointError: The directory is not a checkpoint.
    """
    opened = open_checkpoint(directory)
    path = opened.directory
    stored = opened.stored
    if stored is None:
        tensors = native.read_leaves(path)
        config = dict(native.read_description(path).values)
    else:
        tensors = stored.held or stored.tensors
        config = dict(stored.config)

    reading = _read(opened, config, tensors)
    has_tokenizer, refusal = _tokenizer(path)
    template = None
    try:
        template = ChatTemplate.from_config(tokenizer_config_of(path))
    except ValueError as error:
        refusal = refusal or str(error)
    problem = reading.problem or refusal

    dtypes = collections.Counter[str]()
    for tensor in tensors.values():
        # Integers, as in d2t, are not parameters. numpy does not count the types of ml_dtypes as
        # floats.
        if not np.issubdtype(tensor.dtype, np.integer) and tensor.dtype != np.bool_:
            dtypes[getattr(tensor, "label", str(tensor.dtype))] += tensor.size
    num_parameters = sum(dtypes.values())
    words = ""
    target = reading.target
    if target is not None:
        # One stored number may hold several weights, and a file more than the target: a module that
        # drafts, an encoder of images.
        num_parameters = sum(leaf.size for _, leaf in flatten(target.params))
    if target is not None and target.quantisation is not None:
        words = target.quantisation.words

    return Description(
        kind=_label(opened.kind, config),
        dialect=layout_of(opened),
        loadable=not problem,
        problem=problem,
        note=reading.note,
        quantisation=words,
        num_parameters=num_parameters,
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        num_tensors=len(tensors),
        dtypes=dict(dtypes),
        config=config,
        has_tokenizer=has_tokenizer,
        chat_template="" if template is None else template.source,
        stop_tokens=() if target is None else target.stop_tokens,
        source=path,
    )


def _tokenizer(path: Path) -> tuple[bool, str]:
    """Tells whether there is a tokenizer, and why a GGUF file's tokenizer is unsupported."""
    if not is_gguf(path):
        return (path / "tokenizer.json").is_file(), ""
    try:
        return tokenizer_of(path) is not None, ""
    except CheckpointError as error:
        return True, str(error)


class _Reading(NamedTuple):
    """What an attempt to read a checkpoint tells."""

    problem: str = ""  #: The reason why it cannot be loaded; empty when it can.
    note: str = ""  #: What a user should know of it.
    target: TargetCheckpoint | None = None  #: The target, if it is one that can be loaded.


def _read(opened: Opened, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> _Reading:
    try:
        if opened.kind in HEADS:
            return _Reading(note=head_of(opened).note)
        target = target_of(opened)
    except TargetNeededError as error:
        return _Reading(note=str(error))
    except CheckpointError as error:
        return _Reading(problem=str(error))

    wrapper = None if opened.stored is None else described(opened.stored.fields).wrapper
    notes = [] if wrapper is None else [wrapper.note(tensors)]
    notes += filter(None, [note_of_modules(opened)])
    if target.quantisation is not None:
        kept_as = target.quantisation.kept_as
        alternative = f", or kept as they are (--weights {kept_as})" if kept_as else ""
        notes.append(f"its weights are computed exactly from what is stored{alternative}")
    if not any(isinstance(layer.mixer, GatedDelta) for layer in target.config.layers):
        notes.append(
            "it may be given as the drafter of a larger target with the same tokenizer too"
        )
    return _Reading(note="; ".join(notes), target=target)


def _label(kind: str, config: Mapping[str, Any]) -> str:
    """Returns a kind in words, by the ``config.json`` or the description of a native checkpoint."""
    if kind in HEADS:
        return f"draft head: {HEADS[kind].label}"
    model_type = str(config.get("family", config.get("model_type")))
    if model_type in WRAPPERS:
        model_type = WRAPPERS[model_type].family(config)
    family = FAMILIES.get(model_type)
    return (
        f"target: {family.label}"
        if family
        else "language model of another architecture (not loadable here)"
    )
