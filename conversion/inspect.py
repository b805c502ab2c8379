"""A description of whatever lies in a checkpoint directory, without needing to run it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from eagle3_jax.conversion import kinds
from eagle3_jax.conversion.errors import CheckpointError, TargetNeededError
from eagle3_jax.conversion.families import described
from eagle3_jax.conversion.fields import Fields
from eagle3_jax.conversion.files import NATIVE_FILE, checked_directory, read_json
from eagle3_jax.conversion.heads import HEADS
from eagle3_jax.conversion.native import is_native, read_description, read_leaves
from eagle3_jax.conversion.reading import read_head, read_target
from eagle3_jax.conversion.rules import flatten
from eagle3_jax.conversion.targets import TargetCheckpoint
from eagle3_jax.conversion.tensors import read_tensors
from eagle3_jax.models.config import GatedDelta


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What a directory holds.

    Attributes:
        kind: In words, such as ``draft head: EAGLE-3``.
        dialect: Whose layout it is in.
        loadable: Whether this library reads it.
        problem: Why not; empty when it is loadable.
        note: What else it needs, such as its target, or what reading leaves out; empty otherwise.
        quantisation: How its weights are quantised; empty when they are not, or it is not one that is read.
        num_parameters: Floating-point numbers stored; of a quantised target all of its weights.
        num_bytes: Bytes of all tensors.
        num_tensors: Tensors stored.
        dtypes: Parameters stored in each dtype.
        config: The configuration file as it is.
        has_tokenizer: Whether there is a ``tokenizer.json``.
        source: The directory.
    """

    kind: str
    dialect: str
    loadable: bool
    problem: str
    note: str
    quantisation: str
    num_parameters: int
    num_bytes: int
    num_tensors: int
    dtypes: dict[str, int]
    config: dict[str, Any]
    has_tokenizer: bool
    source: Path

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**dataclasses.asdict(self), "source": str(self.source)}


def describe(directory: str | Path) -> Description:
    """Describe a checkpoint, loadable or not.

    Raises:
        CheckpointError: It is no checkpoint.
    """
    path = checked_directory(directory)
    kind = kinds.identify(path)
    native = is_native(path)
    tensors = read_leaves(path) if native else read_tensors(path)
    config = read_json(path / (NATIVE_FILE if native else "config.json"))
    described = read_description(path).values if native else config
    problem, note, quantised = _obstacles(path, kind, config, tensors)
    dtypes: dict[str, int] = {}
    for tensor in tensors.values():
        # Maps such as d2t are no parameters. The floats of ml_dtypes have a kind of their own.
        if not np.issubdtype(tensor.dtype, np.integer) and tensor.dtype != np.bool_:
            dtypes[str(tensor.dtype)] = dtypes.get(str(tensor.dtype), 0) + math.prod(tensor.shape)
    if native:
        dialect = "jax"
    else:
        dialect = HEADS[kind].dialect(config, tensors) if kind in HEADS else "huggingface"
    return Description(
        kind=kinds.label(kind, described),
        dialect=dialect,
        loadable=not problem,
        problem=problem,
        note=note,
        quantisation="" if quantised is None else quantised.quantisation.words,  # type: ignore[union-attr]
        num_parameters=sum(dtypes.values()) if quantised is None else _weights(quantised),
        num_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        num_tensors=len(tensors),
        dtypes=dtypes,
        config=config,
        has_tokenizer=(path / "tokenizer.json").is_file(),
        source=path,
    )


def _obstacles(
    path: Path, kind: str, config: Mapping[str, Any], names: Collection[str]
) -> tuple[str, str, TargetCheckpoint | None]:
    """Why it cannot be loaded, what has to be given with it or was left out, and the target where that is quantised."""
    try:
        if kind in HEADS:
            return "", read_head(path).note, None
        target = read_target(path)
        wrapper = described(Fields(config, str(path))).wrapper if not is_native(path) else None
        notes = [] if wrapper is None else [wrapper.note(names)]
        if target.quantisation is not None:
            notes.append("its weights are computed exactly from what is stored, or kept in FP8 (--weights fp8)")
        if not any(isinstance(layer.mixer, GatedDelta) for layer in target.config.layers):
            notes.append("it may be given as the drafter of a larger target with the same tokenizer too")
        return "", "; ".join(notes), target if target.quantisation is not None else None
    except TargetNeededError as error:
        return "", str(error), None
    except CheckpointError as error:
        return str(error), "", None


def _weights(target: TargetCheckpoint) -> int:
    return sum(leaf.size for _, leaf in flatten(target.params))
